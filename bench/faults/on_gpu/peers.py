# SPDX-License-Identifier: Apache-2.0
"""Processes beside victims on a GPU.

    python -m bench.faults.on_gpu.peers KIND

Prints LOADED once its modules are there, takes its device at a line `warm` on standard input,
prints READY, and begins at a line `go DUTY` (0..1: its share of the time). Without a GPU it does as
much on a CPU.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
BURST_S = 0.02
"""How long it works before it rests, at a duty below 1."""
MARGIN_BYTES = 512 << 20
"""Left free by `hog`, for contexts that begin meanwhile."""
Piece = Callable[[], None]


def compute() -> Piece:
    """Products of matrices: the multiprocessors."""
    size = 4096 if ON_GPU else 128
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    matrix = torch.randn(size, size, device=DEVICE, dtype=dtype)

    def piece() -> None:
        for _ in range(8):
            torch.mm(matrix, matrix)

    return piece


def memory() -> Piece:
    """Copies within the device: its memory."""
    count = (1 << 30) if ON_GPU else (1 << 20)
    source = torch.zeros(count, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)

    def piece() -> None:
        for _ in range(4):
            target.copy_(source)

    return piece


def pcie() -> Piece:
    """Copies to the device and back, both at once."""
    count = (256 << 20) if ON_GPU else (1 << 20)
    host = [torch.zeros(count, dtype=torch.uint8) for _ in range(2)]
    there = [torch.zeros(count, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    if not ON_GPU:
        return lambda: there[0].copy_(host[0])
    host = [one.pin_memory() for one in host]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def piece() -> None:
        with torch.cuda.stream(streams[0]):
            there[0].copy_(host[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            host[1].copy_(there[1], non_blocking=True)

    return piece


def hog() -> Piece:
    """Takes all device memory that is free, and keeps it."""
    held: list[torch.Tensor] = []
    torch.zeros(1, device=DEVICE)

    def piece() -> None:
        if not held and ON_GPU:
            free, _ = torch.cuda.mem_get_info()
            size = max(0, free - MARGIN_BYTES)
            held.append(torch.zeros(size, dtype=torch.uint8, device=DEVICE))
        time.sleep(0.05)

    return piece


KINDS: dict[str, Callable[[], Piece]] = {
    "compute": compute,
    "memory": memory,
    "pcie": pcie,
    "hog": hog,
}


def main() -> None:
    """Run one of them."""
    torch.set_num_threads(1)
    print("LOADED", flush=True)
    if sys.stdin.readline().strip() != "warm":
        return
    piece = KINDS[sys.argv[1]]()
    if sys.argv[1] != "hog":
        piece()
    _wait()
    print("READY", flush=True)
    words = sys.stdin.readline().split()
    if words[:1] != ["go"]:
        return
    duty = float(words[1])
    while True:
        began = time.monotonic()
        while (passed := time.monotonic() - began) < BURST_S:
            piece()
            _wait()
        if duty < 1:
            time.sleep(passed * (1 / duty - 1))


def _wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
