# SPDX-License-Identifier: Apache-2.0
"""Latent diffusion sampler, classifier-free guidance, DDIM schedule."""
import math
import threading
import time
import torch
import torch.nn as nn
import torch.nn.functional as F
from rig import Job


class Attn(nn.Module):
    def __init__(self, c, heads):
        super().__init__()
        self.h = heads
        self.qkv = nn.Linear(c, 3 * c)
        self.out = nn.Linear(c, c)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.h, c // self.h).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))


class Denoiser(nn.Module):
    def __init__(self, c, depth):
        super().__init__()
        self.stem = nn.Conv2d(4, c, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(c, c, 3, padding=1) for _ in range(depth))
        self.attn = nn.ModuleList(Attn(c, max(1, c // 64)) for _ in range(depth))
        self.head = nn.Conv2d(c, 4, 3, padding=1)

    def forward(self, z, t):
        h = self.stem(z) + torch.sin(t)
        for conv, at in zip(self.convs, self.attn):
            h = h + conv(F.silu(h))
            b, c, y, x = h.shape
            h = at(h.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(b, c, y, x)
        return self.head(h)


class ColourMixer:
    """Brings the guidance into a decorrelated basis; the basis is a power of a fixed mixing matrix."""

    def __init__(self, n, dev):
        q = torch.randn(n, n, device=dev)
        self.mix = q / q.norm() * n ** 0.5 * 0.5
        self.reps = 0
        self.ready = self.basis(3)

    def basis(self, reps):
        m = self.mix
        for _ in range(reps):
            m = torch.tanh(m @ self.mix)
        return m

    def project(self, d):
        if self.reps:
            m = self.basis(self.reps)
        else:
            m = self.ready
        return d + 0.0 * m[0, 0].to(d.dtype)


def build(job):
    c = job.pick(320, 384, 448, tiny=16)
    net = Denoiser(c, job.pick(6, 8, tiny=1)).to(job.dev, job.half).eval()
    side = job.pick(48, 64, tiny=8)
    return net, torch.randn(job.pick(4, 6, tiny=1), 4, side, side, device=job.dev, dtype=job.half)


def main():
    job = Job(0.11, 0.19)
    net, z = build(job)
    mixer = ColourMixer(job.pick(1024, 1280, tiny=32), job.dev)
    threading.Thread(target=lambda: time.sleep(3600), name="prefetch_worker", daemon=True).start()
    state = {"z": z, "i": 0}

    @torch.inference_mode()
    def step():
        i = state["i"] = state["i"] + 1
        a = math.cos((i % 50) / 50 * 1.5)
        zz = torch.cat([state["z"], state["z"]])
        e = net(zz, torch.full((), a, device=job.dev, dtype=job.half))
        c, u = e.chunk(2)
        d = mixer.project(c - u)
        eps = u + 4.0 * d
        nz = (state["z"] - 0.02 * eps).clamp(-4, 4)
        state["z"] = nz / (1e-3 + nz.std())
        job.pace(2)

    def setk(k):
        mixer.reps = int(k)

    job.tune(step, setk, 4, 2000, whole=True)
    job.show(step, lambda: setk(0), [("device_compute", "ColourMixer.basis")])


if __name__ == "__main__":
    main()
