# SPDX-License-Identifier: Apache-2.0
"""How much CPU time the names of one user's or container's code may take, and before that finding
the files that it lies in.

All names are found on the recorder's one loop: while it reads a million symbols nobody drains the
kernel's maps, and everybody's stacks are lost. So each party has a budget of CPU time, which comes
back slowly. What it does not cover stays without a name, with file and offset, and is counted.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sonde import procfs
from sonde.resolve.allowance import ROOT, Allowance

BURST_S: Final = 1.0
"""What a party may use at once: ten of the largest symbol tables, some thousand common ones."""
SHARE: Final = 0.1
"""How much of it comes back in a second: a share of one CPU."""
PYTHON_BURST_S: Final = 10.0
PYTHON_SHARE: Final = 0.3
"""The same for names of Python code, which is read from memory, function by function: a hundred
workers may start at once."""
FILES_BURST_S: Final = 3.0
"""The burst for finding which files are mapped, what each is and where its code lies, before any of
it is named. The 135 libraries of PyTorch take a fifth of a second."""
TURN_S: Final = 0.3
"""What a party may use in one tick; it may exceed that by one symbol table."""
FREE_S: Final = 0.0003
"""What takes no longer is not charged: names of a file whose symbols are known."""
ENOUGH_S: Final = 0.2
"""A party that had used up its time gets names again once it has this much."""


class NamingBudget:
    """CPU time by party."""

    def __init__(
        self,
        is_limited: bool = True,
        burst_s: float | None = None,
        share: float | None = None,
    ) -> None:
        """`is_limited`: False where nobody else waits; then `until_s` may be set. `burst_s`,
        `share`: in place of BURST_S and SHARE."""
        self._is_limited = is_limited
        self.until_s = math.inf
        """Where it is not limited: the time (time.monotonic) from which on nothing is named."""
        self._time = Allowance(
            BURST_S if burst_s is None else burst_s, SHARE if share is None else share
        )
        self._turn: defaultdict[int, float] = defaultdict(float)
        """Seconds used in this tick."""
        self._over: set[int] = set()
        """Parties that have used up their time and do not have ENOUGH_S yet."""
        self._reported: set[int] = set()
        """Parties that `newly_over` has returned."""
        self._is_charging = False
        """A block of `charged` is being run."""
        self.left_out: Counter[int] = Counter()
        """Code locations without a name, by party."""

    def is_over(self, party: int, *, in_turn: bool = True) -> bool:
        """Whether a party has no time left, or had none and still has too little, or (`in_turn`)
        has used its part of this tick.

        Without `in_turn` it may use all that it has at once: nobody waits yet, or the operator
        asked for this very process.
        """
        if not self._is_limited:
            return time.monotonic() >= self.until_s
        left_s = self._time.left(party)
        if left_s <= 0:
            self._over.add(party)
        elif left_s >= ENOUGH_S:
            self._over.discard(party)
        is_turn_over = in_turn and party != ROOT and self._turn[party] >= TURN_S
        return party in self._over or is_turn_over

    def tick(self) -> None:
        """Begin a tick: every party has its part again."""
        self._turn.clear()

    @contextmanager
    def charged(self, party: int, free_s: float = FREE_S) -> Iterator[None]:
        """Charge a party with the CPU time that this thread takes within the block, and the child
        that opens files and reads /proc for it (`procfs.BROKER`).

        `free_s`: up to this nothing is charged. Of nested blocks only the outermost charges.
        """
        if self._is_charging:
            yield
            return
        self._is_charging = True
        began_s, read_s = time.thread_time(), procfs.BROKER.cpu_s()
        try:
            yield
        finally:
            self._is_charging = False
            # Below 0 where another child has replaced it.
            read_s = max(0.0, procfs.BROKER.cpu_s() - read_s)
            used_s = time.thread_time() - began_s + read_s
            if used_s > free_s:
                self._time.take(party, used_s)
                self._turn[party] += used_s

    def newly_over(self) -> list[tuple[int, int]]:
        """(party, code locations without a name so far) of parties that lack names and were not
        returned before."""
        new = [(party, n) for party, n in self.left_out.items() if party not in self._reported]
        self._reported.update(party for party, _ in new)
        return new
