# SPDX-License-Identifier: Apache-2.0
"""One rank of several that share a device: multiplies matrices for some seconds, then ends."""

from __future__ import annotations

import os
import sys
import time

import torch


def main() -> None:
    """Rank r multiplies matrices of 256·(r + 1), so that its kernels differ from others'."""
    rank = int(os.environ.get("RANK", 0))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = torch.rand(256 * (rank + 1), 256 * (rank + 1), device=device)
    until, steps = time.monotonic() + float(sys.argv[1]), 0
    while time.monotonic() < until:
        for _ in range(50):
            a = torch.tanh(a @ a)
        steps += 50
        float(a[0, 0])
    print(f"rank {rank}: {steps} steps", flush=True)


if __name__ == "__main__":
    main()
