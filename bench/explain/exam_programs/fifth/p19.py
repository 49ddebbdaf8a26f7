# SPDX-License-Identifier: Apache-2.0
#!/usr/bin/env python3
"""Power-grid load forecasting: sparse meter events are laid on dense host boards, read out, and fed to a TCN."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import bench_kit as bk


class EventBoards:
    """`boards` sparse boards (meters x minutes); events are added up where they meet."""

    def __init__(self, seed, boards, cells, events):
        rng = np.random.default_rng(seed)
        self.cells, self.boards = cells, boards
        self.where = [np.sort(rng.integers(0, cells, events)) for _ in range(boards)]
        self.what = rng.random((boards, events), dtype=np.float32)
        self.kept = [np.zeros(cells, dtype=np.float32) for _ in range(boards)]
        self.blank = 0

    def lay_out(self):
        rows = np.empty(self.what.shape, dtype=np.float32)
        for i in range(self.boards):
            w = self.where[i]
            if i < self.blank:
                board = np.zeros(self.cells, dtype=np.float32)
                board[w] += self.what[i]
                rows[i] = board[w]
            else:
                board = self.kept[i]
                board[w] += self.what[i]
                rows[i] = board[w]
                board[w] = 0.0
        return rows


class TemporalBlock(nn.Module):
    def __init__(self, c, dil):
        super().__init__()
        self.c1 = nn.Conv1d(c, c, 3, padding=dil, dilation=dil)
        self.c2 = nn.Conv1d(c, c, 3, padding=dil, dilation=dil)
        self.norm = nn.GroupNorm(8, c)

    def forward(self, x):
        return x + self.c2(F.gelu(self.norm(self.c1(x))))


class Forecaster(nn.Module):
    def __init__(self, boards, c, depth):
        super().__init__()
        self.inp = nn.Conv1d(boards, c, 1)
        self.body = nn.Sequential(*[TemporalBlock(c, 1 << (i % 5)) for i in range(depth)])
        self.out = nn.Conv1d(c, 1, 1)

    def forward(self, x):
        return self.out(self.body(self.inp(x))).squeeze(1)


class LoadTrainer:
    def __init__(self, o):
        self.o = o
        boards, cells, events, self.rep, c, depth = (4, 1 << 20, 200, 2, 16, 2) if o.smoke else \
            (24, 9 << 20, 1024, o.rng.choice([12, 14, 16]), 256, 8)
        self.boards = EventBoards(o.seed, boards, cells, events)
        self.stage = torch.empty(boards, events, pin_memory=o.gpu)
        self.net = Forecaster(boards, c, depth).to(o.device)
        self.opt = torch.optim.AdamW(self.net.parameters(), 1e-4, fused=o.gpu)
        self.target = torch.randn(self.rep, events, device=o.device)
        self.curve = []

    def io_wait_epoch(self):
        self.stage.copy_(torch.from_numpy(self.boards.lay_out()))
        x = self.stage.to(self.o.device, non_blocking=True)
        x = x[None] + 0.05 * torch.randn(self.rep, *x.shape, device=self.o.device)
        with torch.autocast(self.o.device.type, dtype=torch.bfloat16):
            loss = F.huber_loss(self.net(x).float(), self.target)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        self.curve.append(loss.item())
        if len(self.curve) > 64:
            del self.curve[:32]


def main():
    o = bk.options()
    share = o.rng.uniform(0.12, 0.20)
    t = LoadTrainer(o)
    bk.mean_step(t.io_wait_epoch, 0.1 if o.smoke else 1.0, o.device)
    base = bk.mean_step(t.io_wait_epoch, o.probe, o.device)

    def measure(k):
        t.boards.blank = k
        return bk.mean_step(t.io_wait_epoch, o.probe, o.device)

    k = bk.tune(measure, base, share, 3, t.boards.boards)
    on, off = bk.two_phases(t.io_wait_epoch, o, lambda: setattr(t.boards, "blank", k),
                            lambda: setattr(t.boards, "blank", 0))
    bk.truth(on, off, "memory", "EventBoards.lay_out",
             f"{k} fresh boards of {t.boards.cells * 4} bytes touched (page faults) and given back every step")


if __name__ == "__main__":
    main()
