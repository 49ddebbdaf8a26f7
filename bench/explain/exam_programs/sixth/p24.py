# SPDX-License-Identifier: Apache-2.0
"""Node classification with sampled neighbourhoods; index builders of the next graph snapshot run beside it."""
import os
import sys
import time
import exam_kit as kit

if "--builder" in sys.argv:
    kit.die_with_parent()
    import mmap
    board = mmap.mmap(os.open(sys.argv[sys.argv.index("--builder") + 1], os.O_RDWR), 4096)
    me = int(sys.argv[sys.argv.index("--builder") + 2])

    def build_postings(until):
        table, k = {}, 0
        while time.perf_counter() < until:
            for _ in range(200):
                k = (k * 1103515245 + 12345) & 0x7FFFFFFF
                table[k % 5000] = table.get(k % 5000, 0) + 1

    while True:
        load = int.from_bytes(board[8 * me:8 * me + 8], "little") / 1e6
        t = time.perf_counter()
        if load > 0:
            build_postings(t + 0.01 * load)
        rest = 0.01 - (time.perf_counter() - t)
        if rest > 0.0003 and load < 0.98:
            time.sleep(rest)

import tempfile
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
job = kit.Job("p24", threads=1)
NODES = job.size(60_000, 500)
SEEDS = job.size([2048, 3072], 16)
FAN = job.size([6, 8], 2)
DIM = job.size([128, 192], 8)
BUILDERS = 3


class Builders:
    def __init__(self):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[len(cores) // 2]})
        fd, self.path = tempfile.mkstemp(prefix="plan")
        os.write(fd, bytes(4096))
        import mmap
        self.board = mmap.mmap(fd, 4096)
        for k in range(BUILDERS):
            kit.child(["--builder", self.path, k])

    def plan(self, load):
        for k in range(BUILDERS):
            self.board[8 * k:8 * k + 8] = int(min(load / BUILDERS, 1.0) * 1e6).to_bytes(8, "little")

    def close(self):
        os.unlink(self.path)


class Sage(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2 * DIM, 2 * DIM)
        self.b = nn.Linear(2 * DIM, DIM)
        self.c = nn.Linear(DIM, 40)

    def forward(self, x, near):
        h = F.relu(self.a(torch.cat([x, near.mean(1)], 1)))
        return self.c(F.relu(self.b(h)))


class NodeTrainer:
    def __init__(self):
        rng = np.random.default_rng(job.seed)
        self.rng = rng
        self.start = np.sort(rng.integers(0, NODES * 10, NODES))
        self.nbr = rng.integers(0, NODES, NODES * 10 + 64)
        self.feat = torch.randn(NODES, DIM, device=job.dev)
        self.y = torch.randint(0, 40, (NODES,), device=job.dev)
        self.net = Sage().to(job.dev)
        self.opt = torch.optim.Adam(self.net.parameters(), lr=1e-3)

    def sample(self):
        ids = self.rng.integers(0, NODES, SEEDS)
        at = self.start[ids][:, None] + self.rng.integers(0, 10, (SEEDS, FAN))
        return ids, self.nbr[at]

    def io_step(self):
        for _ in range(2):
            ids, near = self.sample()
            i = torch.from_numpy(ids).to(job.dev)
            j = torch.from_numpy(near).to(job.dev)
            loss = F.cross_entropy(self.net(self.feat[i], self.feat[j]), self.y[i])
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            self.opt.step()
        return loss.item()


def main():
    b = Builders()
    kit.on_close(b.close)
    t = NodeTrainer()

    def plan(n, on):
        b.plan(n if on else 0.0)
    c = kit.Cause("cpu_starvation", "build_postings", plan, job.share(0.43, 0.55), 1.2, 0.05, float(BUILDERS))
    kit.examine(job, [c], "three index builders (child processes) share the single core the trainer is pinned to; NodeTrainer.io_step is starved",
                step=t.io_step, window=0.8)


if __name__ == "__main__":
    main()
