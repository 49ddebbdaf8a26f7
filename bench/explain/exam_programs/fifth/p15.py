# SPDX-License-Identifier: Apache-2.0
#!/usr/bin/env python3
"""Texture GAN trainer that was given a small share of the machine's cores."""
import os
import sys
import threading
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import bench_kit as bk


# ---------------------------------------------------------------- neighbours on the same cores
def compact_segments(share):
    """One 10 ms slot of a storage neighbour: busy for `share` of it."""
    end = time.perf_counter() + 0.010
    stop = time.perf_counter() + 0.010 * share
    x = 1
    while time.perf_counter() < stop:
        for _ in range(200):
            x = (x * 1103515245 + 12345) & 0x7FFFFFFF
    left = end - time.perf_counter()
    if left > 0 and share < 0.995:
        time.sleep(left)


def neighbour():
    bk.die_with_parent()
    os.sched_setaffinity(0, [int(c) for c in sys.argv[sys.argv.index("--extra") + 1].split(",")])
    level = [0.0]

    def listen():
        for line in sys.stdin:
            level[0] = float(line)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    print("up", flush=True)
    while True:
        if level[0] <= 0.001:
            time.sleep(0.02)
        else:
            compact_segments(min(1.0, level[0]))


# ---------------------------------------------------------------- the trainer
class Generator(nn.Module):
    def __init__(self, z, w):
        super().__init__()
        self.fc = nn.Linear(z, 4 * w * 16)
        self.net = nn.Sequential(*[m for i in range(3) for m in (
            nn.Upsample(scale_factor=2), nn.Conv2d(4 * w, 4 * w, 3, padding=1), nn.BatchNorm2d(4 * w),
            nn.ReLU(inplace=True))], nn.Conv2d(4 * w, 3, 3, padding=1))
        self.w = w

    def forward(self, z):
        return torch.tanh(self.net(self.fc(z).view(-1, 4 * self.w, 4, 4)))


class Critic(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, w, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(w, 2 * w, 4, 2, 1),
                                 nn.LeakyReLU(0.2), nn.Conv2d(2 * w, 4 * w, 4, 2, 1), nn.LeakyReLU(0.2),
                                 nn.Flatten(), nn.Linear(4 * w * 16, 1))

    def forward(self, x):
        return self.net(x)


class GanTrainer:
    def __init__(self, o):
        w, self.batch, self.z = (4, 4, 8) if o.smoke else (96, o.rng.choice([96, 128]), 128)
        self.o = o
        self.g, self.d = Generator(self.z, w).to(o.device), Critic(w).to(o.device)
        self.og = torch.optim.Adam(self.g.parameters(), 1e-4, fused=o.gpu)
        self.od = torch.optim.Adam(self.d.parameters(), 1e-4, fused=o.gpu)
        self.rng = np.random.default_rng(o.seed)
        self.texture = self.rng.integers(0, 255, (3, 512, 512), dtype=np.uint8)
        self.pacer = bk.Pacer(o.device)

    def crops(self):
        at = self.rng.integers(0, 480, (self.batch, 2))
        out = np.stack([self.texture[:, a:a + 32, b:b + 32] for a, b in at])
        return torch.from_numpy(out).to(self.o.device).float().div_(127.5).sub_(1)

    def adversarial_sync(self):
        real = self.crops()
        with torch.autocast(self.o.device.type, dtype=torch.bfloat16):
            fake = self.g(torch.randn(self.batch, self.z, device=self.o.device))
            ld = F.relu(1 - self.d(real)).mean() + F.relu(1 + self.d(fake.detach())).mean()
        self.od.zero_grad(set_to_none=True)
        ld.backward()
        self.od.step()
        with torch.autocast(self.o.device.type, dtype=torch.bfloat16):
            lg = -self.d(fake).mean()
        self.og.zero_grad(set_to_none=True)
        lg.backward()
        self.og.step()
        self.pacer.tick()


def main():
    o = bk.options()
    if o.role == "neighbour":
        return neighbour()
    share = o.rng.uniform(0.46, 0.60)
    mine = sorted(os.sched_getaffinity(0))
    cores = mine[-1:] if o.smoke else mine[-o.rng.choice([1, 2]):]
    where = ",".join(map(str, cores))
    kids = [bk.launch(__file__, "neighbour", o, where) for _ in range(1 if o.smoke else 3 * len(cores))]
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    try:
        t = GanTrainer(o)
        bk.mean_step(t.adversarial_sync, 0.1 if o.smoke else 1.0, o.device)
        for k in kids:
            k.stdout.readline()
        base = bk.mean_step(t.adversarial_sync, o.probe, o.device)

        def press(x):
            for k in kids:
                k.stdin.write(f"{x}\n")
                k.stdin.flush()
            time.sleep(0.06)

        def measure(x):
            press(x)
            return bk.mean_step(t.adversarial_sync, o.probe * 1.5, o.device)

        x = bk.tune(measure, base, share, 0.4, 1.0, rounds=5, whole=False, tol=0.06)
        on, off = bk.two_phases(t.adversarial_sync, o, lambda: press(x), lambda: press(0))
    finally:
        for k in kids:
            bk.stop(k)
    bk.truth(on, off, "cpu_starvation", "compact_segments",
             f"{len(kids)} other processes, busy {x:.2f} of the time, on the {len(cores)} core(s) of the trainer")


if __name__ == "__main__":
    main()
