# SPDX-License-Identifier: Apache-2.0
"""Tile classifier for aerial images: a small residual CNN fed by worker processes."""
import threading
import time
import zlib

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from rig import Job


class TileReader(Dataset):
    """Tiles lie zlib-packed in memory; `levels` is shared with the worker processes."""

    def __init__(self, side, levels):
        r = np.random.default_rng(3)
        self.side = side
        self.levels = levels
        self.packed = []
        for _ in range(96):
            base = r.integers(0, 255, (3, side // 4, side // 4), dtype=np.uint8)
            self.packed.append(zlib.compress(np.kron(base, np.ones((1, 4, 4), np.uint8)).tobytes(), 1))

    def __len__(self):
        return 50_000_000

    def __getitem__(self, i):
        blob = self.packed[i % 96]
        a = np.frombuffer(zlib.decompress(blob), np.uint8)
        for lv in range(int(self.levels[0])):
            # every pyramid level starts from the packed tile again
            b = np.frombuffer(zlib.decompress(blob), np.uint8).reshape(3, self.side, self.side)
            a = np.maximum(b, 0).reshape(-1)
        img = a.reshape(3, self.side, self.side)
        if i & 1:
            img = img[:, :, ::-1]
        return torch.from_numpy(np.ascontiguousarray(img)), i % 45


class Res(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a = nn.Conv2d(c, c, 3, padding=1, bias=False)
        self.b = nn.Conv2d(c, c, 3, padding=1, bias=False)
        self.n = nn.BatchNorm2d(c)

    def forward(self, x):
        return F.relu(x + self.n(self.b(F.relu(self.a(x)))))


def idle_lock_holder(stop):
    while not stop.wait(0.5):
        pass


def main():
    job = Job(0.47, 0.76)
    side = job.pick(96, 112, 128, tiny=32)
    batch = job.pick(48, 64, tiny=4)
    width = job.pick(192, 224, 256, tiny=8)
    levels = torch.zeros(1).share_memory_()
    data = TileReader(side, levels)
    workers = 1 if job.smoke else job.rng.choice([4, 5, 6])
    it = iter(DataLoader(data, batch_size=batch, num_workers=workers, prefetch_factor=2))
    stop = threading.Event()
    t = threading.Thread(target=idle_lock_holder, args=(stop,), name="lock-monitor", daemon=True)
    t.start()

    net = nn.Sequential(nn.Conv2d(3, width, 5, stride=2, padding=2), *[Res(width) for _ in range(5)],
                        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 45)).to(job.dev)
    net = net.to(memory_format=torch.channels_last)
    opt = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)

    def step():
        x, y = next(it)
        x = x.to(job.dev, non_blocking=True).float().div_(255)
        y = y.to(job.dev, non_blocking=True)
        with torch.autocast(job.dev.type, torch.bfloat16, enabled=job.cuda):
            loss = F.cross_entropy(net(x), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        job.pace(1)

    def setk(k):
        levels[0] = k

    queue = 2 * workers + 2
    job.tune(step, setk, 8, 600, whole=True, settle=queue, rounds=5, secs=0.2)
    job.show(step, lambda: setk(0), [("input_pipeline", "TileReader.__getitem__")], settle=queue)
    stop.set()
    it._shutdown_workers()


if __name__ == "__main__":
    main()
