# SPDX-License-Identifier: Apache-2.0
"""A PyTorch loop that can be repeated bit by bit: torch_steps.py train|graph.

Reads lines on standard input: "until N" ends it after N steps, "end" at once, "time S" answers with
the mean µs a step of the next S seconds, in blocks. At its end it prints one line of JSON: steps,
and a hash of the state after every EVERY steps.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import select
import sys
import time
from collections.abc import Callable

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

import torch
from torch import nn

EVERY = 200
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def train() -> tuple[Callable[[], None], Callable[[], bytes]]:
    """A small transformer, trained with AdamW on data of its own making."""
    torch.manual_seed(11)
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, dropout=0.1)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(128, 8)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randn(16, 32, 128, device=DEVICE)
    target = torch.randint(0, 8, (16, 32), device=DEVICE)
    last = torch.zeros((), device=DEVICE)

    def step() -> None:
        nonlocal last
        optimizer.zero_grad(set_to_none=True)
        last = nn.functional.cross_entropy(model(data).flatten(0, 1), target.flatten())
        last.backward()
        optimizer.step()

    return step, lambda: last.detach().cpu().numpy().tobytes()


def graph() -> tuple[Callable[[], None], Callable[[], bytes]]:
    """A CUDA graph of 100 small kernels, replayed."""
    x = torch.zeros(256, dtype=torch.int64, device=DEVICE)
    y = torch.rand(256, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(5))

    def work() -> None:
        for _ in range(25):
            x.add_(1)
            y.mul_(0.999)
            y.add_(0.001)
            x.add_(2)

    if DEVICE == "cpu":
        return work, lambda: x.numpy().tobytes() + y.numpy().tobytes()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize()
    replayed = torch.cuda.CUDAGraph()
    with torch.cuda.graph(replayed):
        work()
    return replayed.replay, lambda: x.cpu().numpy().tobytes() + y.cpu().numpy().tobytes()


def main() -> None:
    """Step until told to end."""
    torch.use_deterministic_algorithms(True)
    step, state = {"train": train, "graph": graph}[sys.argv[1]]()
    count, until, hashes = 0, 1 << 60, []
    timing_until = 0.0
    blocks: list[tuple[int, float]] = []
    print("ready", flush=True)
    while count < until:
        for _ in range(EVERY):
            step()
        count += EVERY
        hashes.append(hashlib.sha256(state()).hexdigest()[:12])  # waits for the device
        now = time.perf_counter()
        if timing_until:
            blocks.append((count, now))
            if now >= timing_until:
                pairs = itertools.pairwise(blocks)
                print(json.dumps([1e6 * (b[1] - a[1]) / EVERY for a, b in pairs]), flush=True)
                timing_until, blocks = 0.0, []
        if select.select([0], [], [], 0)[0]:
            words = sys.stdin.readline().split() or ["end"]
            match words:
                case ["until", number]:
                    until = int(number)
                case ["time", seconds]:
                    timing_until = now + float(seconds)
                case _:
                    break
    print(json.dumps({"steps": count, "hashes": hashes}), flush=True)


if __name__ == "__main__":
    main()
