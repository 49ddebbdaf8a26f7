# SPDX-License-Identifier: Apache-2.0
"""How long waits are: the distribution of those that a record keeps one by one, the mean of the
others, of which it keeps sums."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from sonde.model.durations import duration

LEAST_PART: Final = 0.2
"""Of the time of waits, for a part of them whose length is shown: those that are known one by one,
or the others."""


@dataclass(frozen=True, slots=True)
class WaitLengths:
    """The lengths of waits that are known one by one; percentiles, not of all waits that there
    were: short ones are not kept."""

    count: int
    ns: int
    """Their sum."""
    p10_ns: int
    p50_ns: int
    p90_ns: int

    @property
    def text(self) -> str:
        """'754 × 42.0 ms (40.1–44.0 ms)': the median, and from the 10th to the 90th percentile."""
        low, typical, high = map(duration, (self.p10_ns, self.p50_ns, self.p90_ns))
        each = f"{self.count:,} × {typical}"
        if low == high:
            return each
        number, _, unit = low.partition(" ")
        return f"{each} ({number if unit == high.partition(' ')[2] else low}–{high})"


NO_LENGTHS: Final = WaitLengths(0, 0, 0, 0, 0)


def lengths_of(ns: Iterable[int]) -> WaitLengths:
    """The distribution of lengths in ns; percentiles are those of the nearest rank."""
    ordered = sorted(ns)
    if not ordered:
        return NO_LENGTHS
    low, middle, high = (ordered[round(part * (len(ordered) - 1))] for part in (0.1, 0.5, 0.9))
    return WaitLengths(len(ordered), sum(ordered), low, middle, high)


def lengths_text(count: int, ns: int, single: WaitLengths) -> str:
    """How long waits are: `single` ones by their distribution, the rest by their mean; '' where
    nothing is known beyond their sum. `count`, `ns`: of all of them that ended."""
    if max(count, single.count) <= 1:
        return ""
    parts = []
    if single.count and single.ns >= LEAST_PART * ns:
        parts.append(single.text)
    others, rest = count - single.count, ns - single.ns
    if others > 0 and rest >= LEAST_PART * ns:
        parts.append(f"{'others: ' * bool(parts)}{others:,} × mean {duration(rest / others)}")
    return ", ".join(parts)
