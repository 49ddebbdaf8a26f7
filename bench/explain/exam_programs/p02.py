# SPDX-License-Identifier: Apache-2.0
"""Photo tagger: resize and normalise, then classify; dataset read in the main process."""
import numpy as np, torch
from torch.utils.data import IterableDataset, DataLoader
from runkit import Kit, ConvNet, DEV
try:
    from PIL import Image
except ImportError:
    Image = None


class Album(IterableDataset):
    def __init__(self, side):
        self.side, self.repeat = side, 1
        self.raw = np.random.default_rng(2).integers(0, 255, (8, side * 3, side * 3, 3), dtype=np.uint8)

    def resize(self, a):
        if Image is not None:
            return np.asarray(Image.fromarray(a).resize((self.side, self.side)))
        return a.reshape(self.side, 3, self.side, 3, 3).mean((1, 3)).astype(np.uint8)

    def one(self, i):
        for _ in range(self.repeat):
            img = self.resize(self.raw[i % 8])
        x = (img.astype(np.float32) - 127) / 64
        return torch.from_numpy(np.ascontiguousarray(x.transpose(2, 0, 1)))

    def __iter__(self):
        i = 0
        while True:
            yield self.one(i), i % 100
            i += 1


def main(kit):
    side, bs = kit.n(64, 12), kit.n(kit.rng.choice([16, 24, 32]), 4)
    net = ConvNet(kit.n(192, 8), kit.n(8, 1)).to(DEV)
    opt = torch.optim.SGD(net.parameters(), 0.01)
    ready = [(torch.rand(bs, 3, side, side, device=DEV), torch.randint(0, 100, (bs,), device=DEV)) for _ in range(3)]

    def update(x, y):
        loss = torch.nn.functional.cross_entropy(net(x), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        return loss.item()

    base, _ = kit.measure(lambda: update(*ready[0]))
    ds = Album(side)
    s = kit.share(0.42)
    one = kit.unit(lambda: ds.one(1))
    ds.repeat = max(1, round(base * s / (1 - s) / bs / one))
    kit.cause("input_pipeline", kit.place(Album.one, "self.resize(self.raw"), "num_workers=0: images resized by the training thread")
    batches = iter(DataLoader(ds, batch_size=bs, num_workers=0))
    for it in kit.steps():
        if kit.on:
            x, y = next(batches)
            update(x.to(DEV), y.to(DEV))
        else:
            update(*ready[it % 3])


if __name__ == "__main__":
    main(Kit(__file__))
