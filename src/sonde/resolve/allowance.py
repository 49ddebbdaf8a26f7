# SPDX-License-Identifier: Apache-2.0
"""What each user or container may use up of something that comes back slowly (a token bucket)."""

from __future__ import annotations

import time
from typing import Final

from sonde import procfs

MAX_PARTIES: Final = 1024
"""Whose rest is known; where all of them have used up some, newcomers share one."""
ROOT: Final = 0
"""The machine's own root is under no limit."""


class Allowance:
    """`most` at once for each party, of which `each_s` come back in a second."""

    def __init__(self, most: float, each_s: float) -> None:
        self._most = most
        self._each_s = each_s
        self._left: dict[int, tuple[float, float]] = {}
        """What was left, and when (monotonic, s)."""

    def left(self, party: int) -> float:
        """What a party may still use; less than 0 where it used more than there was."""
        if party == ROOT:
            return self._most
        if party not in self._left and len(self._left) >= MAX_PARTIES:
            party = procfs.NOBODY
        left, since_s = self._left.get(party, (self._most, 0.0))
        return min(self._most, left + (time.monotonic() - since_s) * self._each_s)

    def take(self, party: int, amount: float) -> None:
        """A party used some of it. `amount`: in the unit of `most`."""
        if party == ROOT:
            return
        if party not in self._left and len(self._left) >= MAX_PARTIES:
            for known in list(self._left):
                if self.left(known) >= self._most:  # as good as new
                    del self._left[known]
            if len(self._left) >= MAX_PARTIES:
                party = procfs.NOBODY
        self._left[party] = self.left(party) - amount, time.monotonic()
