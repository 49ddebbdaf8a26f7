# SPDX-License-Identifier: Apache-2.0
"""Loads whose bytes are known; each prints when it ran (CLOCK_MONOTONIC ns) and what it moved.

python -m bench.signals.loads OUT SECONDS                all, one after another, into OUT
python -m bench.signals.loads OUT SECONDS BEGINS ENDS    one of several tenants
python -m bench.signals.loads -                          NAME SECONDS from standard input, a line
                                                         each, answered by a line
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

PAUSE_S = 1.5
COPY_BYTES = 512 << 20
STREAM_BYTES = 4 << 30
TURN_S = 0.2


def _timed(seconds: float, step: Callable[[], int]) -> dict[str, float]:
    """Run steps for a while; each returns its bytes. The device is idle before and after."""
    torch.cuda.synchronize()
    began_ns = time.monotonic_ns()
    moved = steps = 0
    while time.monotonic_ns() - began_ns < seconds * 1e9:
        moved += step()
        steps += 1
        torch.cuda.synchronize()
    return {
        "start_ns": began_ns,
        "end_ns": time.monotonic_ns(),
        "bytes": moved,
        "steps": steps,
    }


def _idle() -> int:
    time.sleep(0.1)
    return 0


def steps() -> dict[str, Callable[[], int]]:
    """A step of each load, by its name; one of each has run, so that nothing is new."""
    device = torch.device("cuda")
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    source = torch.ones(STREAM_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    left = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    right = torch.randn_like(left)
    out = torch.empty_like(left)

    def matmul() -> int:
        for _ in range(50):
            torch.mm(left, right, out=out)
        return 0

    def to_device() -> int:
        for _ in range(8):
            there.copy_(host, non_blocking=True)
        return 8 * COPY_BYTES

    def to_host() -> int:
        for _ in range(8):
            host.copy_(there, non_blocking=True)
        return 8 * COPY_BYTES

    def stream() -> int:
        for _ in range(20):
            target.copy_(source)
        return 2 * 20 * STREAM_BYTES  # read and written

    found = {"idle": _idle, "matmul": matmul, "h2d": to_device, "d2h": to_host, "stream": stream}
    for name in ("matmul", "h2d", "d2h", "stream"):
        found[name]()
    torch.cuda.synchronize()
    return found


def phases(seconds: float) -> dict[str, dict[str, float]]:
    """Idle, matmul, copies each way, memory-bound."""
    found = {}
    for name, step in steps().items():
        time.sleep(PAUSE_S)
        found[name] = _timed(seconds, step)
    return found


def asked() -> None:
    """Loads by request."""
    known = steps()
    print("ready", flush=True)
    for line in sys.stdin:
        name, seconds = line.split()
        print(json.dumps(_timed(float(seconds), known[name])), flush=True)


def tenant(seconds: float, begins: float, ends: float) -> dict[str, float]:
    """A tenant that has the device from `begins` to `ends` of each 200 ms of the clock, so that
    tenants with other parts never meet."""
    left = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(left)

    def step() -> int:
        turn_s = TURN_S * (time.monotonic() // TURN_S + 1)
        time.sleep(max(0.0, turn_s + begins * TURN_S - time.monotonic()))
        while time.monotonic() < turn_s + (ends - 0.02) * TURN_S:
            torch.mm(left, left, out=out)
            torch.cuda.synchronize()
        return 0

    step()
    return _timed(seconds, step)


def main() -> int:
    """See the module."""
    if sys.argv[1:] == ["-"]:
        asked()
        return 0
    out, seconds, *part = sys.argv[1:]
    found = tenant(float(seconds), *map(float, part)) if part else phases(float(seconds))
    Path(out).write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
