# SPDX-License-Identifier: Apache-2.0
#!/usr/bin/env python3
"""Distillation of a code model: a frozen teacher embedding is whitened, the student learns to match it."""
import torch
import torch.nn as nn
import torch.nn.functional as F

import bench_kit as bk


class Whitener:
    """A few fixed square transforms applied to the teacher's features."""

    def __init__(self, d, passes, device, dtype):
        q = [torch.randn(d, d, dtype=torch.float64, device=device) / d ** 0.5 for _ in range(passes)]
        self.fine = q
        self.coarse = [m.to(device, dtype) for m in q]
        self.edge = 0

    def apply(self, h):
        k = self.edge
        if k == 0:
            return self._chain(h, self.coarse)
        head = self._chain(h[:k].double(), self.fine).to(h.dtype)
        if k == len(h):
            return head
        return torch.cat([head, self._chain(h[k:], self.coarse)])

    @staticmethod
    def _chain(x, mats):
        for m in mats:
            x = x @ m
        return x


class StudentLayer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.a, self.b = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.ff = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.a(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, d)
        x = x + self.proj(y)
        return x + self.ff(self.b(x))


class Distiller:
    def __init__(self, o):
        d, heads, depth, b, n, passes = (32, 2, 1, 2, 16, 2) if o.smoke else \
            (2048, 16, 3, o.rng.choice([10, 12, 14]), 1024, 4)
        self.o, self.dt = o, (torch.bfloat16 if o.gpu else torch.float32)
        self.student = nn.Sequential(*[StudentLayer(d, heads) for _ in range(depth)]).to(o.device, self.dt)
        self.opt = torch.optim.AdamW(self.student.parameters(), 1e-5, fused=o.gpu)
        self.white = Whitener(d, passes, o.device, self.dt)
        self.teacher = [torch.randn(b, n, d, device=o.device, dtype=self.dt) for _ in range(3)]
        self.x = [torch.randn(b, n, d, device=o.device, dtype=self.dt) for _ in range(3)]
        self.tokens = b * n
        self.pacer, self.i = bk.Pacer(o.device), 0

    def fetch_from_disk(self):
        """Next pair of device-resident batches."""
        k = self.i % 3
        self.i += 1
        return self.x[k], self.teacher[k]

    def step(self):
        x, t = self.fetch_from_disk()
        with torch.no_grad():
            goal = self.white.apply(t.flatten(0, 1)).view_as(t)
        y = self.student(x)
        loss = F.mse_loss(y, goal)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        self.pacer.tick()


def main():
    o = bk.options()
    share = o.rng.uniform(0.12, 0.20)
    job = Distiller(o)
    bk.mean_step(job.step, 0.1 if o.smoke else 1.0, o.device)
    base = bk.mean_step(job.step, o.probe, o.device)

    def measure(k):
        k = max(1, k // 128 * 128) if o.gpu else k
        job.white.edge = k
        return bk.mean_step(job.step, o.probe, o.device)

    k = bk.tune(measure, base, share, max(1, job.tokens // 6), job.tokens)
    on, off = bk.two_phases(job.step, o, lambda: measure(k), lambda: setattr(job.white, "edge", 0))
    bk.truth(on, off, "device_compute", "Whitener.apply",
             f"float64 matrix products for {k} of {job.tokens} tokens where bf16 does")


if __name__ == "__main__":
    main()
