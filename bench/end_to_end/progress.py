# SPDX-License-Identifier: Apache-2.0
"""What a load has done, in a file that it shares with the bench.

A page: u64 units of work, u64 nanoseconds (CLOCK_MONOTONIC) at the last of them, u64 command to the
load (0: none, 1: run under torch.profiler). A second page: u64 requests by latency, in classes that
are a `STEP`th wider each, from `SHORTEST_S` on.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import time
from pathlib import Path
from typing import Final

PAGE: Final = 4096
CLASSES: Final = PAGE // 8
BYTES: Final = 2 * PAGE
STEP: Final = 1.03
SHORTEST_S: Final = 10e-6
PROFILED: Final = 1


class Progress:
    """Written by the load, or by its threads that hold one lock."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            view = mmap.mmap(file.fileno(), BYTES)
        self._words = (ctypes.c_uint64 * (BYTES // 8)).from_buffer(view)

    def count(self) -> None:
        """A unit is done."""
        self._words[0] += 1
        self._words[1] = time.monotonic_ns()

    def answered(self, seconds: float) -> None:
        """A request took that long."""
        at = math.log(max(seconds, SHORTEST_S) / SHORTEST_S) / math.log(STEP)
        self._words[CLASSES + min(CLASSES - 1, int(at))] += 1

    @property
    def is_profiled(self) -> bool:
        """It shall run under torch.profiler."""
        return bool(self._words[2] == PROFILED)


def quantile_s(before: list[int], after: list[int], share: float) -> float:
    """Seconds within which this share of the requests between two states was answered; 0 where
    there were none."""
    counts = [b - a for a, b in zip(before, after, strict=True)]
    wanted, total = share * sum(counts), 0
    for number, count in enumerate(counts):
        total += count
        if total and total >= wanted:
            return SHORTEST_S * float(STEP ** (number + 0.5))
    return 0.0
