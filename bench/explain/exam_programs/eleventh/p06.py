# SPDX-License-Identifier: Apache-2.0
"""Off-policy control: an actor thread feeds a replay store, a learner samples it."""
import queue
import threading
import zlib

import numpy as np
import stage
import torch
from torch import nn


class Replay:
    def __init__(self, rows, width):
        self.guard = threading.Lock()
        self.obs = np.random.default_rng(1).standard_normal((rows, width), dtype=np.float32)
        self.packs = [b""] * 64
        self.cursor = 0
        self.rng = np.random.default_rng(2)

    def absorb(self, episode, level):
        with self.guard:
            blob = zlib.compress(episode[:level].tobytes(), 1)
            self.packs[self.cursor % 64] = blob
            self.cursor += 1
            self.obs[self.cursor % len(self.obs)] = 0.5

    def sample(self, n):
        at = self.rng.integers(0, len(self.obs), n)
        with self.guard:
            return self.obs[at]


class Actor(threading.Thread):
    def __init__(self, replay):
        super().__init__(name="copy-engine", daemon=True)
        self.replay = replay
        self.orders = queue.SimpleQueue()
        self.begun = threading.Event()
        self.level = 0
        self.episode = np.random.default_rng(4).integers(0, 30, 1 << 22).astype(np.uint8)

    def run(self):
        while True:
            self.orders.get()
            self.begun.set()
            if self.level:
                self.replay.absorb(self.episode, self.level)


def mlp(i, h, o):
    return nn.Sequential(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(),
                         nn.Linear(h, o))


class Learner:
    def __init__(self, opts):
        s = opts.smoke
        self.dev = opts.device
        w = 32 if s else 256
        self.n = 64 if s else 4096
        self.critics = [mlp(w, 64 if s else 2048, 1).to(self.dev) for _ in range(2)]
        self.opt = torch.optim.Adam([p for c in self.critics for p in c.parameters()], 1e-4, foreach=True)
        self.replay = Replay(256 if s else 50000, w)
        self.actor = Actor(self.replay)
        self.actor.start()

    def update(self):
        self.actor.begun.clear()
        self.actor.orders.put(1)
        self.actor.begun.wait()
        batch = torch.from_numpy(self.replay.sample(self.n)).to(self.dev)
        loss = sum((c(batch) - 0.3).square().mean() for c in self.critics)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss.item()

    def set_level(self, x):
        self.actor.level = int(min(x, 1 << 22))


def main():
    opts = stage.options()
    learner = Learner(opts)
    stage.conduct(opts, learner.update, [
        stage.Factor("lock", "Replay.sample", "Replay.absorb", learner.set_level, 20000.0, 1 << 22),
    ], "middle")


if __name__ == "__main__":
    main()
