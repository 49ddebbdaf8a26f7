# SPDX-License-Identifier: Apache-2.0
"""Thumbnail classifier training."""
import zlib
import numpy as np, torch
from torch.utils.data import Dataset, DataLoader
from runkit import Kit, ConvNet, DEV


class Thumbs(Dataset):
    def __init__(self, side, rounds):
        self.side, self.rounds = side, rounds
        a = np.random.default_rng(1).integers(0, 40, (16, side, side, 3), dtype=np.uint8)
        self.blobs = [zlib.compress(x.tobytes(), 6) for x in a]

    def __len__(self):
        return 10_000_000

    def decode(self, blob):
        return np.frombuffer(zlib.decompress(blob), np.uint8).reshape(self.side, self.side, 3)

    def __getitem__(self, i):
        img = self.decode(self.blobs[i % 16])
        for _ in range(self.rounds):
            img = self.decode(self.blobs[(i + _) % 16])
            img = np.clip(img.astype(np.float32) * 1.1 - 3, 0, 255)
        x = np.ascontiguousarray(img.transpose(2, 0, 1), np.float32) / 255
        return x, i % 100


def main(kit):
    torch.set_num_threads(4)
    side, bs = kit.n(64, 16), kit.n(kit.rng.choice([48, 64, 96]), 4)
    workers = kit.n(kit.rng.choice([2, 3, 4]), 1)
    net = ConvNet(kit.n(128, 8), kit.n(6, 1)).to(DEV)
    opt = torch.optim.SGD(net.parameters(), 0.01)
    cached = [(torch.rand(bs, 3, side, side, device=DEV), torch.randint(0, 100, (bs,), device=DEV)) for _ in range(4)]

    def fit(x, y):
        loss = torch.nn.functional.cross_entropy(net(x), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        return loss

    base, _ = kit.measure(lambda: fit(*cached[0]))
    s = kit.share(0.65)
    one = kit.unit(lambda: Thumbs(side, 10)[3], 10) / 11
    ds = Thumbs(side, max(1, round(workers * base / (1 - s) / bs / one)))
    kit.cause("input_pipeline", kit.place(Thumbs.__getitem__, "self.decode(self.blobs[(i"), "workers decode too slowly")
    feed = iter(DataLoader(ds, batch_size=bs, num_workers=workers, pin_memory=DEV.type == "cuda", persistent_workers=True))
    for w in feed._workers:
        kit.child(w)
    for it in kit.steps():
        if kit.on:
            x, y = next(feed)
            x, y = x.to(DEV, non_blocking=True), y.to(DEV, non_blocking=True)
        else:
            x, y = cached[it % 4]
        loss = fit(x, y)
        if it % 20 == 19:
            loss.item()


if __name__ == "__main__":
    main(Kit(__file__))
