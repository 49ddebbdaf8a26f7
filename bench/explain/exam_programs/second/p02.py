# SPDX-License-Identifier: Apache-2.0
"""Keyword spotting on one-second clips."""
import numpy as np, torch
from torch.utils.data import Dataset, DataLoader
from rig import Kit, ConvNet, DEV


class Clips(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return 50_000_000

    def __getitem__(self, i):
        return np.random.default_rng(i % 64).standard_normal(self.n).astype(np.float32), i % 30


class Pack:
    """makes a batch out of clips: spectrogram and speed changes"""
    def __init__(self, rounds, bins):
        self.rounds, self.bins = rounds, bins

    def shape(self, w):
        f = np.lib.stride_tricks.sliding_window_view(w, 2 * self.bins)[::self.bins]
        return np.log1p(np.abs(np.fft.rfft(f * np.hanning(2 * self.bins), axis=1)[:, :self.bins])).astype(np.float32)

    def __call__(self, items):
        out = []
        for w, _ in items:
            for r in range(self.rounds):
                s = self.shape(np.roll(w, 17 * r))
            out.append(s)
        x = torch.from_numpy(np.stack(out))[:, None].expand(-1, 3, -1, -1).contiguous()
        return x, torch.tensor([y for _, y in items])


def main(kit):
    torch.set_num_threads(2)
    bs, n, bins = kit.n(kit.rng.choice([64, 96, 128]), 4), kit.n(16000, 800), kit.n(128, 16)
    workers = kit.n(kit.rng.choice([3, 4, 6]), 1)
    net = ConvNet(kit.n(128, 8), kit.n(5, 1), 30).to(DEV)
    opt = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    x0, y0 = Pack(1, bins)([(np.zeros(n, np.float32), 1)] * bs)
    x0, y0 = x0.to(DEV), y0.to(DEV)

    def fit(x, y):
        opt.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(net(x), y).backward()
        opt.step()

    base, _ = kit.measure(lambda: fit(x0, y0))
    w = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    unit = kit.unit(lambda: Pack(1, bins).shape(w), 20)
    s = kit.share(0.72, 0.95, 1.1)
    pack = Pack(max(1, round(workers * base / (1 - s) / bs / unit)), bins)
    kit.cause("input_pipeline", kit.place(Pack.__call__, "self.shape("), "the workers' collate function is too slow")
    feed = iter(DataLoader(Clips(n), batch_size=bs, num_workers=workers, collate_fn=pack,
                           pin_memory=DEV.type == "cuda", prefetch_factor=2))
    for k in feed._workers:
        kit.child(k)
    for _ in kit.steps():
        x, y = x0, y0
        if kit.on:
            x, y = next(feed)
            x, y = x.to(DEV, non_blocking=True), y.to(DEV, non_blocking=True)
        fit(x, y)


if __name__ == "__main__":
    main(Kit(__file__))
