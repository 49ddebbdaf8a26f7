# SPDX-License-Identifier: Apache-2.0
"""Early warnings: what will be a fault if it goes on as it does now, and when.

Nothing is slow yet. A level (memory of a control group, bytes on a disk, threads
ready to run, a temperature) is followed at even times; the slope is the median of the slopes
between all pairs (Theil 1950, Sen 1968), which a single jump does not move. A warning needs a rise
that most pairs agree on, a limit that is reached within the horizon, and both twice in a row.
"""

from __future__ import annotations

import enum
import itertools
import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Final

import msgspec

KEPT: Final = 24
"""Levels that a slope is taken from."""
LEAST: Final = 8
"""Fewer levels show no slope."""
AGREE: Final = 0.85
"""Share of the pairs that must rise."""
HORIZON_S: Final = 600.0
"""A limit that is further away is not reported."""
NEAR: Final = 0.3
"""Share of the limit that must be used; below, much can happen before."""
TWICE: Final = 2
"""Levels in a row that must show it."""
AGAIN_S: Final = 600.0
"""The same is reported again no sooner."""
MAX_SERIES: Final = 1_024
"""Levels that are followed at once; those that came last."""


class Sign(enum.StrEnum):
    """What comes near a limit."""

    MEMORY = "memory"
    """Of a control group: at the limit the kernel kills, or reclaims."""
    DISK = "disk"
    RUN_QUEUE = "run-queue"
    """Threads ready to run for each CPU: at the limit everything waits."""
    TEMPERATURE = "temperature"
    """At the limit the clock is lowered."""


class EarlyWarning(msgspec.Struct, frozen=True):
    """A level that is about to reach its limit."""

    sign: Sign
    subject: str
    """Control group, mount point, sensor."""
    level: float
    """The last one, in the unit of `limit`."""
    limit: float
    """In bytes, threads per CPU, or °C, by sign."""
    slope: float
    """By how much the level rises a second."""
    lead_s: float
    """Seconds until the limit is reached, if it goes on so."""
    reported_ns: int
    """CLOCK_MONOTONIC"""


@dataclass(slots=True)
class _Followed:
    """One level over time."""

    levels: deque[tuple[float, float]]
    """(time in s, level)"""
    in_a_row: int = 0
    """Times that it would reach its limit within the horizon, up to the last one."""
    no_warning_before_s: float = -math.inf


class EarlyWarnings:
    """Follows the levels of one node. `take` is to be called at times some seconds apart."""

    def __init__(self) -> None:
        self._followed: dict[tuple[Sign, str], _Followed] = {}
        self.left_out = 0
        """Levels whose past was dropped to make room for others."""

    def take(
        self, sign: Sign, subject: str, level: float, limit: float, now_ns: int
    ) -> EarlyWarning | None:
        """A level as it is now; a warning where it is about to reach its limit."""
        if not (math.isfinite(level) and math.isfinite(limit)) or limit <= 0:
            return None
        key = sign, subject
        one = self._followed.pop(key, None)
        if one is None and len(self._followed) >= MAX_SERIES:
            self.left_out += 1
            del self._followed[next(iter(self._followed))]
        self._followed[key] = one = one or _Followed(deque(maxlen=KEPT))  # the last one in order
        now_s = now_ns / 1e9
        if one.levels and now_s <= one.levels[-1][0]:
            return None
        one.levels.append((now_s, level))
        lead_s, slope = _lead(list(one.levels), limit)
        one.in_a_row = one.in_a_row + 1 if lead_s <= HORIZON_S else 0
        if one.in_a_row < TWICE or now_s < one.no_warning_before_s:
            return None
        one.no_warning_before_s = now_s + AGAIN_S
        return EarlyWarning(sign, subject, level, limit, slope, round(lead_s, 1), now_ns)


def _lead(levels: list[tuple[float, float]], limit: float) -> tuple[float, float]:
    """(seconds until the limit is reached, slope); infinite where nothing shows that it will be."""
    now = levels[-1][1]
    if len(levels) < LEAST or now < NEAR * limit:
        return math.inf, 0.0
    slopes = [(b - a) / (t - s) for (s, a), (t, b) in itertools.combinations(levels, 2)]
    slope = statistics.median(slopes)
    if slope <= 0 or sum(it > 0 for it in slopes) < AGREE * len(slopes):
        return math.inf, slope
    # As fast as of late, too: what has levelled off does not go on.
    half = levels[len(levels) // 2 :]
    late = [(b - a) / (t - s) for (s, a), (t, b) in itertools.combinations(half, 2)]
    slope = min(slope, statistics.median(late))
    if slope <= 0:
        return math.inf, slope
    return max(0.0, (limit - now) / slope), slope
