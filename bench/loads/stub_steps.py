# SPDX-License-Identifier: Apache-2.0
"""A loop on the stub of the CUDA driver; the same conversation as torch_steps.py."""

from __future__ import annotations

import hashlib
import itertools
import json
import select
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.stub import StubDevice

EVERY = 20


def main() -> None:
    """Step until told to end."""
    device = StubDevice()
    step = device.make_loop("decode")
    state = 1
    count, until, hashes = 0, 1 << 60, []
    timing_until = 0.0
    blocks: list[float] = []
    print("ready", flush=True)
    while count < until:
        for _ in range(EVERY):
            step()
            state = (state * 1664525 + 1013904223) % (1 << 32)
        count += EVERY
        device.synchronize()
        hashes.append(hashlib.sha256(state.to_bytes(4, "little")).hexdigest()[:12])
        now = time.perf_counter()
        if timing_until:
            blocks.append(now)
            if now >= timing_until:
                pairs = itertools.pairwise(blocks)
                print(json.dumps([1e6 * (b - a) / EVERY for a, b in pairs]), flush=True)
                timing_until, blocks = 0.0, []
        if select.select([0], [], [], 0.001)[0]:  # sleeps, as programs do that read their input
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
