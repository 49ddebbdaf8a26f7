# SPDX-License-Identifier: Apache-2.0
"""Click-rate ranking: many small embedding tables, crossed features, a two-layer tower."""
import kit
import os
import subprocess
import sys
import time


def lodger():
    kit.bond()
    dial = kit.Dial(sys.argv[sys.argv.index("--lodger") + 1])
    offset = 0.0007 * (os.getpid() % 9)
    time.sleep(offset)
    n = 0
    while True:
        duty = min(1.0, dial[0])
        if duty <= 0.0:
            time.sleep(0.005)
            continue
        end = time.perf_counter() + 0.012 * duty
        while time.perf_counter() < end:
            for k in range(200):
                n = (n * 31 + k) & 0xFFFF
        if duty < 1.0:
            time.sleep(0.012 * (1.0 - duty))


if "--lodger" in sys.argv:
    lodger()

import random

SEED = sys.argv[sys.argv.index("--seed") + 1] if "--seed" in sys.argv else "0"
CORES = sorted(os.sched_getaffinity(0))
if len(CORES) > 2:
    at = random.Random(SEED).randrange(0, len(CORES) - 1)
    os.sched_setaffinity(0, CORES[at:at + 2])
DIAL = kit.Dial()
LODGERS = [subprocess.Popen([sys.executable, os.path.abspath(__file__), "--lodger", DIAL.path])
           for _ in range(1 if "--smoke" in sys.argv else 6)]

import torch
from torch import nn


class Ranker(nn.Module):
    def __init__(self, tables, rows, width):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(rows, width) for _ in range(tables)])
        self.low = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, width))
        self.top = nn.Sequential(nn.Linear(width + (tables + 1) * tables // 2, 256), nn.ReLU(), nn.Linear(256, 1))
        self.register_buffer("ii", torch.triu_indices(tables + 1, tables + 1, 1)[0])
        self.register_buffer("jj", torch.triu_indices(tables + 1, tables + 1, 1)[1])

    def forward(self, dense, cats):
        low = self.low(dense)
        rows = [low] + [t(cats[i]) for i, t in enumerate(self.tables)]
        z = torch.stack(rows, 1)
        cross = torch.bmm(z, z.transpose(1, 2))[:, self.ii, self.jj]
        return self.top(torch.cat([low, cross], 1)).squeeze(1)


class Adagrad:
    def __init__(self, params, lr):
        self.params, self.lr = list(params), lr
        self.sums = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def step(self):
        for p, s in zip(self.params, self.sums):
            s.addcmul_(p.grad, p.grad)
            p.addcdiv_(p.grad, s.sqrt().add_(1e-6), value=-self.lr)
            p.grad = None


def learn(stage, model, opt, batch, rows, tables):
    dense = torch.randn(batch, 13, device=stage.device)
    cats = torch.randint(0, rows, (tables, batch), device=stage.device)
    click = (dense[:, 0] > 0).float()
    loss = nn.functional.binary_cross_entropy_with_logits(model(dense, cats), click)
    loss.backward()
    opt.step()
    return loss.item()


def main():
    stage = kit.Stage(__file__, {
        "a": kit.Part("cpu_starvation", "learn", kit.HEAVY, start=0.35, tiny=0.3, least=0.01, most=1.0, alt="Ranker.forward"),
    }, "other processes are busy on the two cores this one is pinned to", window=0.9, settle=4)
    for p in LODGERS:
        stage.child(p)
    stage.at_end(lambda: os.unlink(DIAL.path))
    tables = stage.pick(24, 28, 32) if not stage.smoke else 4
    rows, batch = 20000 if not stage.smoke else 100, stage.pick(512, 1024) if not stage.smoke else 16
    model = Ranker(tables, rows, 32).to(stage.device)
    opt = Adagrad(model.parameters(), 0.01)
    losses = []
    while True:
        losses.append(learn(stage, model, opt, batch, rows, tables))
        DIAL[0] = stage.amount("a")
        if not stage.tick():
            break
    stage.leave()


if __name__ == "__main__":
    main()
