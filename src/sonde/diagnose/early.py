# SPDX-License-Identifier: Apache-2.0
"""Early warnings: what will be a fault if it goes on as it does now, and when.

Nothing is slow yet. A level (memory of a control group, bytes on a disk, threads
ready to run, a temperature) is followed at even times; the slope is the median of the slopes
between all pairs (Theil 1950, Sen 1968), which a single jump does not move, over windows of two
minutes to two hours. A warning needs a rise that most pairs of a window agree on, which has gone on
for longer than it will take to the limit (what only begins may level off), and both twice in a row.
"""

from __future__ import annotations

import enum
import itertools
import math
import statistics
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

KEPT: Final = 24
"""Levels of a window that a slope is taken from."""
SPACINGS: Final = (1, 2, 5, 12, 24, 60)
"""A window has one level of this number each: of those that come every 5 s, 24 are 2 min to 2 h."""
LEAST: Final = 8
"""Fewer levels of a window show no slope."""
LEAD: Final = 0.5
"""Of the time for which a level has been seen to rise: a limit is not predicted further ahead."""
AGREE: Final = 0.85
"""Share of the pairs that must rise."""
NEAR: Final = 0.3
"""Share of the limit that must be used; below, much can happen before."""
TWICE: Final = 2
"""Levels of a window in a row that must show it."""
AGAIN_S: Final = 600.0
"""The same is reported again no sooner, nor before half of the time that was left then is over."""
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
class _Window:
    """Levels at even times, the last `KEPT` of them."""

    times_s: array[float] = field(default_factory=lambda: array("d"))
    levels: array[float] = field(default_factory=lambda: array("d"))
    in_a_row: int = 0
    """Levels in a row, up to the last one, by which the limit is near."""

    def take(self, now_s: float, level: float, limit: float) -> tuple[float, float] | None:
        """(seconds until the limit is reached, slope) where that is to be reported."""
        self.times_s.append(now_s)
        self.levels.append(level)
        del self.times_s[:-KEPT], self.levels[:-KEPT]
        lead_s, slope = _lead(self.times_s, self.levels, limit)
        is_near = lead_s <= LEAD * (now_s - self.times_s[0])
        self.in_a_row = self.in_a_row + 1 if is_near else 0
        return (lead_s, slope) if self.in_a_row >= TWICE else None


@dataclass(slots=True)
class _Followed:
    """One level over time."""

    windows: Sequence[_Window] = field(default_factory=lambda: [_Window() for _ in SPACINGS])
    taken: int = 0
    last_s: float = -math.inf
    no_warning_before_s: float = -math.inf

    def take(self, now_s: float, level: float, limit: float) -> tuple[float, float] | None:
        """The soonest of what the windows show; None where none does."""
        self.taken += 1
        self.last_s = now_s
        found = [
            window.take(now_s, level, limit)
            for spacing, window in zip(SPACINGS, self.windows, strict=True)
            if self.taken % spacing == 0
        ]
        return min((one for one in found if one is not None), default=None)


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
        self._followed[key] = one = one or _Followed()  # the last one in order
        now_s = now_ns / 1e9
        if now_s <= one.last_s:
            return None
        found = one.take(now_s, level, limit)
        if found is None or now_s < one.no_warning_before_s:
            return None
        lead_s, slope = found
        one.no_warning_before_s = now_s + max(AGAIN_S, lead_s / 2)
        return EarlyWarning(sign, subject, level, limit, slope, round(lead_s, 1), now_ns)


def _lead(times_s: array[float], levels: array[float], limit: float) -> tuple[float, float]:
    """(seconds until the limit is reached, slope); infinite where nothing shows that it will be."""
    now = levels[-1]
    if len(levels) < LEAST or now < NEAR * limit or now <= levels[0]:
        return math.inf, 0.0
    slopes = _slopes(times_s, levels)
    slope = statistics.median(slopes)
    if slope <= 0 or sum(it > 0 for it in slopes) < AGREE * len(slopes):
        return math.inf, slope
    # As fast as of late, too: what has levelled off does not go on.
    half = len(levels) // 2
    slope = min(slope, statistics.median(_slopes(times_s[half:], levels[half:])))
    if slope <= 0:
        return math.inf, slope
    return max(0.0, (limit - now) / slope), slope


def _slopes(times_s: Iterable[float], levels: Iterable[float]) -> list[float]:
    """Between all pairs."""
    points = itertools.combinations(zip(times_s, levels, strict=True), 2)
    return [(b - a) / (t - s) for (s, a), (t, b) in points]
