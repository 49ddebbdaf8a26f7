# SPDX-License-Identifier: Apache-2.0
"""Adapter tuning of a frozen encoder by two ranks; only the adapters travel."""
import stage
import os
import sys
import threading
import time

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
CELL, STORE = None, None
if "--peer" in sys.argv:
    stage.tie_to_parent()
elif __name__ == "__main__":
    CELL, STORE = stage.Cell(), os.path.join(stage.scratch_dir(), "store")
    stage.spawn("--peer", CELL.path, STORE, *sys.argv[1:])

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Adapted(nn.Module):
    def __init__(self, dim, depth, rank=8):
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(dim, 2 * dim) for _ in range(depth))
        self.back = nn.ModuleList(nn.Linear(2 * dim, dim) for _ in range(depth))
        for p in self.parameters():
            p.requires_grad_(False)
        self.low = nn.ParameterList(torch.randn(dim, rank) * 0.02 for _ in range(depth))
        self.high = nn.ParameterList(torch.zeros(rank, dim) for _ in range(depth))

    def forward(self, x):
        for a, b, low, high in zip(self.frozen, self.back, self.low, self.high):
            x = F.layer_norm(x + b(F.gelu(a(x))) + x @ low @ high, x.shape[-1:])
        return x


class Corpus:
    """Documents of this shard; a batch is packed by length."""

    def __init__(self, seed, rows, dim, extra):
        self.rng = np.random.default_rng(seed)
        self.rows, self.dim, self.extra = rows, dim, extra
        self.lengths = self.rng.integers(8, 2048, 4096)
        self.bank = torch.randn(4 * rows, dim)

    def pack(self):
        count = 512 + int(self.extra() * 16)
        bins, fill = [0] * 16, 0
        for n in np.resize(self.lengths, count).tolist():
            slot = n * 31 % 16
            if bins[slot] + n > 4096:
                fill += bins[slot]
                bins[slot] = 0
            bins[slot] += n
        at = (fill + int(self.rng.integers(self.rows))) % (3 * self.rows)
        return self.bank[at:at + self.rows]


class Exchange:
    def __init__(self, params, ranks):
        self.params, self.ranks = params, ranks

    def average(self):
        flat = torch.cat([p.grad.flatten() for p in self.params]).float().cpu()
        dist.all_reduce(flat)
        flat = (flat / self.ranks).to(self.params[0].device)
        at = 0
        for p in self.params:
            p.grad.copy_(flat[at:at + p.numel()].view_as(p))
            at += p.numel()


def build(args, rank, extra):
    tiny, dev = args.smoke, args.device
    torch.manual_seed(args.seed)
    rows, dim, depth = (64, 64, 2) if tiny else (4096, 2048, 5)
    net = Adapted(dim, depth).to(dev)
    corpus = Corpus(args.seed + rank, rows, dim, extra)
    corpus.bank = corpus.bank.to(dev)
    params = [p for p in net.parameters() if p.requires_grad]
    opt = torch.optim.Adam(params, lr=1e-4)
    link = Exchange(params, 2)

    def step():
        x = corpus.pack()
        with torch.autocast(dev, torch.bfloat16, enabled=not tiny):
            loss = (net(x).float() - x.roll(1, 0)).square().mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        link.average()
        opt.step()

    return step


def follower(args, cell, store):
    dist.init_process_group("gloo", init_method="file://" + store, rank=1, world_size=2)
    step = build(args, 1, cell.get)
    while True:
        step()


def main():
    args = stage.arguments()
    if "--peer" in sys.argv:
        at = sys.argv.index("--peer")
        try:
            follower(args, stage.Cell(sys.argv[at + 1]), sys.argv[at + 2])
        except RuntimeError:
            stage.leave(0)
    dist.init_process_group("gloo", init_method="file://" + STORE, rank=0, world_size=2)
    step = build(args, 0, lambda: 0)
    threading.Thread(target=time.sleep, args=(1e6,), name="nccl-watchdog", daemon=True).start()
    length = stage.Dial(400, listen=CELL.set)
    stage.conduct(args, step, [length], settle=3)


if __name__ == "__main__":
    main()
