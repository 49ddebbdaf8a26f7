# SPDX-License-Identifier: Apache-2.0
"""GraphSAGE node classification; the graph lives as Python objects, mini-batches are sampled from it."""
import gc
import threading
import time
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from rig import Kit, DEV


class Node:
    __slots__ = ("key", "links", "tags")

    def __init__(self, key, tags):
        self.key, self.tags, self.links = key, tags, []


class Store:
    def __init__(self, n, degree, rng):
        self.nodes = [Node(i, {"lang": i % 7, "w": [i]}) for i in range(n)]
        for v in self.nodes:
            v.links.extend(self.nodes[rng.randrange(n)] for _ in range(degree))

    def sample(self, rng, n, fan):
        seeds = rng.sample(self.nodes, n)
        near = [rng.choice(s.links).key for s in seeds for _ in range(fan)]
        return np.array([s.key for s in seeds]), np.array(near)


class Sage(nn.Module):
    def __init__(self, n, d, classes, depth):
        super().__init__()
        self.feat = nn.Parameter(torch.randn(n, d) * 0.1)
        self.mix = nn.ModuleList([nn.Linear(2 * d, d) for _ in range(depth)])
        self.out = nn.Linear(d, classes)

    def forward(self, seed, near, fan):
        h = self.feat[seed]
        m = self.feat[near].view(len(seed), fan, -1)
        for l in self.mix:
            h = torch.relu(l(torch.cat([h, m.mean(1)], 1)))
            m = torch.relu(l(torch.cat([m, h[:, None].expand_as(m)], 2)))
        return self.out(h + m.mean(1))


def release_unused(state):
    """keeps the resident size of long jobs in check"""
    state["runs"] += 1
    return gc.collect()


def prefetch_loop(stop):
    while not stop.wait(0.2):
        pass


def main():
    kit = Kit(__file__)
    rng = kit.rng
    n = kit.n(rng.choice([60000, 80000, 100000]), 300)
    fan = kit.n(rng.choice([8, 10]), 2)
    batch = kit.n(rng.choice([1024, 1536]), 8)
    d = kit.n(rng.choice([512, 640]), 16)
    store = Store(n, 6, rng)
    net = Sage(n, d, 40, 4).to(DEV)
    opt = torch.optim.SGD(net.parameters(), 0.05)
    share = kit.share(0.2)
    stop = threading.Event()
    threading.Thread(target=prefetch_loop, args=(stop,), name="dataloader", daemon=True).start()
    seen = 0.0

    def train():
        nonlocal seen
        seed, near = store.sample(rng, batch, fan)
        seed = torch.from_numpy(seed).to(DEV)
        near = torch.from_numpy(near).to(DEV)
        loss = F.cross_entropy(net(seed, near, fan), seed % 40)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        seen = 0.9 * seen + 0.1 * loss.item()

    state = {"runs": 0}
    base, _ = kit.measure(train)
    gc.collect()
    pause = kit.unit(lambda: release_unused(state), 4)
    every = max(1, round(pause * (1 - share) / share / base))
    kit.cause("gc", kit.place(release_unused, "gc.collect()"),
              "full collections over a large live object graph", "release_unused")
    begin = time.perf_counter()
    for i in kit.steps(warm=max(6, every + 1) if every < 100 else 6):
        train()
        if kit.on and i % every == 0:
            release_unused(state)
    return begin


if __name__ == "__main__":
    main()
