# SPDX-License-Identifier: Apache-2.0
"""Graph neural network on sampled neighbourhoods; sampling on the host, a small set of processors is given to the job."""
from stage import Cell, Dial, arguments, conduct, spawn, tie_to_parent

import os
import sys
import time


def await_reply(amount):
    """Tally of the crawl that runs beside the training."""
    tie_to_parent()
    seen, k = [0] * 1024, 0
    while True:
        share = amount.get()
        began = time.perf_counter()
        while time.perf_counter() - began < 0.02 * share:
            for _ in range(200):
                k = (k * 1103515245 + 12345) & 0x7fffffff
                seen[k & 1023] += 1
        time.sleep(max(0.0005, 0.02 * (1 - share)))


if "--remote" in sys.argv:
    await_reply(Cell(sys.argv[2]))

import numpy as np
import torch
import torch.nn as nn


class Neighbours:
    def __init__(self, nodes, degree, seed):
        self.rng = np.random.default_rng(seed)
        self.nodes = nodes
        self.edges = self.rng.integers(0, nodes, (nodes, degree), dtype=np.int64)

    def read_mailbox(self, seeds, fan):
        layer, layers = seeds, []
        weight = np.zeros(self.nodes)
        for width in fan:
            pick = self.rng.integers(0, self.edges.shape[1], (layer.size, width))
            found = self.edges[layer[:, None], pick]
            weight += np.bincount(found.ravel(), minlength=self.nodes)
            layers.append((found, 1.0 / weight[found]))
            layer = np.unique(found)[:layer.size * 2]
        return layers


class SageNet(nn.Module):
    def __init__(self, features, width, classes):
        super().__init__()
        self.inner, self.mix = nn.Linear(2 * features, width), nn.Linear(width, width)
        self.out = nn.Linear(width, classes)

    def forward(self, own, around):
        x = torch.relu(self.inner(torch.cat([own, around.mean(1)], 1)))
        return self.out(torch.relu(self.mix(x)))


def main():
    args = arguments()
    amount = Cell()
    cpus = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, cpus)
    for _ in range(6):
        spawn("--remote", amount.path)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    nodes, features, width, batch, fan = (2000, 16, 32, 128, (4, 4)) if args.smoke else (400_000, 512, 1536, 6144, (10, 8))
    graph = Neighbours(nodes, 24, args.seed)
    table = torch.randn(nodes, features, device=args.device)
    labels = torch.randint(40, (nodes,), device=args.device)
    net = SageNet(features, width, 40).to(args.device)
    optim = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step():
        seeds = graph.rng.integers(0, nodes, batch)
        layers = graph.read_mailbox(seeds, fan)
        near, close = (torch.from_numpy(part).to(args.device) for part in layers[0])
        far, remote = (torch.from_numpy(part).to(args.device) for part in layers[1])
        own = torch.from_numpy(seeds).to(args.device)
        loss = nn.functional.cross_entropy(net(table[own], table[near] * close.float()[..., None]), labels[own])
        ring = far[:, 0]
        loss = loss + nn.functional.cross_entropy(net(table[ring], table[far] * remote.float()[..., None]), labels[ring])
        optim.zero_grad(set_to_none=True)
        loss.backward()
        optim.step()
        return loss.item()

    dial = Dial(0.15, hi=0.985, paired=True, listen=amount.set)
    conduct(args, step, [dial], settle=4, rest=0.1)


if __name__ == "__main__":
    main()
