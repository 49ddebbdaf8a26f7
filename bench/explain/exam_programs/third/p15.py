# SPDX-License-Identifier: Apache-2.0
"""Sentence-pair training with variable lengths (bf16); a memory guard runs between the steps."""
import time
import torch
import torch.nn as nn
import torch.nn.functional as F
from rig import Kit, DEV


class PairEncoder(nn.Module):
    def __init__(self, vocab, d, heads, depth):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(
            d, heads, 4 * d, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(depth)])
        self.proj = nn.Linear(d, 256)

    def forward(self, ids):
        x = self.emb(ids)
        for l in self.layers:
            x = l(x)
        return F.normalize(self.proj(x.mean(1)), dim=1)


class MemoryGuard:
    """keeps head-room for the evaluation job on the same device"""
    def __init__(self):
        self.every, self.credit, self.peak = 1, 0.0, 0

    def note(self):
        if DEV.type == "cuda":
            self.peak = max(self.peak, torch.cuda.memory_allocated())

    def trim(self):
        torch.cuda.empty_cache()

    def after_step(self, i):
        self.note()
        if i % self.every == 0:
            self.trim()


def gc_collect(buckets, i):
    """picks the length bucket of the next batch"""
    return buckets[(i * 7) % len(buckets)]


def main():
    kit = Kit(__file__)
    rng = kit.rng
    d = kit.n(rng.choice([768, 1024]), 32)
    batch = kit.n(rng.choice([24, 32]), 4)
    vocab = kit.n(16000, 61)
    buckets = [kit.n(n, 6) for n in (96, 128, 160, 112, 144)]
    net = PairEncoder(vocab, d, kit.n(d // 64, 2), kit.n(rng.choice([6, 8]), 1)).to(DEV)
    opt = torch.optim.AdamW(net.parameters(), 1e-4, foreach=True)
    a = torch.randint(0, vocab, (batch, max(buckets)), device=DEV)
    b = torch.randint(0, vocab, (batch, max(buckets)), device=DEV)
    goal = torch.arange(batch, device=DEV)
    share = kit.share(0.24)
    guard = MemoryGuard()
    loss_now = 0.0

    def train(i=0):
        nonlocal loss_now
        n = gc_collect(buckets, i)
        with torch.autocast(DEV.type, dtype=torch.bfloat16):
            sim = net(a[:, :n]) @ net(b[:, :n]).T
        loss = F.cross_entropy(sim.float() * 20, goal)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        loss_now = loss.item()

    turn = iter(range(10 ** 9))
    base, _ = kit.measure(lambda: train(next(turn)), 20, 6)

    def trimmed():
        train(next(turn))
        guard.trim()

    slow, _ = kit.measure(trimmed, 10, 3)
    pause = max(1e-5, slow - base)
    guard.every = max(1, min(40, round(pause * (1 - share) / share / base)))
    kit.cause("allocator", kit.place(MemoryGuard.trim, "empty_cache"),
              "cached blocks are given back and asked for again", "MemoryGuard")
    begin = time.time()
    for i in kit.steps(warm=max(6, guard.every + 2)):
        train(i)
        if kit.on:
            guard.after_step(i)
        else:
            guard.note()
    return begin


if __name__ == "__main__":
    main()
