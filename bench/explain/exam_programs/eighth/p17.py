# SPDX-License-Identifier: Apache-2.0
"""Image sampling by denoising; previews are scored by a neighbour process."""
import time

import torch
import torch.nn as nn

import exam_kit as kit


class Score(nn.Module):
    def __init__(self, ch, depth):
        super().__init__()
        self.inp = nn.Conv2d(4, ch, 3, padding=1)
        self.body = nn.ModuleList(nn.Conv2d(ch, ch, 3, padding=1) for _ in range(depth))
        self.time = nn.Linear(1, ch)
        self.out = nn.Conv2d(ch, 4, 3, padding=1)

    def forward(self, x, t):
        h = self.inp(x) + self.time(t)[:, :, None, None]
        for c in self.body:
            h = h + torch.nn.functional.silu(c(h))
        return self.out(h)


def preview_scores(dev, side, volume, ready):
    """Aesthetic scores of the previews, in a process of its own."""
    dev = torch.device(dev)
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if dev.type == "cuda" else torch.float32
    a = torch.randn(side, side, device=dev, dtype=dtype)
    b = torch.randn(side, side, device=dev, dtype=dtype) / side ** 0.5
    float(a.sum())
    ready.value = 1
    while True:
        n = int(volume.value)
        for _ in range(n):
            a = torch.tanh(a @ b)
        if n:
            a.flatten()[0].item()
        time.sleep(0.006)


class FsyncSampler(kit.Job):
    detail = "another process of the job computes on the same GPU in bursts; kernels of the sampler wait their turn"

    def __init__(self, ctx):
        self.volume, ready = kit.shared(0), kit.shared(0)
        kit.spawn(preview_scores, str(ctx.dev), ctx.pick(64, 4096), self.volume, ready)
        self.net = Score(ctx.pick(8, 192, 256), ctx.pick(1, 8, 10)).to(ctx.dev, ctx.dtype).eval()
        self.shape = (ctx.pick(1, 8, 12), 4, ctx.pick(8, 64), ctx.pick(8, 64))
        self.x = torch.randn(self.shape, device=ctx.dev, dtype=ctx.dtype)
        self.t = torch.rand(self.shape[0], 1, device=ctx.dev, dtype=ctx.dtype)
        self.noise = torch.randn(8, *self.shape, device=ctx.dev, dtype=ctx.dtype)
        while not ready.value:
            time.sleep(0.05)
        self.i = 0
        self.levers = [kit.Lever("gpu_cotenant", "preview_scores", self.set_volume, ctx.share(0.22, 0.32),
                                 start=ctx.pick(1, 8), hi=400, alt="FsyncSampler.step / Score.forward (waits)")]

    def set_volume(self, a):
        self.volume.value = a

    @torch.no_grad()
    def step(self):
        x = self.x
        for k in range(4):
            eps = self.net(x, self.t)
            x = 0.98 * x - 0.05 * eps + 0.02 * self.noise[(self.i + k) % 8]
        self.x = x.clamp(-4, 4)
        self.i += 1
        return self.x.float().mean().item()


if __name__ == "__main__":
    kit.main(FsyncSampler)
