# SPDX-License-Identifier: Apache-2.0
"""Curating pictures: features on the device, thumbnails by helpers next door."""
import stage
import multiprocessing
import os
import threading
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def thumbnails(cell, seed):
    """Shrinks pictures as they are asked for."""
    stage.tie_to_parent()
    rng = np.random.default_rng(seed)
    picture = rng.integers(0, 255, (96, 96), dtype=np.int32)
    while True:
        for _ in range(int(cell.get())):
            small = picture.reshape(48, 2, 48, 2).mean((1, 3))
            picture[:48, :48] = small.astype(np.int32)
        time.sleep(0.008)


class Sieve:
    """Cheap tests that need no network."""

    def __init__(self, seed, count):
        self.rng = np.random.default_rng(seed)
        self.names = [f"{k * 7919 % 100003:06d}.jpg" for k in range(4000)]
        self.count = count

    def pick(self):
        start = int(self.rng.integers(0, 3000))
        total = 0
        for k in range(self.count):
            name = self.names[(start + k) % 4000]
            if name.endswith(".jpg") and int(name[:6]) % 5:
                total += len(name)
        return total


class Curator:
    def __init__(self, args):
        tiny, self.dev = args.smoke, args.device
        self.kind = torch.float32 if tiny else torch.bfloat16
        width, depth, batch, side = (8, 3, 2, 32) if tiny else (256, 60, 16, 32)
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth)).to(self.dev, self.kind)
        self.lift = nn.Conv2d(3, width, 3, padding=1).to(self.dev, self.kind)
        self.pictures = torch.rand(batch, 3, side, side)
        self.sieve = Sieve(args.seed, 800 if tiny else 12000)
        if not tiny:
            self.convs = self.convs.to(memory_format=torch.channels_last)

    def step(self):
        offset = self.sieve.pick() % 7
        x = self.lift((self.pictures + offset * 0.01).to(self.dev).to(self.kind))
        for conv in self.convs:
            x = x + 0.1 * F.relu(conv(x))
        return x.float().mean((2, 3)).argmax(1).cpu().tolist()


def main():
    args = stage.arguments()
    torch.manual_seed(args.seed)
    home = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {home[len(home) // 2]})
    torch.set_num_threads(1)
    cell = stage.Cell()
    ctx = multiprocessing.get_context("fork")
    for k in range(2):
        ctx.Process(target=thumbnails, args=(cell, k), name=f"loader-{k}", daemon=True).start()
    pace = stage.Dial(15, hi=5000, listen=cell.set)
    curator = Curator(args)
    threading.Thread(target=time.sleep, args=(1e6,), name="sleep-backoff", daemon=True).start()
    with torch.inference_mode():
        stage.conduct(args, curator.step, [pace], settle=3, rest=0.1)


if __name__ == "__main__":
    main()
