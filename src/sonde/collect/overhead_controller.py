# SPDX-License-Identifier: Apache-2.0
"""How many launches of a process are timed: what its budget pays for.

A model sets the most (the host time of a timed launch, as measured in the process, times CHARGED);
trials, which compare how fast the program launches, may lower that (`slowdown`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Final

from sonde.collect.slowdown import GAP_S, STRETCH_S, OverheadExperiment

FIRST_COST_NS: Final = 11_000.0
"""Host time of a timed launch, measured on an H200, until the process has reported its own."""
CHARGED: Final = 4.0
"""A timed launch is charged this many times its host time: the device has work with it too."""
LEAST_TO_JUDGE: Final = 20
"""Launches that were timed since the last call, for their mean cost to count."""
MAX_A_SECOND: Final = 5_000
"""Launches timed, whatever the budget."""


class OverheadController:
    """Sets how many launches of one process are timed."""

    def __init__(self, budget: float) -> None:
        """`budget`: the share of its time that the process may be slowed by."""
        self._budget = budget
        self._cost_ns = FIRST_COST_NS
        """Host time of one timed launch, a moving mean."""
        self.trials = OverheadExperiment(budget, random.Random(), gap_s=GAP_S, stretch_s=STRETCH_S)

    @property
    def per_second(self) -> int:
        """Launches a second to time."""
        return max(1, int(samples_a_second(self._budget, self._cost_ns) * self.trials.share))

    def look(self, now_s: float, counts: Mapping[str, int], before: Mapping[str, int]) -> bool:
        """Take in what the library counts now and counted at the last call; True where `per_second`
        may be another one now."""
        is_new = self.trials.look(now_s, counts["launches"])
        sampled = counts["sampled"] - before["sampled"]
        host_ns = counts["host_ns"] - before["host_ns"]
        if not (LEAST_TO_JUDGE <= sampled < 1 << 32 and 0 < host_ns < 1 << 40):
            return is_new
        self._cost_ns += (host_ns / sampled - self._cost_ns) / 4
        return True


def samples_a_second(budget: float, cost_ns: float) -> int:
    """Launches a second that may be timed for `budget`, a share of the process's time."""
    return max(1, min(MAX_A_SECOND, int(budget * 1e9 / (CHARGED * max(cost_ns, 1_000.0)))))
