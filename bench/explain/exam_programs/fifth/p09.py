# SPDX-License-Identifier: Apache-2.0
#!/usr/bin/env python3
"""Two-rank data-parallel training of an image regressor; gradients averaged over gloo on the host."""
import os
import random
import shutil
import tempfile

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn

import bench_kit as bk


class ShardFeeder:
    """Keeps the order of the samples of this rank's shard."""

    def __init__(self, seed, n, device, shape):
        self.rng = np.random.default_rng(seed)
        self.keys = self.rng.random(1 << 22).astype(np.float32)
        self.images = torch.randn(n, *shape, device=device)
        self.target = torch.randn(n, 1, device=device)

    def rebalance(self, amount):
        fresh = self.rng.random(amount, dtype=np.float32)
        self.keys[:amount] = fresh[np.argsort(fresh, kind="stable")]

    def draw(self, batch):
        k = int(self.rng.integers(0, len(self.images) - batch + 1))
        return self.images[k: k + batch], self.target[k: k + batch]


def make_net(w):
    mods, c = [], 3
    for i, k in enumerate([w, w, 2 * w, 2 * w]):
        mods += [nn.Conv2d(c, k, 3, stride=2 if i == 2 else 1, padding=1), nn.BatchNorm2d(k), nn.ReLU(inplace=True)]
        c = k
    return nn.Sequential(*mods, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 1))


class Replica:
    def __init__(self, o, rank):
        side, w, self.batch = (24, 4, 2) if o.smoke else (192, 48, random.Random(o.seed).choice([24, 32]))
        torch.manual_seed(o.seed)
        torch.backends.cudnn.benchmark = True
        torch.set_num_threads(2 if o.gpu else 1)
        self.o, self.rank = o, rank
        self.net = make_net(w).to(o.device)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=1e-3)
        self.feed = ShardFeeder(o.seed + rank, self.batch * 3, o.device, (3, side, side))
        self.order = torch.zeros(3, dtype=torch.int64)     # [go on, late amount, unused]
        total = sum(p.numel() for p in self.net.parameters())
        self.host = torch.empty(total, pin_memory=o.gpu)

    def average_gradients(self):
        flat = torch.cat([p.grad.reshape(-1) for p in self.net.parameters()])
        self.host.copy_(flat)
        dist.all_reduce(self.host)
        flat.copy_(self.host, non_blocking=True)
        flat.div_(2)
        at = 0
        for p in self.net.parameters():
            p.grad.copy_(flat[at: at + p.numel()].view_as(p))
            at += p.numel()

    def step(self):
        dist.broadcast(self.order, 0)
        if int(self.order[0]) == 0:
            return False
        if self.rank == 1 and int(self.order[1]) > 0:
            self.feed.rebalance(int(self.order[1]))
        x, y = self.feed.draw(self.batch)
        with torch.autocast(self.o.device.type, dtype=torch.bfloat16):
            loss = ((self.net(x).float() - y) ** 2).mean()
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.average_gradients()
        self.opt.step()
        return True


def join(rank, path):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)


def follower(o):
    bk.die_with_parent()
    join(1, o.extra)
    r = Replica(o, 1)
    while r.step():
        pass
    dist.destroy_process_group()


def leader(o):
    share = o.rng.uniform(0.25, 0.42)
    path = os.path.join(tempfile.mkdtemp(prefix="rv_"), "store")
    child = bk.launch(__file__, "rank1", o, path)
    try:
        join(0, path)
        r = Replica(o, 0)
        r.order[0] = 1
        bk.mean_step(r.step, 0.1 if o.smoke else 1.2, o.device)
        base = bk.mean_step(r.step, o.probe, o.device)

        def late(n):
            r.order[1] = n

        def measure(n):
            late(n)
            return bk.mean_step(r.step, o.probe, o.device)

        n = bk.tune(measure, base, share, 60_000 if o.gpu else 20_000, 1 << 22 if o.gpu else 60_000,
                    rounds=6 if o.gpu else 2)
        on, off = bk.two_phases(r.step, o, lambda: late(n), lambda: late(0))
        r.order[0] = 0
        r.step()
        dist.destroy_process_group()
        child.wait(timeout=10)
    finally:
        bk.stop(child)
        shutil.rmtree(os.path.dirname(path), ignore_errors=True)
    bk.truth(on, off, "straggler_rank", "ShardFeeder.rebalance",
             f"rank 1 sorts {n} keys before each step; rank 0 waits in average_gradients")


if __name__ == "__main__":
    opts = bk.options()
    follower(opts) if opts.role == "rank1" else leader(opts)
