# SPDX-License-Identifier: Apache-2.0
"""Several queries to a device that one poll runs, each with a separate gap."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sonde.collect.devices.nvml_library import (
    ABSENT,
    DRIVER_NOT_LOADED,
    GPU_IS_LOST,
    RESET_REQUIRED,
    UNINITIALIZED,
    VERSION_MISMATCH,
    NvmlError,
)
from sonde.collect.polling import Gaps, Points, SourceUnavailable

WHOLE = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, VERSION_MISMATCH})
"""Errors after which the library answers nothing until it is opened again."""
DEVICE = frozenset({GPU_IS_LOST, RESET_REQUIRED})
"""Errors after which the device answers nothing."""


@dataclass(slots=True)
class Reading:
    """One query to a device."""

    name: str
    ask: Callable[[Points, int], None]
    """Runs it and adds the answer, at a time (CLOCK_MONOTONIC ns). Raises NvmlError."""


class Readings:
    """The `read` of a poll: runs all queries, and drops for good those that the device does not
    support (`cannot`)."""

    def __init__(self, device: str, readings: Sequence[Reading], gaps: Gaps) -> None:
        self._readings = [(reading, gaps.of(f"{device}.{reading.name}")) for reading in readings]
        self.cannot: list[str] = []

    def __call__(self, points: Points) -> None:
        """Run them. Raises SourceUnavailable where the whole device, or the whole library, is
        gone."""
        dropped = False
        clock = time.monotonic_ns
        for reading, gap in self._readings:
            now_ns = clock()
            if now_ns < gap.again_ns:
                continue
            try:
                reading.ask(points, now_ns)
            except NvmlError as error:
                if error.code in ABSENT:
                    self.cannot.append(reading.name)
                    dropped = True
                elif error.code in DEVICE | WHOLE:
                    raise SourceUnavailable(str(error), whole=error.code in WHOLE) from error
                else:
                    gap.lost(str(error), points, now_ns)
            else:
                if gap.again_ns:
                    gap.there(points, now_ns)
        if dropped:
            self._readings = [
                (reading, gap) for reading, gap in self._readings if reading.name not in self.cannot
            ]
