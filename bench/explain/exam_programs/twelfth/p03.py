# SPDX-License-Identifier: Apache-2.0
"""Ancestral sampling of a convolutional diffusion model with a reference guide."""
import stage
import threading
import time

import torch
import torch.nn.functional as F
from torch import nn


class Res(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a = nn.Conv2d(width, width, 3, padding=1)
        self.b = nn.Conv2d(width, width, 3, padding=1)
        self.shift = nn.Linear(64, width)

    def forward(self, x, when):
        y = F.silu(self.a(F.silu(x))) + self.shift(when)[:, :, None, None]
        return x + 0.3 * self.b(y)


class Denoiser(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.lift = nn.Conv2d(4, width, 3, padding=1)
        self.blocks = nn.ModuleList(Res(width) for _ in range(depth))
        self.drop = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x, when):
        h = self.lift(x)
        for block in self.blocks:
            h = block(h, when)
        return self.drop(h)


class Guide:
    """Pulls the sample towards the closest mix of reference latents."""

    def __init__(self, dev, dim, picks):
        self.basis = torch.randn(dim, dim, device=dev) / dim ** 0.5
        self.refs = torch.randn(64 if dev == "cpu" else 16384, dim, device=dev)
        self.picks = picks

    def project(self, x):
        flat = x.float().flatten()[: self.basis.shape[0]]
        pull = torch.zeros_like(flat)
        rows = int(self.picks() * (8 if len(self.refs) < 100 else 64))
        while rows > 0:
            some = self.refs[:rows]
            mixed = some @ self.basis
            pull = pull + mixed.mean(0) * 1e-3
            rows -= len(some)
        return x + pull.mean().to(x.dtype) * 1e-3


def noise_levels(count):
    return torch.cos(torch.linspace(0, 1.5, count)).clamp_min(0.05).tolist()


def sampler(net, guide, dev, kind, batch, side, count):
    levels = noise_levels(count)
    while True:
        x = torch.randn(batch, 4, side, side, device=dev, dtype=kind)
        if dev == "cuda":
            x = x.to(memory_format=torch.channels_last)
        for i, level in enumerate(levels):
            when = torch.full((batch, 64), level, device=dev, dtype=kind)
            x = guide.project(x)
            eps = net(x, when)
            x = (x - (1 - level) * eps * 0.1) / (1 + 0.02 * (1 - level))
            x = x + 0.02 * level * torch.randn_like(x)
            yield x.abs().mean().item()


def poll_disk():
    while True:
        time.sleep(0.03)


@torch.no_grad()
def main():
    args = stage.arguments()
    torch.manual_seed(args.seed)
    threading.Thread(target=poll_disk, name="sync-uploader", daemon=True).start()
    tiny, dev = args.smoke, args.device
    kind = torch.float32 if tiny else torch.bfloat16
    net = Denoiser(16 if tiny else 256, 2 if tiny else 12).to(dev, kind)
    if not tiny:
        net = net.to(memory_format=torch.channels_last)
    picks = stage.Dial(30 if tiny else 60)
    guide = Guide(dev, 128 if tiny else 4096, picks)
    frames = sampler(net, guide, dev, kind, 2 if tiny else 32, 24 if tiny else 64, 25)
    stage.conduct(args, lambda: next(frames), [picks])


if __name__ == "__main__":
    main()
