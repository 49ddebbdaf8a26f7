# SPDX-License-Identifier: Apache-2.0
"""A loop on the stub of the CUDA driver."""

from __future__ import annotations

import sys
from pathlib import Path

from conversation import converse

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.stub import StubDevice

EVERY = 20


def main() -> None:
    """Step until the command to end."""
    device = StubDevice()
    launch = device.make_loop("decode")
    number = 1

    def step() -> None:
        nonlocal number
        launch()
        number = (number * 1664525 + 1013904223) % (1 << 32)

    def state() -> bytes:
        device.synchronize()
        return number.to_bytes(4, "little")

    converse(step, state, EVERY, wait_s=0.001)


if __name__ == "__main__":
    main()
