# SPDX-License-Identifier: Apache-2.0
"""How much slower than a quiet machine this one is at this moment.

A virtual CPU shares its core with others: a second of CPU time does up to 2.2 times less work
while they are busy. Bounds in seconds of CPU hold for a quiet machine, so tests multiply them.
"""

from __future__ import annotations

import json
import statistics
import time

import numpy as np

QUIET_S = 0.0175
"""CPU seconds of `_work` on a quiet machine (the least of 400 on the 2-core virtual machine of the
figures in docs/design/cost.md)."""
TRIES = 5

_TEXT = json.dumps(
    [{"name": f"k{row}", "ts": row * 1.5, "args": {"stream": row % 7}} for row in range(4000)]
)
_NUMBERS = np.arange(100_000) % 977


def _work() -> None:
    for _ in range(3):
        names = [row["name"] for row in json.loads(_TEXT) if row["args"].get("stream") == 3]
        assert len(names) == 571
        order = np.argsort(_NUMBERS, kind="stable")
        np.searchsorted(_NUMBERS[order], _NUMBERS[:50_000])


def slowness() -> float:
    """How many times the CPU seconds of a quiet machine the same work takes now; at least 1.

    Takes a tenth of a second of CPU time.
    """
    took_s = []
    for _ in range(TRIES):
        began_s = time.process_time()
        _work()
        took_s.append(time.process_time() - began_s)
    return max(1.0, statistics.median(took_s) / QUIET_S)
