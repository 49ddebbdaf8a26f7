# SPDX-License-Identifier: Apache-2.0
#!/usr/bin/env python3
"""Land-cover segmentation of satellite tiles: small U-Net, bf16, DataLoader workers."""
import threading
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import bench_kit as bk


class TileSet(IterableDataset):
    """Yields whole batches of (tiles uint8, labels uint8)."""

    def __init__(self, seed, side, batch, dial):
        self.seed, self.side, self.batch, self.dial = seed, side, batch, dial
        rng = np.random.default_rng(seed)
        self.bank = rng.integers(0, 255, (64, 3, side, side), dtype=np.uint8)
        self.labels = rng.integers(0, 6, (64, side, side), dtype=np.uint8)

    def _warp(self, tile, rng):
        s = self.side
        yy, xx = np.meshgrid(np.arange(s), np.arange(s), indexing="ij")
        a, b = rng.uniform(1, 4, 2)
        gy = np.clip(yy + a * np.sin(xx / 17.0), 0, s - 1).astype(np.int64)
        gx = np.clip(xx + b * np.cos(yy / 23.0), 0, s - 1).astype(np.int64)
        return tile[:, gy, gx]

    def _draw(self, rng):
        idx = rng.integers(0, len(self.bank), self.batch)
        tiles, labels = self.bank[idx], self.labels[idx]
        for j in range(int(self.dial[0])):
            k = j % self.batch
            tiles[k] = self._warp(tiles[k], rng)
        return torch.from_numpy(tiles), torch.from_numpy(labels)

    def __iter__(self):
        info = get_worker_info()
        rng = np.random.default_rng(self.seed * 100 + (info.id if info else 0))
        while True:
            yield self._draw(rng)


def block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True),
                         nn.Conv2d(o, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.d1, self.d2, self.d3 = block(3, w), block(w, 2 * w), block(2 * w, 4 * w)
        self.u2, self.u1 = block(6 * w, 2 * w), block(3 * w, w)
        self.out = nn.Conv2d(w, 6, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        c = self.d3(F.max_pool2d(b, 2))
        y = self.u2(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        y = self.u1(torch.cat([F.interpolate(y, scale_factor=2), a], 1))
        return self.out(y)


def main():
    o = bk.options()
    side, batch = (48, 2) if o.smoke else (256, o.rng.choice([16, 20, 24]))
    share = o.rng.uniform(0.46, 0.60)
    workers = 1 if o.smoke else o.rng.choice([3, 4])
    dial = torch.zeros(1).share_memory_()
    data = TileSet(o.seed, side, batch, dial)
    loader = DataLoader(data, batch_size=None, num_workers=workers, prefetch_factor=2, pin_memory=o.gpu)
    stream = iter(loader)                       # workers start before CUDA does

    quit_evt = threading.Event()
    threading.Thread(target=quit_evt.wait, name="checkpoint-writer", daemon=True).start()

    torch.backends.cudnn.benchmark = True
    net = UNet(8 if o.smoke else 64).to(o.device, memory_format=torch.channels_last)
    opt = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    pacer = bk.Pacer(o.device)

    def train_step():
        tiles, labels = next(stream)
        x = tiles.to(o.device, non_blocking=True).to(torch.float32).div_(255)
        x = x.contiguous(memory_format=torch.channels_last)
        y = labels.to(o.device, non_blocking=True).long()
        with torch.autocast(o.device.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(net(x).float(), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        pacer.tick()

    for _ in range(3 if o.smoke else 12):
        train_step()
    base = bk.mean_step(train_step, o.probe * 2, o.device)
    t0 = time.perf_counter()
    reps = 4
    for _ in range(reps):
        data._warp(data.bank[0], np.random.default_rng(0))
    cost = (time.perf_counter() - t0) / reps

    def measure(n):
        dial[0] = n
        for _ in range(2 * workers + 2):
            train_step()
        return bk.mean_step(train_step, o.probe, o.device, at_least=3 * workers)

    guess = base / (1 - share) * workers / cost
    n = bk.tune(measure, base, share, guess, 4000, rounds=3, tol=0.06)
    measure(n)
    t_on, t_off = bk.two_phases(train_step, o, lambda: dial.fill_(n), lambda: dial.zero_(),
                                settle=2 * workers + 6)
    bk.truth(t_on, t_off, "input_pipeline", "TileSet._warp",
             f"{workers} DataLoader workers warp {n} tiles a batch of {batch}; main waits for next()")
    quit_evt.set()
    stream._shutdown_workers()


if __name__ == "__main__":
    main()
