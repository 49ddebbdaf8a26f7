# SPDX-License-Identifier: Apache-2.0
"""Contrastive fine-tuning of product titles against images; the image tower does not learn."""
import torch
import torch.nn as nn
import torch.nn.functional as F

import exam_kit as kit


class Titles(nn.Module):
    def __init__(self, dim, depth):
        super().__init__()
        self.body = nn.ModuleList(nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(),
                                                nn.Linear(2 * dim, dim)) for _ in range(depth))

    def forward(self, x):
        for b in self.body:
            x = x + b(x)
        return F.normalize(x.float(), dim=1)


class Images:
    """Image side: a fixed projection of fixed features, so always the same answer."""

    def __init__(self, n, dim, dev, dtype):
        self.feat = torch.randn(n, dim, device=dev, dtype=dtype)
        self.w = [torch.randn(dim, dim, device=dev, dtype=dtype) / dim ** 0.5 for _ in range(3)]
        self.again = 0
        self.known = torch.zeros_like(self.feat)
        self.chunk = max(1, n // 64)
        for c in range(64):
            self.project(c)

    def project(self, c):
        part = slice((c % 64) * self.chunk, (c % 64 + 1) * self.chunk)
        h = self.feat[part]
        for w in self.w:
            h = torch.relu(h @ w)
        self.known[part] = h

    def vectors(self, n):
        for c in range(self.again):
            self.project(c)
        return F.normalize(self.known[:n].float(), dim=1)


class PageFaultTrainer(kit.Job):
    detail = "vectors of the frozen image tower are computed again each step although they never change"

    def __init__(self, ctx):
        dim, self.n = ctx.pick(32, 2048, 3072), ctx.pick(64, 8192)
        self.titles = Titles(dim, ctx.pick(1, 3, 4)).to(ctx.dev, ctx.dtype)
        self.images = Images(ctx.pick(128, 65536), dim, ctx.dev, ctx.dtype)
        self.opt = torch.optim.SGD(self.titles.parameters(), lr=1e-4)
        self.x = torch.randn(self.n, dim, device=ctx.dev, dtype=ctx.dtype)
        self.y = torch.arange(self.n, device=ctx.dev)
        self.levers = [kit.Lever("device_compute", "Images.project", self.set_again, ctx.share(0.13, 0.18),
                                 start=ctx.pick(2, 8))]

    def set_again(self, a):
        self.images.again = a

    def step(self):
        with torch.no_grad():
            v = self.images.vectors(self.n)
        u = self.titles(self.x)
        loss = F.cross_entropy(u @ v.T * 20, self.y)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        return loss.item()


if __name__ == "__main__":
    kit.main(PageFaultTrainer)
