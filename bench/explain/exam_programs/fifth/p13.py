# SPDX-License-Identifier: Apache-2.0
#!/usr/bin/env python3
"""Pixel-control agent: vectorised toy environment, replay kept as linked Python records, Q-network on the device."""
import gc
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import bench_kit as bk


class Record:
    __slots__ = ("prev", "next", "frame", "action", "reward", "tags")

    def __init__(self, prev, frame, action, reward):
        self.prev, self.next = prev, None
        self.frame, self.action, self.reward = frame, action, reward
        self.tags = [frame, action]
        if prev is not None:
            prev.next = self


class ReplayChain:
    def __init__(self, seed, frames):
        self.rng = random.Random(seed)
        self.frames = frames
        self.items, self.last = [], None
        self.tidy = False

    def grow(self, n):
        while len(self.items) < n:
            self.add(0, 0.0)

    def add(self, action, reward):
        r = Record(self.last, self.rng.randrange(self.frames), action, reward)
        self.last = r
        self.items.append(r)

    def trim(self, size):
        extra = len(self.items) - size
        if extra > 0:
            for r in self.items[:extra]:
                if r.next is not None:
                    r.next.prev = None
            del self.items[:extra]
        if self.tidy:
            gc.collect()

    def sample(self, n):
        return self.rng.choices(self.items, k=n)


class QNet(nn.Module):
    def __init__(self, actions, side, w):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, w, 8, 4), nn.ReLU(), nn.Conv2d(w, 2 * w, 4, 2), nn.ReLU(),
                                  nn.Conv2d(2 * w, 2 * w, 3, 1), nn.ReLU(), nn.Flatten())
        n = self.body(torch.zeros(1, 4, side, side)).shape[1]
        self.head = nn.Sequential(nn.Linear(n, 16 * w), nn.ReLU(), nn.Linear(16 * w, actions))

    def forward(self, x):
        return self.head(self.body(x))


class Agent:
    def __init__(self, o):
        self.o = o
        side, w, self.batch, self.envs, n = (44, 4, 8, 4, 32) if o.smoke else \
            (84, 48, o.rng.choice([1536, 2048]), 64, 8192)
        self.frames = torch.randint(0, 255, (n, 4, side, side), dtype=torch.uint8, device=o.device)
        self.q = QNet(6, side, w).to(o.device)
        self.opt = torch.optim.Adam(self.q.parameters(), lr=1e-4, fused=o.gpu)
        self.chain = ReplayChain(o.seed, n)
        self.size = 2 * self.batch
        self.chain.grow(self.size)
        self.rng = np.random.default_rng(o.seed)

    def act(self):
        k = torch.from_numpy(self.rng.integers(0, len(self.frames), self.envs)).to(self.o.device)
        with torch.no_grad(), torch.autocast(self.o.device.type, dtype=torch.bfloat16):
            a = self.q(self.frames[k].float() / 255).argmax(1).tolist()
        for x in a:
            self.chain.add(x, float(x == 2))

    def learn_remote(self):
        rs = self.chain.sample(self.batch)
        idx = torch.tensor([r.frame for r in rs]).to(self.o.device)
        act = torch.tensor([r.action for r in rs]).to(self.o.device)
        rew = torch.tensor([r.reward for r in rs]).to(self.o.device)
        with torch.autocast(self.o.device.type, dtype=torch.bfloat16):
            q = self.q(self.frames[idx].float() / 255)
        loss = F.smooth_l1_loss(q.float().gather(1, act[:, None]).squeeze(1), rew)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()

    def iterate(self):
        self.act()
        self.chain.trim(self.size)
        self.learn_remote()


def main():
    o = bk.options()
    share = o.rng.uniform(0.12, 0.20)
    a = Agent(o)
    for _ in range(8):
        a.iterate()
    gc.collect()
    gc.freeze()
    bk.mean_step(a.iterate, 0.1 if o.smoke else 0.6, o.device)
    base = bk.mean_step(a.iterate, o.probe, o.device)

    def measure(n):
        a.size = n
        a.chain.grow(n)
        a.chain.trim(n)
        a.chain.tidy = True
        return bk.mean_step(a.iterate, o.probe, o.device)

    n = bk.tune(measure, base, share, 3 * a.batch, 400_000, lo=a.size)
    a.chain.tidy = False
    measure(n)
    on, off = bk.two_phases(a.iterate, o, lambda: setattr(a.chain, "tidy", True),
                            lambda: setattr(a.chain, "tidy", False))
    gc.unfreeze()
    bk.truth(on, off, "gc", "ReplayChain.trim", f"full collection every iteration with {n} linked records alive")


if __name__ == "__main__":
    main()
