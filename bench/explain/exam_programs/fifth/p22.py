# SPDX-License-Identifier: Apache-2.0
#!/usr/bin/env python3
"""Molecular dynamics of a soft-sphere liquid with a fixed neighbour list; a second program shares the card."""
import os
import select
import sys
import time

import torch

import bench_kit as bk


# ------------------------------------------------------------------ the other program
def reindex_shard(a, b, seconds, gpu):
    """One slice of work of the search-index builder."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(2):
            torch.mm(a, b)
        if gpu:
            torch.cuda.synchronize()


def index_builder(o):
    bk.die_with_parent()
    n = 6144 if o.gpu else 128
    dt = torch.bfloat16 if o.gpu else torch.float32
    a = torch.randn(n, n, device=o.device).to(dt)
    b = torch.randn(n, n, device=o.device).to(dt)
    torch.mm(a, b)
    bk.fence(o.device)
    print("up", flush=True)
    level, slot, pending = 0.0, 0.016, ""
    while True:
        r, _, _ = select.select([sys.stdin], [], [], 0.02 if level == 0 else 0)
        if r:
            line = os.read(sys.stdin.fileno(), 4096).decode()
            if not line:
                return
            pending = (pending + line)
            done = pending.rsplit("\n", 1)
            if len(done) == 2:
                level, pending = float(done[0].split("\n")[-1]), done[1]
        if level > 0:
            reindex_shard(a, b, slot * level, o.gpu)
            if level < 1:
                time.sleep(slot * (1 - level))


# ------------------------------------------------------------------ the simulation
class Liquid:
    def __init__(self, o):
        n, k = (500, 8) if o.smoke else (o.rng.choice([400, 500, 600]) * 1000, 48)
        self.o, self.n = o, n
        g = torch.Generator().manual_seed(o.seed)
        self.x = torch.rand(n, 3, generator=g).to(o.device) * 30
        self.v = torch.zeros(n, 3, device=o.device)
        near = (torch.arange(n)[:, None] + torch.randint(1, 400, (n, k), generator=g)) % n
        self.near = near.to(o.device)
        self.pacer = bk.Pacer(o.device)

    def force(self, part):
        d = self.x[part, None, :] - self.x[self.near[part]]
        r2 = d.square().sum(-1, keepdim=True).add_(0.5)
        w = r2.reciprocal_().pow_(3)
        return (d * w).sum(1)

    def advance(self, dt=1e-4):
        f = [self.force(slice(a, min(self.n, a + 200_000))) for a in range(0, self.n, 200_000)]
        self.v.add_(torch.cat(f), alpha=dt).mul_(0.999)
        self.x.add_(self.v, alpha=dt)
        self.energy = self.v.square().sum()
        self.pacer.tick()


def main():
    o = bk.options()
    if o.role == "builder":
        return index_builder(o)
    share = o.rng.uniform(0.25, 0.42)
    child = bk.launch(__file__, "builder", o)
    try:
        sim = Liquid(o)
        child.stdout.readline()
        with torch.no_grad():
            bk.mean_step(sim.advance, 0.1 if o.smoke else 0.8, o.device)
            base = bk.mean_step(sim.advance, o.probe, o.device)

            def press(level):
                child.stdin.write(f"{level:.4f}\n")
                child.stdin.flush()
                time.sleep(0.06)

            def measure(level):
                press(level)
                return bk.mean_step(sim.advance, o.probe * 1.5, o.device)

            level = bk.tune(measure, base, share, 0.5, 1.0, whole=False)
            on, off = bk.two_phases(sim.advance, o, lambda: press(level), lambda: press(0))
    finally:
        bk.stop(child)
    bk.truth(on, off, "gpu_cotenant", "reindex_shard",
             f"process {child.pid} runs matrix products on the same card for {level:.2f} of the time")


if __name__ == "__main__":
    main()
