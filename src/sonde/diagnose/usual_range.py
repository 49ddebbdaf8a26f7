# SPDX-License-Identifier: Apache-2.0
"""Whether a value is beyond those of the seconds before, by these alone.

No distribution is assumed. One odd second is left out, and the last seconds may be part of what is
new themselves, where all of them are beyond the ones before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

SECOND_S = 0.9
"""The least length of a second: ticks may be late."""
LEAST_SECONDS = 3
"""With fewer seconds it is not known what is usual."""
ODD = 4
"""From this number of seconds on, the most extreme one is left out: in it the change may have
begun, or the program started."""
BEGUN = 3
"""Up to this many of the last seconds may be part of the change, if all of them are alike."""
MARGIN = 0.5
"""Part of the range between the least and the most that is added to the most."""


def begun(now: float, before: Sequence[float], least_more: float) -> int | None:
    """How many of the last seconds are part of a rise; None where `now` is no rise. `before`: the
    values of seconds, the last one first, `LEAST_SECONDS` at least; `least_more`: by how much a
    rise is beyond the usual range at least."""
    for count in range(min(BEGUN, len(before) - LEAST_SECONDS) + 1):
        usual = before[count:]
        most = largest(usual)
        bound = most + MARGIN * (most - min(usual)) + least_more
        if all(it > bound for it in (now, *before[:count])):
            return count
    return None


def largest(values: Sequence[float]) -> float:
    """The largest value but for an odd one; of none, more than any."""
    ranked = sorted(values)
    return ranked[-2 if len(ranked) >= ODD else -1] if ranked else math.inf


def by_seconds(lengths: Sequence[float]) -> list[slice]:
    """Which of a sequence of intervals make up each second, the last one first; an incomplete
    second is left out. `lengths`: of the intervals, s."""
    found: list[slice] = []
    end, passed_s = len(lengths), 0.0
    for at in range(len(lengths) - 1, -1, -1):
        passed_s += lengths[at]
        if passed_s >= SECOND_S:
            found.append(slice(at, end))
            end, passed_s = at, 0.0
    return found
