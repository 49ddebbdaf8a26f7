# SPDX-License-Identifier: Apache-2.0
"""Click-through scoring of candidate lists with a per-campaign prior."""
import numpy as np
import torch
import torch.nn as nn

import exam_kit as kit


class Priors:
    """Campaign priors; refreshed once an hour by another job."""

    def __init__(self, rows, dim, dev, seed):
        g = torch.Generator().manual_seed(seed)
        self.table = torch.randn(rows, dim, generator=g)
        self.resident = self.table.to(dev)
        self.dev = dev
        self.rows = 0
        self.cursor = 0

    def window(self, slot):
        n = self.rows or 8192
        lo = self.cursor
        self.cursor = (self.cursor + 4096) % max(1, self.table.shape[0] - n)
        if self.rows:
            part = self.table[lo:lo + n].to(self.dev)
        else:
            part = self.resident[lo:lo + n]
        return part[slot % part.shape[0]]


class Tower(nn.Module):
    def __init__(self, fields, vocab, dim, hidden):
        super().__init__()
        self.emb = nn.Embedding(fields * vocab, dim)
        self.register_buffer("shift", torch.arange(fields) * vocab)
        self.mlp = nn.Sequential(nn.Linear(fields * dim + dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                                 nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, ids, prior):
        e = self.emb(ids + self.shift).flatten(1)
        return self.mlp(torch.cat([e, prior], 1)).squeeze(1)


class LockedScorer(kit.Job):
    detail = "the prior table lives in pageable host memory and a window of it is uploaded at every step"

    def __init__(self, ctx):
        self.fields, self.vocab, self.dim = 26, ctx.pick(50, 40000, 60000), ctx.pick(8, 64)
        self.batch = ctx.pick(64, 16384, 24576, 32768)
        self.dev = ctx.dev
        self.net = Tower(self.fields, self.vocab, self.dim, ctx.pick(32, 2048, 3072)).to(ctx.dev).eval()
        self.pool = [torch.from_numpy(ctx.np_rng.integers(0, self.vocab, (self.batch, self.fields))).to(ctx.dev)
                     for _ in range(4)]
        rows = ctx.pick(2000, 600000)
        self.priors = Priors(rows, self.dim, ctx.dev, ctx.seed)
        self.slot = torch.arange(self.batch, device=ctx.dev)
        self.i = 0
        self.levers = [kit.Lever("copies", "Priors.window", self.set_rows, ctx.share(0.13, 0.18),
                                 start=ctx.pick(100, 10000), hi=rows - 8000 if not ctx.smoke else 1000)]

    def set_rows(self, a):
        self.priors.rows = a

    @torch.no_grad()
    def step(self):
        ids = self.pool[self.i % 4]
        self.i += 1
        score = self.net(ids, self.priors.window(self.slot))
        best = torch.topk(torch.sigmoid(score), 16)
        return np.asarray(best.values.tolist())


if __name__ == "__main__":
    kit.main(LockedScorer)
