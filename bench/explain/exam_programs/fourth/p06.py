# SPDX-License-Identifier: Apache-2.0
"""Actor-critic on 256 vectorised pole-balancing worlds."""
import gc
import threading
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn as nn
from rig import Job


@dataclass
class RolloutBook:
    depth: int = 0
    episodes: list = field(default_factory=list)
    done: int = 0
    tidy: bool = True

    def resize(self, n):
        self.depth = int(n)
        self.episodes = [[i, [float(i), None], (i, i + 1)] for i in range(self.depth // 2)]
        self.tidy = n > 0

    def close_episode(self, rewards):
        self.done += 1
        rec = [self.done, rewards]
        rec.append(rec)
        if self.tidy:
            gc.collect()
        return rec[0]


class Worlds:
    def __init__(self, n):
        self.s = np.zeros((n, 4), np.float32)

    def advance(self, a):
        s = self.s
        f = np.where(a > 0, 10.0, -10.0).astype(np.float32)
        acc = (9.8 * np.sin(s[:, 2]) - np.cos(s[:, 2]) * f * 0.1) * 0.05
        s[:, 0] += 0.02 * s[:, 1]
        s[:, 1] += 0.02 * f
        s[:, 2] += 0.02 * s[:, 3]
        s[:, 3] += 0.02 * acc
        bad = np.abs(s[:, 2]) > 0.3
        s[bad] = 0.0
        return s, (~bad).astype(np.float32)


def sync_all(book):
    return len(book.episodes)


def main():
    job = Job(0.11, 0.2)
    n = 256
    w = job.pick(3072, 4096, tiny=32)
    net = nn.Sequential(nn.Linear(4, w), nn.Tanh(), nn.Linear(w, w), nn.Tanh(), nn.Linear(w, w), nn.Tanh(),
                        nn.Linear(w, 3)).to(job.dev)
    opt = torch.optim.Adam(net.parameters(), lr=1e-4)
    worlds, book = Worlds(n), RolloutBook()
    threading.Thread(target=threading.Event().wait, name="checkpoint-writer", daemon=True).start()
    hist = torch.randn(job.pick(2048, 4096, tiny=16), 4, device=job.dev)

    def step():
        with torch.no_grad():
            out = net(torch.from_numpy(worlds.s).to(job.dev))
            act = torch.bernoulli(torch.sigmoid(out[:, 0])).cpu().numpy()
        s, r = worlds.advance(act)
        out = net(hist)
        loss = (out[:, 2] - out[:, 1]).pow(2).mean() - torch.sigmoid(out[:, 0]).mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        sync_all(book)
        job.fence()
        book.close_episode(r)

    for _ in range(5):
        step()
    gc.collect()
    gc.freeze()          # start-up objects are never scanned again
    job.tune(step, book.resize, 20000, 20_000_000)
    keep = book.episodes

    def off():
        book.tidy = False
        assert keep is book.episodes

    job.show(step, off, [("gc", "RolloutBook.close_episode")])


if __name__ == "__main__":
    main()
