# SPDX-License-Identifier: Apache-2.0
"""Session recommender: visits are counted on the host, a two tower model is trained on the device."""
import threading
import time

import numpy as np
import stage
import torch
from torch import nn


class Visits:
    """Wide count table, one row a session."""

    def __init__(self, most):
        self.most = most
        self.width = 512
        self.rows = 0
        self.col = np.random.default_rng(1).integers(0, self.width, most)
        self.idle = np.zeros((16, self.width))

    def count(self):
        n = int(min(self.rows, self.most))
        if n < 16:
            return self.idle[:, :64].sum(0)
        table = np.zeros((n, self.width))
        at = np.arange(n)
        table[at, self.col[:n]] += 1.0
        return table[:16, :64].sum(0)


class Towers(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.user = nn.Sequential(nn.Linear(64, d), nn.ReLU(), nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d))
        self.item = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d))

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(1)


def training(opts, visits):
    s = opts.smoke
    d, rows = (16, 32) if s else (2048, 8192)
    net = Towers(d).to(opts.device)
    adam = torch.optim.Adam(net.parameters(), 1e-4, fused=not s)
    items = torch.randn(rows, d, device=opts.device)
    while True:
        profile = torch.from_numpy(visits.count().astype(np.float32)).to(opts.device)
        score = net(profile.expand(rows, 64) + items[:, :64 if not s else 1], items)
        loss = nn.functional.softplus(-score).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        yield loss.item()


def swapper():
    while True:
        time.sleep(0.015)


def main():
    opts = stage.options()
    visits = Visits(100000)
    loop = training(opts, visits)
    threading.Thread(target=swapper, name="page-swapper", daemon=True).start()

    def rows(x):
        visits.rows = x

    stage.conduct(opts, lambda: next(loop), [
        stage.Factor("memory", "Visits.count", "", rows, 2000.0, 100000.0),
    ], "light")


if __name__ == "__main__":
    main()
