# SPDX-License-Identifier: Apache-2.0
"""Embedding of a document archive; the timing page of the operators wants the time of each part of each layer."""
import time
import torch
import torch.nn as nn
import torch.nn.functional as F
import exam_kit as kit

job = kit.Job("p19")
ROWS = job.size([2048, 3072], 16)
DIM = job.size([512, 640], 16)
LAYERS = job.size([28, 32, 36], 3)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.ones(DIM))


class PageClock:
    """Laps per part; only as many parts as the page shows."""

    def __init__(self):
        self.shown, self.acc = 0.0, 0.0
        self.total, self.last = {}, time.perf_counter()

    def gather_rows(self, part):
        self.acc += self.shown
        while self.acc >= 1:
            self.acc -= 1
            if job.cuda:
                torch.cuda.synchronize()
            now = time.perf_counter()
            self.total[part] = self.total.get(part, 0.0) + now - self.last
            self.last = now


class Archive:
    def __init__(self):
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS)).to(job.dev).eval()
        self.clock = PageClock()
        self.docs = torch.randn(6, ROWS, DIM, device=job.dev)
        self.bank = torch.zeros(6, DIM, device=job.dev)
        self.n = 0

    def bulk_copy(self, x):
        lap = self.clock.gather_rows
        for layer in self.layers:
            h = layer.norm(x)
            lap("norm")
            h = layer.up(h)
            lap("up")
            h = F.gelu(h)
            lap("act")
            h = layer.down(h)
            lap("down")
            h = h * layer.scale
            lap("scale")
            x = x + h
            lap("residual")
        return x

    @torch.no_grad()
    def embed(self):
        i = self.n % 6
        self.n += 1
        self.bank[i] = self.bulk_copy(self.docs[i]).mean(0)


def main():
    a = Archive()

    def shown(n, on):
        a.clock.shown = n / (6 * LAYERS) if on else 0.0
    c = kit.Cause("synchronization", "PageClock.gather_rows", shown, job.share(0.23, 0.30), job.size(80, 4), 1, 60000)
    kit.examine(job, [c], "the lap clock synchronises the device after parts of layers", step=a.embed)


if __name__ == "__main__":
    main()
