# SPDX-License-Identifier: Apache-2.0
"""Language-model pre-training with gradient accumulation; documents are packed while the device works."""
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

import exam_kit as kit


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.h = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.ff(self.n2(x))


class Packer:
    def __init__(self):
        self.docs = 10
        self.out = []

    def pack(self, seed):
        rows, room = [], 0
        for d in range(self.docs):
            n = (d * 73 + seed * 31) % 97 + 3
            if n > room:
                rows.append(0)
                room = 128
            rows[-1] += n
            room -= n
        self.out = rows


class Meter:
    """Loss of the running step, for the progress line."""

    def __init__(self):
        self.live = 0
        self.shown = 0.0
        self.acc = None

    def update(self, i, loss):
        loss = loss.detach()
        self.acc = loss if self.acc is None else self.acc + loss
        if i < self.live:
            self.shown = 0.9 * self.shown + 0.1 * float(loss)

    def close_step(self):
        v, self.acc = float(self.acc), None
        return v


class HostBoundPretrain(kit.Job):
    detail = "the loss is read after many micro-batches, so packing no longer overlaps with the device's work"

    def __init__(self, ctx):
        d = ctx.pick(32, 1024, 1280)
        self.micro = ctx.pick(3, 10, 12)
        self.emb = nn.Embedding(ctx.pick(100, 8192), d).to(ctx.dev, ctx.dtype)
        self.blocks = nn.Sequential(*[Block(d, d // 16 if ctx.smoke else d // 64) for _ in range(ctx.pick(1, 3, 4))])
        self.blocks.to(ctx.dev, ctx.dtype)
        self.head = nn.Linear(d, ctx.pick(100, 8192)).to(ctx.dev, ctx.dtype)
        self.params = [*self.emb.parameters(), *self.blocks.parameters(), *self.head.parameters()]
        self.opt = torch.optim.SGD(self.params, lr=1e-4)
        self.ids = torch.randint(0, self.emb.num_embeddings, (ctx.pick(2, 12, 16), ctx.pick(8, 1024)), device=ctx.dev)
        self.packer, self.meter = Packer(), Meter()
        self.fit_packing(ctx)
        self.levers = [kit.Lever("synchronization", "Meter.update", self.set_live, ctx.share(0.22, 0.30),
                                 start=max(1, int(self.micro * 0.7)), hi=self.micro)]

    def fit_packing(self, ctx):
        """a realistic amount: packing takes about 60 % of the device's time for a micro-batch"""
        kit.drive(self, 0.02 if ctx.smoke else 0.5)
        want = 0.6 * kit.drive(self, 0.02 if ctx.smoke else 0.6) / self.micro
        t = time.perf_counter()
        for _ in range(20):
            self.packer.pack(3)
        self.packer.docs = max(10, int(10 * want * 20 / (time.perf_counter() - t)))
        t = time.perf_counter()
        for _ in range(3):
            self.packer.pack(3)
        self.packer.docs = max(10, int(self.packer.docs * want * 3 / (time.perf_counter() - t)))

    def set_live(self, a):
        self.meter.live = a

    def step(self):
        self.opt.zero_grad(set_to_none=True)
        for i in range(self.micro):
            out = self.head(self.blocks(self.emb(self.ids)))
            loss = F.cross_entropy(out.flatten(0, 1), self.ids.flatten())
            loss.backward()
            self.meter.update(i, loss)
            self.packer.pack(i)
        self.opt.step()
        return self.meter.close_step()


if __name__ == "__main__":
    kit.main(HostBoundPretrain)
