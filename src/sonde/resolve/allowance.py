# SPDX-License-Identifier: Apache-2.0
"""What each user or container may use up of something that comes back slowly (a token bucket)."""

from __future__ import annotations

import time
from typing import Final

from sonde import procfs

MAX_PARTIES: Final = 1024
"""Parties with a separate bucket; where all of these are in use, further parties share one."""
ROOT: Final = 0
"""The machine's own root is under no limit."""


class Allowance:
    """`burst` at once for each party, of which `each_s` come back in a second."""

    def __init__(self, burst: float, each_s: float) -> None:
        self._burst = burst
        self._each_s = each_s
        self._left: dict[int, tuple[float, float]] = {}
        """What was left, and when (monotonic, s)."""

    def left(self, party: int) -> float:
        """What a party may still use; less than 0 where it used more than there was."""
        if party == ROOT:
            return self._burst
        if party not in self._left and len(self._left) >= MAX_PARTIES:
            party = procfs.NOBODY
        left, since_s = self._left.get(party, (self._burst, 0.0))
        return min(self._burst, left + (time.monotonic() - since_s) * self._each_s)

    def take(self, party: int, amount: float) -> None:
        """A party used some of it. `amount`: in the unit of `burst`."""
        if party == ROOT:
            return
        if party not in self._left and len(self._left) >= MAX_PARTIES:
            for known in list(self._left):
                if self.left(known) >= self._burst:  # all of it has come back
                    del self._left[known]
            if len(self._left) >= MAX_PARTIES:
                party = procfs.NOBODY
        self._left[party] = self.left(party) - amount, time.monotonic()
