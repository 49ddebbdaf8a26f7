# SPDX-License-Identifier: Apache-2.0
"""Two data-parallel ranks share one device; each one prepares its own shard and the gradients are averaged."""
import os
import shutil
import sys
import tempfile
import time

import stage

if __name__ == "__main__" and "second" not in sys.argv:
    meet = os.path.join(tempfile.mkdtemp(prefix="meet"), "store")
    second = stage.child(__file__, "--role", "second", "--link", meet, *sys.argv[1:], stdin=stage.subprocess.DEVNULL,
                         stdout=stage.subprocess.DEVNULL)

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Shard:
    """One rank's documents; long documents take longer to prepare."""

    def __init__(self, seed, rows):
        rng = np.random.default_rng(seed)
        self.docs = rng.integers(0, 50_000, size=(rows, 64), dtype=np.int64)
        self.long = 0

    def prepare(self, n):
        total = 0
        for i in range(n + self.long):
            doc = self.docs[i % len(self.docs)]
            words, counts = np.unique(doc, return_counts=True)
            total += int(counts.max()) + int(words[0])
        return total


class Worker:
    def __init__(self, rank, st):
        self.rank, self.dev = rank, st.device
        d, self.rows = st.pick(1024, 32), st.pick(16384, 64)
        self.net = nn.Sequential(*[m for _ in range(st.pick(2, 2)) for m in (nn.Linear(d, d), nn.GELU())]).to(self.dev)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=1e-3)
        self.x = torch.randn(self.rows, d, device=self.dev)
        self.shard = Shard(rank, st.pick(4096, 256))
        size = sum(p.numel() for p in self.net.parameters())
        self.flat = torch.zeros(size, pin_memory=not st.smoke)
        self.passes = st.pick(12, 1)

    def local(self):
        self.shard.prepare(4)
        self.opt.zero_grad(set_to_none=True)
        for _ in range(self.passes):
            with torch.autocast(self.dev, dtype=torch.bfloat16):
                loss = self.net(self.x).float().pow(2).mean() / self.passes
            loss.backward()

    def average(self):
        grads = [p.grad for p in self.net.parameters()]
        self.flat.copy_(torch.cat([g.flatten() for g in grads]))
        dist.all_reduce(self.flat)
        at = 0
        for g in grads:
            g.copy_(self.flat[at:at + g.numel()].view_as(g), non_blocking=True)
            at += g.numel()

    def step(self):
        self.local()
        self.average()
        self.opt.step()


def join(rank, path, seconds):
    from datetime import timedelta
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2,
                            timeout=timedelta(seconds=120 + seconds))


def second_rank(args):
    st = stage.Stage(args, threads=2)
    worker = Worker(1, st)
    join(1, args.link, args.seconds)
    order = torch.zeros(2)
    while True:
        dist.broadcast(order, 0)
        if order[0] < 0:
            break
        worker.shard.long = int(order[1])
        worker.step()


def main(args):
    st = stage.Stage(args, threads=2)
    worker = Worker(0, st)
    join(0, meet, args.seconds)
    order = torch.zeros(2)
    stage.background(lambda: [time.sleep(0.2) for _ in iter(int, 1)], "checkpoint-fsync")

    def step():
        dist.broadcast(order, 0)
        worker.step()

    def turn(a):
        order[1] = float(a)

    def leave():
        order[0] = -1
        dist.broadcast(order, 0)
        shutil.rmtree(os.path.dirname(meet), ignore_errors=True)

    st.closers.append(leave)
    knob = stage.Knob("straggler_rank", "Shard.prepare", turn, st.pick(1500, 100), "heavy", alt="Worker.average")
    st.perform(step, [knob])


if __name__ == "__main__":
    a = stage.arguments()
    if a.role == "second":
        second_rank(a)
    else:
        main(a)
