# SPDX-License-Identifier: Apache-2.0
#!/usr/bin/env python3
"""Click model: hashed embedding tables with hand-written row-wise updates, MLP on top."""
import torch
import torch.nn as nn
import torch.nn.functional as F

import bench_kit as bk


class HashedTable:
    """Embedding table trained outside autograd's optimiser: plain SGD on the rows of a batch."""

    def __init__(self, rows, dim, device):
        self.w = torch.randn(rows, dim, device=device) * 0.01
        self.rows, self.decay, self.reach = rows, 1e-6, 0
        self.idx = None

    def lookup(self, idx):
        self.idx = idx
        self.leaf = F.embedding(idx, self.w).requires_grad_(True)
        return self.leaf

    def touch_rows(self, lr):
        g = self.leaf.grad.flatten(0, 1)
        flat = self.idx.flatten()
        if self.reach:
            # decay over the table, then the gradient as a table-sized tensor
            part = self.w[: self.reach]
            part.mul_(1 - self.decay)
            dense = torch.zeros_like(part)
            dense.index_add_(0, flat % self.reach, g)
            part.add_(dense, alpha=-lr)
        else:
            self.w.index_add_(0, flat, g, alpha=-lr)
        self.leaf = None


class Tower(nn.Module):
    def __init__(self, n_in, hidden):
        super().__init__()
        self.seq = nn.Sequential(nn.Linear(n_in, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                                 nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, x):
        return self.seq(x).squeeze(-1)


class ClickTrainer:
    def __init__(self, o):
        self.o, dev = o, o.device
        fields, dim, hidden, batch, rows = (4, 8, 32, 64, 1000) if o.smoke else \
            (8, 64, 2048, o.rng.choice([8192, 12288, 16384]), 6_000_000)
        torch.backends.cuda.matmul.allow_tf32 = True
        self.tables = [HashedTable(rows, dim, dev) for _ in range(2)]
        self.tower = Tower(2 * fields * dim, hidden).to(dev)
        self.opt = torch.optim.SGD(self.tower.parameters(), lr=1e-3)
        self.batches = [([torch.randint(0, rows, (batch, fields), device=dev) for _ in range(2)],
                         torch.rand(batch, device=dev).round()) for _ in range(4)]
        self.pacer, self.n = bk.Pacer(dev), 0

    def compute_dense_layers(self, idx, y):
        parts = [t.lookup(i).flatten(1) for t, i in zip(self.tables, idx)]
        with torch.autocast(self.o.device.type, dtype=torch.bfloat16):
            p = self.tower(torch.cat(parts, 1))
        return F.binary_cross_entropy_with_logits(p.float(), y)

    def step(self):
        idx, y = self.batches[self.n % len(self.batches)]
        self.n += 1
        loss = self.compute_dense_layers(idx, y)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        with torch.no_grad():
            for t in self.tables:
                t.touch_rows(1e-3)
        self.pacer.tick()


if __name__ == "__main__":
    o = bk.options()
    share = o.rng.uniform(0.46, 0.60)
    job = ClickTrainer(o)

    def reach(n):
        for t in job.tables:
            t.reach = n

    for _ in range(10):
        job.step()
    base = bk.mean_step(job.step, o.probe, o.device)

    def measure(n):
        reach(n)
        return bk.mean_step(job.step, o.probe, o.device)

    rows = job.tables[0].rows
    n = bk.tune(measure, base, share, rows // 4, rows)
    on, off = bk.two_phases(job.step, o, lambda: reach(n), lambda: reach(0))
    bk.truth(on, off, "device_memory_bandwidth", "HashedTable.touch_rows",
             f"decay and dense gradient over {n} rows of each table instead of the batch's rows")
