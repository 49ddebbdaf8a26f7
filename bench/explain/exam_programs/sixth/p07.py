# SPDX-License-Identifier: Apache-2.0
"""Text-to-image sampler: denoising a batch of latents step by step under a text condition."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F
import exam_kit as kit

job = kit.Job("p07")
BATCH = job.size([24, 32, 40], 2)
CH = job.size([192, 256], 8)
RES = job.size(64, 8)
TXT = job.size(1024, 16)
DT = torch.bfloat16


class TextTower:
    """Frozen text encoder; prompts are 77 tokens."""

    def __init__(self, layers=12):
        g = torch.Generator().manual_seed(job.seed)
        self.w = [(torch.randn(TXT, 4 * TXT, generator=g).to(job.dev, DT) / math.sqrt(TXT),
                   torch.randn(4 * TXT, TXT, generator=g).to(job.dev, DT) / math.sqrt(8 * TXT)) for _ in range(layers)]

    def read_cache(self, emb):
        x = emb
        for up, down in self.w:
            x = x + F.silu(F.layer_norm(x, (TXT,)) @ up) @ down
        return x


class ResBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.GroupNorm(8, CH), nn.GroupNorm(8, CH)
        self.c1, self.c2 = nn.Conv2d(CH, CH, 3, padding=1), nn.Conv2d(CH, CH, 3, padding=1)
        self.t = nn.Linear(TXT, CH)

    def forward(self, x, cond):
        h = self.c1(F.silu(self.n1(x))) + self.t(cond)[:, :, None, None]
        return x + self.c2(F.silu(self.n2(h)))


class Sampler:
    def __init__(self):
        self.tower = TextTower()
        self.inp = nn.Conv2d(4, CH, 3, padding=1).to(job.dev, DT).to(memory_format=torch.channels_last)
        self.blocks = nn.ModuleList(ResBlock() for _ in range(3)).to(job.dev, DT).to(memory_format=torch.channels_last)
        self.out = nn.Conv2d(CH, 4, 3, padding=1).to(job.dev, DT).to(memory_format=torch.channels_last)
        self.latent = torch.randn(BATCH, 4, RES, RES, device=job.dev, dtype=DT)
        self.prompts = torch.randn(job.size(77 * 600, 77), TXT, device=job.dev, dtype=DT)
        self.rows = 77
        self.cond = None
        self.keep_cond = True
        self.k = 0

    def condition(self):
        if self.cond is None or not self.keep_cond:
            rich = self.tower.read_cache(self.prompts[:self.rows])
            self.cond = rich.mean(0, keepdim=True).expand(BATCH, TXT)
        return self.cond

    @torch.no_grad()
    def host_step(self):
        t = 1 - (self.k % 50) / 50
        self.k += 1
        cond = self.condition()
        h = self.inp(self.latent.contiguous(memory_format=torch.channels_last))
        for b in self.blocks:
            h = b(h, cond)
        eps = self.out(F.silu(h))
        self.latent = (self.latent - 0.02 * t * eps).clamp_(-4, 4)


def main():
    s = Sampler()

    def negatives(n, on):
        s.rows, s.keep_cond = max(1, int(n)), not on
    c = kit.Cause("device_compute", "TextTower.read_cache", negatives, job.share(0.43, 0.55), job.size(77 * 100, 20), 16,
                  job.size(77 * 600, 77))
    kit.examine(job, [c], "the unchanged prompts go through the text encoder again in each denoising step", step=s.host_step)


if __name__ == "__main__":
    main()
