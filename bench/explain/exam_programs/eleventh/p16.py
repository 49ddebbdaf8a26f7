# SPDX-License-Identifier: Apache-2.0
"""Speech recognition training on utterances of many lengths."""
import threading
import time

import stage
import torch
from torch import nn
from torch.nn import functional as F


class Encoder(nn.Module):
    def __init__(self, d, n):
        super().__init__()
        self.front = nn.Conv1d(80, d, 5, 2, 2)
        self.ff = nn.ModuleList(nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.SiLU(), nn.Linear(4 * d, d))
                                for _ in range(n))
        self.head = nn.Linear(d, 512)

    def forward(self, x):
        x = self.front(x).transpose(1, 2)
        for f in self.ff:
            x = x + f(x)
        return self.head(x)


class Bench:
    def __init__(self, opts):
        s = opts.smoke
        self.dev = opts.device
        self.lengths = [32, 48, 40] if s else [900, 1400, 700, 1600, 1100, 1250, 820, 1500]
        self.turn = opts.seed % 8
        self.b = 2 if s else 24
        self.net = Encoder(16 if s else 768, 1 if s else 6).to(self.dev)
        self.opt = torch.optim.AdamW(self.net.parameters(), 1e-4, fused=not s)
        self.trims = stage.Quota()
        self.audio = torch.randn(self.b, 80, max(self.lengths), device=self.dev)

    def make_room(self):
        """Long utterances must not fail for want of memory."""
        for _ in range(self.trims.take()):
            if self.dev == "cuda":
                torch.cuda.empty_cache()
            else:
                time.sleep(0.002)

    def part(self, length):
        x = self.audio[:, :, :length]
        with torch.autocast(self.dev, dtype=torch.bfloat16):
            out = self.net(x)
            loss = F.log_softmax(out.float(), -1)[..., 0].mean().neg()
        loss.backward()
        return loss.detach()

    def step(self):
        total = 0.0
        for _ in range(3):
            self.turn += 1
            total = total + self.part(self.lengths[self.turn % len(self.lengths)])
            self.make_room()
        self.opt.step()
        self.opt.zero_grad(set_to_none=True)
        return total.item()


def tidy():
    while True:
        time.sleep(0.1)


def main():
    opts = stage.options()
    job = Bench(opts)
    threading.Thread(target=tidy, name="gc-collector", daemon=True).start()
    stage.conduct(opts, job.step, [
        stage.Factor("allocator", "Bench.make_room", "Bench.part", job.trims.set, 0.1, 30.0),
    ], "light")


if __name__ == "__main__":
    main()
