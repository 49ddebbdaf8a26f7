# SPDX-License-Identifier: Apache-2.0
"""Graph network with neighbour sampling on the host; this job is bound to one core, archivers run beside it."""
import os
import sys
import time
import zlib

import stage


def archive(opts):
    stage.tie_to_parent()
    dial = stage.Dial(opts.arg)
    block = bytes(range(256)) * 16
    while True:
        busy = dial[0] * 0.006
        end = time.perf_counter() + busy
        while time.perf_counter() < end:
            zlib.compress(block, 6)
        rest = 0.006 - busy
        if rest > 0:
            time.sleep(rest)


class Sampler:
    def __init__(self, np, nodes, fan):
        self.np = np
        rng = np.random.default_rng(8)
        self.edges = rng.integers(0, nodes, size=(nodes, fan), dtype=np.int64)
        self.rng = rng
        self.nodes = nodes

    def expand(self, seeds, hops):
        """Unique neighbours for every hop."""
        np = self.np
        layers, frontier = [], seeds
        for _ in range(hops):
            near = self.edges[frontier].ravel()
            frontier = np.unique(near)
            layers.append(np.searchsorted(frontier, near))
        return frontier, layers


def bind(core):
    os.sched_setaffinity(0, {core})


def start_archivers(dial, opts, count):
    for _ in range(count):
        stage.child("archive", dial.path, opts)


def main():
    opts = stage.options()
    if opts.role == "archive":
        return archive(opts)
    import numpy as np
    import torch
    s = opts.smoke
    nodes, d, n = (500, 16, 32) if s else (200000, 512, 800)
    dev = opts.device
    feats = torch.randn(nodes, d, device=dev)
    w = [torch.randn(d, d, device=dev) * d ** -0.5 for _ in range(8)]
    (feats[:4] @ w[0]).sum().item()
    sampler = Sampler(np, nodes, 10)
    dial = stage.Dial()
    bind(sorted(os.sched_getaffinity(0))[-1])
    start_archivers(dial, opts, 3)

    @torch.inference_mode()
    def step():
        seeds = sampler.rng.integers(0, sampler.nodes, n)
        frontier, layers = sampler.expand(seeds, 2)
        idx = torch.from_numpy(frontier).to(dev)
        h = feats[idx]
        for m in w:
            h = torch.relu(h @ m) + h
        near = torch.from_numpy(layers[-1]).to(dev)
        return h[near].view(-1, 10, d).mean(1).sum().item()

    def knob(x):
        dial[0] = x

    stage.conduct(opts, step, [
        stage.Factor("cpu_starvation", "Sampler.expand", "start_archivers", knob, 0.25, 1.0),
    ], "heavy", settle=3)


if __name__ == "__main__":
    sys.exit(main())
