# SPDX-License-Identifier: Apache-2.0
"""What timing its launches costs a process, measured while it runs, and held to the budget.

A model of the cost (a launch's host time, charged several times over) sets how many launches are
timed. It may be wrong for some program, and nothing would show it. So, about once a minute, each
process takes part in a trial: two stretches of some seconds, one with as many launches timed as
ever and one with an eighth, in random order. What the program does by itself falls on both alike;
if timing slows it, it launches less often in the one than in the other. The median over the trials
has an interval that supposes nothing of how their differences are spread (order statistics).

An eighth rather than none: each launch keeps a chance to be timed, and sums of weights stay true.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

PART: Final = 0.125
"""Of the rate, in the thinner stretch of a trial."""
GAP_S: Final = 60.0
"""From one trial to the next, on average."""
STRETCH_S: Final = 5.0
SETTLE_S: Final = 1.0
"""After a change of the rate, until launches count: the library follows it within that."""
LEAST_LAUNCHES: Final = 100
"""In a stretch; a program that launches less often cannot be separated from its own variation."""
TRIALS_KEPT: Final = 1_440
"""A day's."""
LEAST_TRIALS: Final = 6
"""With fewer there is no interval of 95 %."""
TO_RISE: Final = 30
"""Trials after which a rate that was lowered may rise again."""
LEAST_SCALE: Final = 1 / 64


@dataclass(frozen=True, slots=True)
class Estimate:
    """How much slower a program is for having its launches timed: 0.01 is one per cent."""

    value: float
    """Median of the trials; below 0 where chance made it so."""
    low: float
    high: float
    """Of its 95 % interval."""
    trials: int


def estimate(differences: Iterable[float]) -> Estimate | None:
    """Of slowdowns that single trials found; None for fewer than LEAST_TRIALS."""
    ordered = sorted(differences)
    if len(ordered) < LEAST_TRIALS:
        return None
    outer = _outer(len(ordered))
    middle = len(ordered) // 2
    median = (ordered[middle] + ordered[-1 - middle]) / 2
    return Estimate(median, ordered[outer], ordered[-1 - outer], len(ordered))


def _outer(count: int) -> int:
    """How many of `count` ordered values lie below a 95 % interval of their median.

    By the binomial distribution: as many as still leave 97.5 % to what lies above.
    """
    below = 0.0
    for number in range(count):
        log = math.lgamma(count + 1) - math.lgamma(number + 1) - math.lgamma(count - number + 1)
        below += math.exp(log - count * math.log(2))
        if below > 0.025:
            return max(number - 1, 0)
    return 0


class OverheadExperiment:
    """Those of one process, and how many of its launches are to be timed."""

    def __init__(
        self,
        budget: float,
        rng: random.Random,
        *,
        gap_s: float = GAP_S,
        stretch_s: float = STRETCH_S,
    ) -> None:
        """`budget`: the share of its time that the process may be slowed by."""
        self._budget = budget
        self._rng = rng
        self._gap_s, self._stretch_s = gap_s, stretch_s
        self._settle_s = min(SETTLE_S, stretch_s / 2)
        self.found: deque[float] = deque(maxlen=TRIALS_KEPT)
        """Slowdowns, one a trial."""
        self._scale = 1.0
        self._due_s = 0.0
        self._shares: list[float] = []
        """Of the stretches to come, the one under way first."""
        self._counts_s = 0.0
        """When launches begin to count (monotonic s)."""
        self._began: tuple[float, int] | None = None
        """When that was, and at how many launches; None while the stretch settles."""
        self._rates: dict[float, float] = {}

    @property
    def share(self) -> float:
        """Of the rate that the model of the cost allows, what is to be timed now."""
        return self._scale * (self._shares[0] if self._shares else 1.0)

    def look(self, now_s: float, launches: int) -> bool:
        """Go on; `launches`: how many the program has made so far. Whether `share` is another."""
        if not self._shares:
            if now_s < self._due_s:
                return False
            is_first = not self._due_s
            self._due_s = now_s + self._gap_s * self._rng.uniform(0.5, 1.5)
            if is_first:
                return False
            self._shares = self._rng.sample([1.0, PART], 2)
            self._begin(now_s)
            return True
        if self._began is None:
            if now_s >= self._counts_s:
                self._began = now_s, launches
            return False
        began_s, at = self._began
        if now_s < began_s + self._stretch_s:
            return False
        if launches - at < LEAST_LAUNCHES:
            self._shares, self._rates = [], {}
            return True
        self._rates[self._shares.pop(0)] = (launches - at) / (now_s - began_s)
        if self._shares:
            self._begin(now_s)
        else:
            self._conclude()
        return True

    def _begin(self, now_s: float) -> None:
        self._began, self._counts_s = None, now_s + self._settle_s

    def _conclude(self) -> None:
        """A trial is over: its result, and whether the rate has to follow."""
        slower = math.log(self._rates[PART] / self._rates[1.0]) / (1 - PART)
        self._rates = {}
        self.found.append(slower)
        now = estimate(self.found)
        if now is None:
            return
        if now.low > self._budget:
            self._scale = max(self._scale * max(self._budget / now.value, 0.25), LEAST_SCALE)
        elif self._scale < 1 and now.trials >= TO_RISE and now.high < self._budget:
            self._scale = min(2 * self._scale, 1.0)
        else:
            return
        self.found.clear()  # they were of another rate
