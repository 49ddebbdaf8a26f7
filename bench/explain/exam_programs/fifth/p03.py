# SPDX-License-Identifier: Apache-2.0
#!/usr/bin/env python3
"""Masked-protein-sequence pretraining: encoder blocks, bf16 weights, fused AdamW."""
import threading
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import bench_kit as bk


@dataclass
class Recipe:
    width: int
    depth: int
    heads: int
    batch: int
    length: int
    vocab: int = 64


class EncoderBlock(nn.Module):
    def __init__(self, r: Recipe):
        super().__init__()
        self.heads = r.heads
        self.n1, self.n2 = nn.LayerNorm(r.width), nn.LayerNorm(r.width)
        self.qkv = nn.Linear(r.width, 3 * r.width)
        self.proj = nn.Linear(r.width, r.width)
        self.up, self.down = nn.Linear(r.width, 4 * r.width), nn.Linear(4 * r.width, r.width)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(a.transpose(1, 2).reshape(b, n, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class ProteinModel(nn.Module):
    def __init__(self, r: Recipe):
        super().__init__()
        self.emb = nn.Embedding(r.vocab, r.width)
        self.blocks = nn.ModuleList(EncoderBlock(r) for _ in range(r.depth))
        self.head = nn.Linear(r.width, r.vocab)

    def forward(self, t):
        x = self.emb(t)
        for b in self.blocks:
            x = b(x)
        return self.head(x)


class Trainer:
    def __init__(self, o, r: Recipe):
        self.o = o
        dt = torch.bfloat16 if o.gpu else torch.float32
        self.model = ProteinModel(r).to(o.device, dt)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=o.gpu)
        self.pool = [torch.randint(0, r.vocab, (r.batch, r.length), device=o.device) for _ in range(6)]
        self.pacer = bk.Pacer(o.device)
        self.i = 0
        self.meter = []

    def sync_all(self):
        """Bookkeeping of step numbers only."""
        self.meter.append(self.i)
        if len(self.meter) > 100:
            self.meter.clear()

    def slow_host_augment(self, t):
        return torch.roll(t, self.i % 7, dims=1)

    def step(self):
        t = self.slow_host_augment(self.pool[self.i % len(self.pool)])
        loss = F.cross_entropy(self.model(t).flatten(0, 1), t.flatten())
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        self.i += 1
        self.sync_all()
        self.pacer.tick()


def heartbeat(evt):
    while not evt.wait(1.0):
        time.time()


def main():
    o = bk.options()
    r = Recipe(64, 2, 2, 2, 32) if o.smoke else Recipe(2048, 4, 16, o.rng.choice([8, 10, 12]), 512)
    t = Trainer(o, r)
    evt = threading.Event()
    threading.Thread(target=heartbeat, args=(evt,), name="dataloader", daemon=True).start()
    for _ in range(3 if o.smoke else 15):
        t.step()
    on, off = bk.two_phases(t.step, o, lambda: None, lambda: None)
    evt.set()
    bk.truth(on, off, "healthy", "", "compute-bound training; both phases are the same work")


if __name__ == "__main__":
    main()
