# SPDX-License-Identifier: Apache-2.0
"""How much time goes into finding out what the code of one user or container is called, and before
that in which files it lies.

All names are found on the recorder's one loop: while it reads a million symbols nobody drains the
kernel's maps, and everybody's stacks are lost. So each party has a budget of CPU time, which comes
back slowly. What it does not cover stays without a name, with file and offset, and is counted.
"""

from __future__ import annotations

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
"""Of a processor: what comes back of it in a second."""
PYTHON_BURST_S: Final = 10.0
PYTHON_SHARE: Final = 0.3
"""Of Python code, which is read from memory, function by function, when a hundred workers begin."""
FILES_BURST_S: Final = 3.0
"""Of finding out which files are mapped, what each is and where its code lies, before any of it is
named. The 135 libraries of PyTorch take a fifth of a second."""
TURN_S: Final = 0.3
"""What it may use in one tick: so long, and one symbol table more, the loop does nothing else."""
FREE_S: Final = 0.0003
"""What takes no longer costs nothing: names of a file whose symbols are known."""
ENOUGH_S: Final = 0.2
"""From here on a party that had used up its time is asked about again."""


class NamingBudget:
    """CPU time by party."""

    def __init__(
        self,
        is_limited: bool = True,
        burst_s: float | None = None,
        share: float | None = None,
    ) -> None:
        """Not `is_limited`: where nobody else waits. `burst_s`, `share`: other than BURST_S (s),
        SHARE."""
        self._is_limited = is_limited
        self._time = Allowance(
            BURST_S if burst_s is None else burst_s, SHARE if share is None else share
        )
        self._turn: defaultdict[int, float] = defaultdict(float)
        """Seconds used in this tick."""
        self._over: set[int] = set()
        self._reported: set[int] = set()
        self._is_charging = False
        self.left_out: Counter[int] = Counter()
        """Code locations without a name, by the party whose they are."""

    def is_over(self, party: int, *, in_turn: bool = True) -> bool:
        """Whether a party has no time left, or has had none and still too little.

        Without `in_turn` it may use all that it has at once: nobody waits yet, or the operator
        asked for this very process.
        """
        if not self._is_limited:
            return False
        left_s = self._time.left(party)
        if left_s <= 0:
            self._over.add(party)
        elif left_s >= ENOUGH_S:
            self._over.discard(party)
        is_turn_over = in_turn and party != ROOT and self._turn[party] >= TURN_S
        return party in self._over or is_turn_over

    def tick(self) -> None:
        """The loop goes round again."""
        self._turn.clear()

    @contextmanager
    def charged(self, party: int, free_s: float = FREE_S) -> Iterator[None]:
        """What is done within costs a party the CPU time of this thread, and of the child that
        opens files and reads /proc for it (`procfs.BROKER`).

        `free_s`: none of it where it is no more than this. What is charged within costs nothing
        more: the outermost counts.
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
            # Less than before where another child took its place.
            read_s = max(0.0, procfs.BROKER.cpu_s() - read_s)
            used_s = time.thread_time() - began_s + read_s
            if used_s > free_s:
                self._time.take(party, used_s)
                self._turn[party] += used_s

    def newly_over(self) -> list[tuple[int, int]]:
        """(party, code locations so far) of those who have used up their time for the first
        time since the last call."""
        new = [(party, n) for party, n in self.left_out.items() if party not in self._reported]
        self._reported.update(party for party, _ in new)
        return new
