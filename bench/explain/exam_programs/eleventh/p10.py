# SPDX-License-Identifier: Apache-2.0
"""Image diffusion with a history of earlier latents used by a multi-step solver."""
import stage
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a = nn.Conv2d(c, c, 3, padding=1)
        self.b = nn.Conv2d(c, c, 3, padding=1)
        self.t = nn.Linear(64, c)

    def forward(self, x, emb):
        h = F.silu(self.a(x) + self.t(emb)[:, :, None, None])
        return x + self.b(h)


class UNet(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.inp = nn.Conv2d(4, c, 3, padding=1)
        self.top = nn.ModuleList(Block(c) for _ in range(2))
        self.low = nn.ModuleList(Block(c) for _ in range(4))
        self.out = nn.Conv2d(c, 4, 3, padding=1)

    def forward(self, x, emb):
        x = self.inp(x)
        for b in self.top:
            x = b(x, emb)
        y = F.avg_pool2d(x, 2)
        for b in self.low:
            y = b(y, emb)
        return self.out(x + F.interpolate(y, scale_factor=2))


class History:
    """The newest latent is always row 0."""

    def __init__(self, rows, shape, device, dtype):
        self.buf = torch.zeros(rows, *shape, device=device, dtype=dtype)
        self.live = 1

    def push(self, latent):
        n = max(1, self.live)
        if n > 1:
            self.buf[:n] = torch.roll(self.buf[:n], 1, 0)
        self.buf[0] = latent

    def blend(self):
        return self.buf[0] * 0.9


def sampler(opts):
    s = opts.smoke
    dt = torch.float32 if s else torch.bfloat16
    torch.backends.cudnn.benchmark = True
    net = UNet(16 if s else 320).to(opts.device, dt).eval()
    shape = (1, 4, 16, 16) if s else (8, 4, 64, 64)
    hist = History(256 if s else 40000, shape, opts.device, dt)
    x = torch.randn(shape, device=opts.device, dtype=dt)
    freqs = torch.arange(64, device=opts.device, dtype=dt)
    yield hist
    t = 0
    while True:
        with torch.inference_mode():
            emb = torch.sin(freqs * (t % 50) * 0.01).expand(shape[0], 64)
            for _ in range(3):
                x = (hist.blend() - 0.02 * net(x, emb)).clamp(-3, 3)
            hist.push(x)
        t += 1
        yield x.float().mean().item()


def main():
    opts = stage.options()
    steps = sampler(opts)
    hist = next(steps)

    def rows(x):
        hist.live = int(min(x, hist.buf.shape[0]))

    stage.conduct(opts, lambda: next(steps), [
        stage.Factor("device_memory_bandwidth", "History.push", "", rows, 500.0, 40000),
    ], "middle")


if __name__ == "__main__":
    main()
