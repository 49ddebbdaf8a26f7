# SPDX-License-Identifier: Apache-2.0
"""What timing its launches costs a process, measured while it runs, and held to the budget.

A model of the cost (`overhead_controller`) sets how many launches are timed. It may be wrong for
some program, and nothing would show it. So, about once a minute, each process takes part in a
trial: two stretches of some seconds, one with as many launches timed as usual and one with an
eighth, in random order. What the program does by itself affects both alike; if timing slows it, it
launches less often in the first. The interval of the median over the trials assumes no distribution
of their differences (order statistics).

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
"""Of the usual number of timed launches, in the other stretch of a trial."""
GAP_S: Final = 60.0
"""From one trial to the next, on average."""
STRETCH_S: Final = 5.0
"""Length of each stretch of a trial."""
SETTLE_S: Final = 1.0
"""After a change of the rate of timing, until launches count: the library follows it within
that."""
LEAST_LAUNCHES: Final = 100
"""In a stretch; with fewer, chance varies a program's rate too much for a trial to count."""
TRIALS_KEPT: Final = 1_440
"""A day's."""
LEAST_TRIALS: Final = 6
"""With fewer there is no interval of 95 %."""
TO_RISE: Final = 30
"""Trials after which a rate that was lowered may rise again."""
LEAST_SCALE: Final = 1 / 64
"""Of the rate by the model: it is lowered no further."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """How much slower a program is for having its launches timed: 0.01 is one per cent."""

    value: float
    """Median of the trials; below 0 where chance made it so."""
    low: float
    high: float
    """Ends of its 95 % interval."""
    trials: int


def estimate(differences: Iterable[float]) -> Estimate | None:
    """The slowdown, from those that single trials found; None for fewer than LEAST_TRIALS."""
    ordered = sorted(differences)
    if len(ordered) < LEAST_TRIALS:
        return None
    outer = _outer(len(ordered))
    middle = len(ordered) // 2
    median = (ordered[middle] + ordered[-1 - middle]) / 2
    return Estimate(median, ordered[outer], ordered[-1 - outer], len(ordered))


def _outer(count: int) -> int:
    """Index of the lower end of a 95 % interval of the median, in `count` ordered values.

    By the binomial distribution: the true median lies below it with a chance of at most 2.5 %.
    """
    below = 0.0
    for number in range(count):
        log = math.lgamma(count + 1) - math.lgamma(number + 1) - math.lgamma(count - number + 1)
        below += math.exp(log - count * math.log(2))
        if below > 0.025:
            return max(number - 1, 0)
    return 0


class OverheadExperiment:
    """The trials of one process, and what they make of how many of its launches are timed."""

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
        """Of the rate by the model, what the trials so far allow."""
        self._due_s = 0.0
        """When the next trial begins (monotonic s); 0 before the first call."""
        self._shares: list[float] = []
        """1 and PART, of the stretches to come, the one under way first; empty between trials."""
        self._counts_s = 0.0
        """When launches begin to count (monotonic s)."""
        self._began: tuple[float, int] | None = None
        """When they began, and at how many launches; None until then."""
        self._rates: dict[float, float] = {}
        """Launches a second that the program made, by the share of a stretch."""

    @property
    def share(self) -> float:
        """What part of the rate by the model is to be timed now."""
        return self._scale * (self._shares[0] if self._shares else 1.0)

    def look(self, now_s: float, launches: int) -> bool:
        """Go on with the trials; `launches`: how many the program has made so far. True where
        `share` may be another one now."""
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
        """End a trial: keep its result, and change the scale where all of them show that it has
        to."""
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
        self.found.clear()  # those were of another scale
