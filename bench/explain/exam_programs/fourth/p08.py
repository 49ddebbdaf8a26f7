# SPDX-License-Identifier: Apache-2.0
"""Keyword-spotting conformer-ish model; noise augmentation with a bank of recorded backgrounds."""
import threading
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from rig import Job

job = Job(0.21, 0.44)
FRAMES = job.pick(256, 320, tiny=16)
MELS = 80
B = job.pick(48, 64, tiny=2)
C = job.pick(512, 640, tiny=16)


class Frontend:
    def __init__(self, rows):
        bank = np.random.default_rng(5).standard_normal((rows, FRAMES, MELS)).astype(np.float32)
        self.host = torch.from_numpy(bank)
        self.bank = self.host.to(job.dev)
        self.part = 0

    def noise(self, idx):
        if self.part:
            n = self.part
            for a in range(0, n, 128):
                b = min(a + 128, n)
                self.bank[a:b].copy_(self.host[a:b].to(job.dev))
        return self.bank[idx]

    def mix(self, x):
        idx = torch.randint(self.bank.shape[0], (x.shape[0],), device=job.dev)
        return x + 0.05 * self.noise(idx)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.dw = nn.Conv1d(C, C, 15, padding=7, groups=C)
        self.a = nn.Linear(C, 4 * C)
        self.b = nn.Linear(4 * C, C)
        self.n = nn.LayerNorm(C)

    def forward(self, x):
        x = x + self.dw(x.transpose(1, 2)).transpose(1, 2)
        return self.n(x + self.b(F.silu(self.a(x))))


class Spotter(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.inp = nn.Linear(MELS, C)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.out = nn.Linear(C, 36)

    def forward(self, x):
        x = self.inp(x)
        for l in self.layers:
            x = l(x)
        return self.out(x.mean(1))


def main():
    front = Frontend(job.pick(2048, 3072, tiny=300))
    net = Spotter(job.pick(6, 8, tiny=1)).to(job.dev)
    opt = torch.optim.SGD(net.parameters(), lr=1e-3)
    clips = torch.randn(B, FRAMES, MELS, device=job.dev)
    y = torch.randint(36, (B,), device=job.dev)
    threading.Thread(target=threading.Event().wait, name="dataloader", daemon=True).start()

    def step():
        x = front.mix(clips)
        with torch.autocast(job.dev.type, torch.bfloat16, enabled=job.cuda):
            loss = F.cross_entropy(net(x).float(), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        job.pace(1)

    def setk(k):
        front.part = min(int(k), front.host.shape[0])

    job.tune(step, setk, 256, front.host.shape[0])
    job.show(step, lambda: setk(0), [("copies", "Frontend.noise")])


main()
