# SPDX-License-Identifier: Apache-2.0
"""Keyword spotting: small convolutional network on augmented clips."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

import numpy as np
import exam_kit as kit


class Clips(Dataset):
    def __init__(self, batch, length, seed, taps):
        rng = np.random.default_rng(seed)
        self.raw = rng.standard_normal((4, batch, length), dtype=np.float32)
        self.label = rng.integers(0, 35, (4, batch))
        self.taps = taps                    # shared with the workers

    def __len__(self):
        return 1 << 40

    def sharpen(self, x):
        y = x.copy()
        for k in range(int(self.taps[0])):
            y += (0.3 / (k + 1)) * np.roll(x, k + 1, axis=1)
        return y

    def __getitem__(self, i):
        return torch.from_numpy(self.sharpen(self.raw[i % 4])), torch.from_numpy(self.label[i % 4])


class InOrder(torch.utils.data.Sampler):
    def __init__(self):
        pass

    def __iter__(self):
        i = 0
        while True:
            yield i
            i += 1

    def __len__(self):
        return 1 << 40


class Spotter(nn.Module):
    def __init__(self, ch, depth):
        super().__init__()
        self.front = nn.Conv1d(1, ch, 64, stride=16)
        self.mid = nn.Sequential(*[nn.Sequential(nn.Conv1d(ch, ch, 9, padding=4), nn.BatchNorm1d(ch), nn.ReLU())
                                   for _ in range(depth)])
        self.out = nn.Linear(ch, 35)

    def forward(self, x):
        return self.out(self.mid(self.front(x[:, None])).mean(-1))


class Training(kit.Job):
    detail = "one loader worker filters the clips in NumPy, slower than the device trains"
    settle_steps = 7

    def __init__(self, ctx):
        self.dev = ctx.dev
        self.batch = ctx.pick(8, 64, 96, 128)
        self.taps = torch.zeros(1).share_memory_()
        self.loader = DataLoader(Clips(self.batch, ctx.pick(2000, 8000), ctx.seed, self.taps), batch_size=None,
                                 sampler=InOrder(), num_workers=1, prefetch_factor=2,
                                 multiprocessing_context="fork")
        self.feed = iter(self.loader)
        self.net = Spotter(ctx.pick(8, 384, 512), ctx.pick(1, 8, 10)).to(ctx.dev)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=1e-3)
        self.levers = [kit.Lever("input_pipeline", "Clips.sharpen", self.set_taps, ctx.share(0.43, 0.57),
                                 start=ctx.pick(2, 20))]

    def set_taps(self, a):
        self.taps[0] = a

    def step(self):
        x, y = next(self.feed)
        x, y = x.to(self.dev), y.to(self.dev)
        loss = F.cross_entropy(self.net(x), y)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        return loss.item()

    def close(self):
        for w in getattr(self.feed, "_workers", []):
            w.kill()


if __name__ == "__main__":
    kit.main(Training)
