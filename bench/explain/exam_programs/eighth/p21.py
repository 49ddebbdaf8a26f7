# SPDX-License-Identifier: Apache-2.0
"""Beam search for translation with a no-repeat rule and cached keys and values."""
import torch
import torch.nn as nn
import torch.nn.functional as F

import exam_kit as kit


class Layer(nn.Module):
    def __init__(self, dim, heads, beams, longest, dev, dtype):
        super().__init__()
        self.h, self.n = heads, nn.LayerNorm(dim)
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, dim))
        self.k = torch.randn(beams, heads, longest, dim // heads, device=dev, dtype=dtype)
        self.v = torch.randn_like(self.k)

    def forward(self, x, pos):
        b, d = x.shape
        q, k, v = self.qkv(self.n(x)).view(b, 3, self.h, d // self.h).unbind(1)
        self.k[:, :, pos], self.v[:, :, pos] = k, v
        y = F.scaled_dot_product_attention(q[:, :, None], self.k, self.v).reshape(b, d)
        x = x + self.o(y)
        return x + self.ff(x)


class Hypothesis:
    def __init__(self, seed):
        self.tokens = [(seed * 7 + i * i) % 211 for i in range(32)]
        self.looked = 0

    def repeats(self, token):
        """has the bigram with this token been seen in the last `looked` positions?"""
        last = self.tokens[-1]
        n = len(self.tokens)
        seen = 0
        for i in range(self.looked):
            if self.tokens[i % (n - 1)] == last and self.tokens[i % (n - 1) + 1] == token:
                seen += 1
        return seen > 1000000

    def push(self, token):
        self.tokens = self.tokens[1:] + [token]


class DiskCachedBeam(kit.Job):
    detail = "the no-repeat rule rescans every beam's history in Python before each launch"

    def __init__(self, ctx):
        dim, self.beams, self.longest = ctx.pick(64, 1024, 1536), ctx.pick(2, 12, 16), ctx.pick(16, 512)
        vocab = ctx.pick(100, 32000)
        self.emb = nn.Embedding(vocab, dim).to(ctx.dev, ctx.dtype)
        self.layers = nn.ModuleList(Layer(dim, dim // 32 if ctx.smoke else dim // 64, self.beams, self.longest,
                                          ctx.dev, ctx.dtype) for _ in range(ctx.pick(1, 10, 12)))
        self.layers.to(ctx.dev, ctx.dtype)
        self.hyps = [Hypothesis(s) for s in range(self.beams)]
        self.dev, self.pos = ctx.dev, 0
        self.last = list(range(self.beams))
        self.levers = [kit.Lever("host_code", "Hypothesis.repeats", self.set_looked, ctx.share(0.23, 0.32),
                                 start=ctx.pick(10, 200))]

    def set_looked(self, a):
        for h in self.hyps:
            h.looked = a

    @torch.no_grad()
    def step(self):
        x = self.emb(torch.tensor(self.last, device=self.dev))
        for l in self.layers:
            x = l(x, self.pos)
        self.pos = (self.pos + 1) % self.longest
        tops = (x @ self.emb.weight.T).topk(2, dim=1).indices.tolist()
        for k, (h, (a, b)) in enumerate(zip(self.hyps, tops)):
            t = b if h.repeats(a) else a
            h.push(t)
            self.last[k] = t


if __name__ == "__main__":
    kit.main(DiskCachedBeam)
