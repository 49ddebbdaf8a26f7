# SPDX-License-Identifier: Apache-2.0
#!/usr/bin/env python3
"""Latent diffusion sampling with a DiT backbone; previews of the latents are kept while sampling."""
import io
import math
import os
import shutil
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F

import bench_kit as bk


class DiTBlock(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.h = heads
        self.norm1 = nn.LayerNorm(d, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(d, elementwise_affine=False)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(approximate="tanh"), nn.Linear(4 * d, d))
        self.ada = nn.Linear(d, 4 * d)

    def forward(self, x, c):
        s1, b1, s2, b2 = self.ada(c)[:, None].chunk(4, -1)
        h = self.norm1(x) * (1 + s1) + b1
        B, N, D = h.shape
        q, k, v = self.qkv(h).view(B, N, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, D))
        return x + self.mlp(self.norm2(x) * (1 + s2) + b2)


class DiT(nn.Module):
    def __init__(self, d, depth, heads, ch=16):
        super().__init__()
        self.d = d
        self.inp, self.out = nn.Linear(ch, d), nn.Linear(d, ch)
        self.blocks = nn.ModuleList(DiTBlock(d, heads) for _ in range(depth))

    def forward(self, z, t):
        f = torch.exp(-torch.arange(self.d // 2, device=z.device) * (9.2 / (self.d // 2)))
        c = torch.cat([torch.sin(t[:, None] * f), torch.cos(t[:, None] * f)], 1).to(z.dtype)
        x = self.inp(z)
        for b in self.blocks:
            x = b(x, c)
        return self.out(x)


class FrameSink:
    """Preview frames: one small record a denoising step, repeated up to the page count."""

    def __init__(self, seed):
        self.dir = tempfile.mkdtemp(prefix="frames_")
        self.fd = os.open(os.path.join(self.dir, f"prev_{seed}.bin"), os.O_CREAT | os.O_RDWR)
        self.mem = io.BytesIO()
        self.pages, self.every, self.count = 1, 1, 0
        self.durable = False

    def push(self, frame):
        raw = memoryview(frame.numpy()).cast("B")[:65536]
        self.count += 1
        if self.durable and self.count % self.every == 0:
            off = 0
            for _ in range(self.pages):
                off += os.pwrite(self.fd, raw, off)
            os.fsync(self.fd)
        else:
            self.mem.seek(0)
            self.mem.write(raw)

    def close(self):
        os.close(self.fd)
        shutil.rmtree(self.dir, ignore_errors=True)


class AsyncSampler:
    def __init__(self, o):
        d, depth, heads, n, b = (64, 2, 2, 32, 2) if o.smoke else (1152, 16, 16, 1024, o.rng.choice([6, 8, 10]))
        self.o, self.dt = o, (torch.bfloat16 if o.gpu else torch.float32)
        self.net = DiT(d, depth, heads).to(o.device, self.dt).eval()
        self.z = torch.randn(b, n, 16, device=o.device, dtype=self.dt)
        self.k, self.steps = 0, 50
        self.sink = FrameSink(o.seed)

    @torch.no_grad()
    def denoise(self):
        if self.k % self.steps == 0:
            self.z.normal_()
        frac = 1 - (self.k % self.steps) / self.steps
        t = torch.full((self.z.shape[0],), 1000 * frac, device=self.o.device)
        eps = self.net(self.z, t)
        a = math.cos(frac * math.pi / 2)
        self.z = self.z - 0.02 * (eps - a * self.z)
        self.k += 1
        self.sink.push(self.z[0].float().cpu())


def main():
    o = bk.options()
    share = o.rng.uniform(0.13, 0.20)
    s = AsyncSampler(o)
    bk.mean_step(s.denoise, 0.2 if o.smoke else 1.0, o.device)
    base = bk.mean_step(s.denoise, o.probe, o.device)

    def measure(a):
        s.sink.pages, s.sink.every = max(1, int(a)), (1 if a >= 1 else min(4, round(1 / a)))
        s.sink.durable = True
        return bk.mean_step(s.denoise, o.probe * 1.5, o.device)

    n = bk.tune(measure, base, share, 1.0, 4000.0, whole=False)
    on, off = bk.two_phases(s.denoise, o, lambda: measure(n),
                            lambda: setattr(s.sink, "durable", False))
    s.sink.close()
    bk.truth(on, off, "io", "FrameSink.push", f"{s.sink.pages} x 64 KB written and fsynced, every {s.sink.every} denoising step(s)")


if __name__ == "__main__":
    main()
