# SPDX-License-Identifier: Apache-2.0
"""A PyTorch loop that can be repeated bit by bit: torch_steps.py train|graph|eager|decode."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

import torch
from conversation import converse
from torch import nn

EVERY = {"train": 2, "graph": 400, "eager": 40, "decode": 200}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 1024 if DEVICE == "cuda" else 64


def train() -> tuple[Callable[[], None], Callable[[], bytes]]:
    """A transformer that keeps its device busy, trained with AdamW on data that it makes itself."""
    torch.manual_seed(11)
    layer = nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, batch_first=True, dropout=0.1)
    model = nn.Sequential(nn.TransformerEncoder(layer, 6), nn.Linear(WIDTH, 8)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randn(16, 256, WIDTH, device=DEVICE)
    target = torch.randint(0, 8, (16, 256), device=DEVICE)
    last = torch.zeros((), device=DEVICE)

    def step() -> None:
        nonlocal last
        optimizer.zero_grad(set_to_none=True)
        last = nn.functional.cross_entropy(model(data).flatten(0, 1), target.flatten())
        last.backward()
        optimizer.step()

    return step, lambda: last.detach().cpu().numpy().tobytes()


def small_kernels(replayed: bool) -> tuple[Callable[[], None], Callable[[], bytes]]:
    """100 small kernels, launched one by one or replayed as a CUDA graph."""
    x = torch.zeros(256, dtype=torch.int64, device=DEVICE)
    y = torch.rand(256, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(5))

    def work() -> None:
        for _ in range(25):
            x.add_(1)
            y.mul_(0.999)
            y.add_(0.001)
            x.add_(2)

    def state() -> bytes:
        return bytes(x.cpu().numpy().tobytes() + y.cpu().numpy().tobytes())

    if not replayed or DEVICE == "cpu":
        return work, state
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay, state


def decode() -> tuple[Callable[[], None], Callable[[], bytes]]:
    """A replay of 100 kernels, five launched one by one, and a copy to the host that waits."""
    replay, state = small_kernels(replayed=True)
    z = torch.zeros(256, device=DEVICE)

    def step() -> None:
        replay()
        for _ in range(5):
            z.add_(0.5)
        z[:1].cpu()

    return step, lambda: state() + bytes(z.cpu().numpy().tobytes())


def make(mode: str) -> tuple[Callable[[], None], Callable[[], bytes]]:
    """A step of a loop, and what was computed so far."""
    if mode in (makers := {"train": train, "decode": decode}):
        return makers[mode]()
    return small_kernels(replayed=mode == "graph")


def main() -> None:
    """Step until the command to end."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_flash_sdp(False)  # some of these add up in any order
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    mode = sys.argv[1]
    step, state = make(mode)
    converse(step, state, EVERY[mode])  # a state waits for the device


if __name__ == "__main__":
    main()
