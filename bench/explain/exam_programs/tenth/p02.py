# SPDX-License-Identifier: Apache-2.0
"""Latent diffusion sampling with a style guide, written as a generator of denoising steps."""
import math
import time

import torch
import torch.nn.functional as F
from torch import nn

import stage


class Res(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.a, self.b = nn.Conv2d(ch, ch, 3, padding=1), nn.Conv2d(ch, ch, 3, padding=1)
        self.n1, self.n2 = nn.GroupNorm(8, ch), nn.GroupNorm(8, ch)
        self.t = nn.Linear(64, ch)

    def forward(self, x, temb):
        h = self.a(F.silu(self.n1(x))) + self.t(temb)[:, :, None, None]
        return x + self.b(F.silu(self.n2(h)))


class Denoiser(nn.Module):
    def __init__(self, ch, depth):
        super().__init__()
        self.inp, self.out = nn.Conv2d(4, ch, 3, padding=1), nn.Conv2d(ch, 4, 3, padding=1)
        self.blocks = nn.ModuleList(Res(ch) for _ in range(depth))

    def forward(self, x, temb):
        h = self.inp(x)
        for b in self.blocks:
            h = b(h, temb)
        return self.out(h)


class StyleGuide:
    """Pulls the latents towards the statistics of a reference; statistics are kept in full precision."""

    def __init__(self, dev, rows, dim):
        self.bank = torch.randn(rows, dim, device=dev)
        self.basis = torch.randn(dim, dim, device=dev) / math.sqrt(dim)
        self.rows = 0

    def nudge(self, latents):
        if not self.rows:
            return latents
        stat = self.bank[: self.rows] @ self.basis
        return latents + 1e-6 * stat.mean().to(latents.dtype)


def sampler(net, guide, dev, shape, steps, dtype):
    freqs = torch.exp(torch.linspace(0, 6, 32, device=dev))
    while True:
        x = torch.randn(shape, device=dev, dtype=dtype)
        for k in range(steps):
            t = torch.full((shape[0], 1), 1 - k / steps, device=dev)
            temb = torch.cat([torch.sin(t * freqs), torch.cos(t * freqs)], 1).to(dtype)
            eps = net(x, temb)
            x = guide.nudge(x - eps * (1.0 / steps))
            yield x


def preview(box):
    """Keeps a thumbnail of the last finished image fresh for the viewer."""
    while True:
        time.sleep(0.25)
        box["age"] = time.monotonic()


@torch.no_grad()
def main():
    st = stage.Stage()
    dev, dtype = st.device, torch.bfloat16
    net = Denoiser(st.pick(320, 16), st.pick(12, 2)).to(dev, dtype).to(memory_format=torch.channels_last)
    guide = StyleGuide(dev, st.pick(40_000, 6000), st.pick(4096, 64))
    shape = (st.pick(16, 2), 4, st.pick(64, 8), st.pick(64, 8))
    frames = sampler(net, guide, dev, shape, 40, dtype)
    box = {}
    stage.background(preview, "blocking-io", box)

    def denoise_once():
        with torch.no_grad():
            box["last"] = next(frames)

    def turn(a):
        guide.rows = int(a)

    knob = stage.Knob("device_compute", "StyleGuide.nudge", turn, st.pick(3000, 1000), "light",
                      alt="sampler", top=st.pick(40_000, 6000))
    st.perform(denoise_once, [knob])


if __name__ == "__main__":
    main()
