# SPDX-License-Identifier: Apache-2.0
"""Whose turn a look is: shared between parties (users and containers) first, then between the
processes of each, so that one of them with many waiting processes crowds out nobody."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

from sonde import procfs

Who = tuple[int, int, int]
"""(pid, start_ns, tid)"""

MAX_KNOWN: Final = 4_096
"""Processes whose party is remembered: those that waited last."""
MAX_ASKED: Final = 64
"""Processes whose party is looked up in one tick: 60 us each. The others together have the part of
one party (UNKNOWN_PARTY) until then."""
KEPT: Final = 0.5
"""Of what looks at a party took, that still counts in the next tick."""
LEAST_S: Final = 0.0005
"""What a party may take in a tick at least, or nobody would be looked at where many wait."""
_LEAST_KEPT_S: Final = 1e-5


class LookTurns:
    """The order of looks at waiting threads, by what looks at their parties took lately."""

    def __init__(self) -> None:
        self._parties: dict[tuple[int, int], int] = {}
        """By (pid, start_ns)."""
        self._used_s: dict[int, float] = {}
        """CPU time by party."""
        self._of_tick_s: dict[int, float] = defaultdict(float)

    def turns(self, waited: Mapping[Who, int], left_s: float, rounds: int) -> Iterator[Who]:
        """Threads to be looked at, each `rounds` times at most: one of each party after the other,
        and within it one of each process, those that waited longest (`waited`, in ns) most likely
        first. A party on which `charge` has put its part of `left_s` CPU time gets no further
        turn while others wait."""
        self._used_s = {it: KEPT * s for it, s in self._used_s.items() if s > _LEAST_KEPT_S}
        self._of_tick_s.clear()
        threads = sorted(waited, key=lambda who: waited[who] * random.random(), reverse=True)
        queues: dict[int, list[Who]] = {}
        for who, party in self._with_parties(threads):
            queues.setdefault(party, []).append(who)
        order = [*queues]
        random.shuffle(order)
        order.sort(key=lambda party: self._used_s.get(party, 0.0))
        part_s = max(LEAST_S, left_s / max(1, len(order)))
        runs = {party: _by_processes(queues[party], rounds) for party in order}
        while runs:
            for party in [*runs]:
                is_over = len(order) > 1 and self._of_tick_s[party] >= part_s
                turn = None if is_over else next(runs[party], None)
                if turn is None:
                    del runs[party]
                else:
                    yield turn

    def charge(self, who: Who, cpu_s: float) -> None:
        """A look at this thread took so long."""
        party = self._parties.get(who[:2], procfs.UNKNOWN_PARTY)
        self._used_s[party] = self._used_s.get(party, 0.0) + cpu_s
        self._of_tick_s[party] += cpu_s

    def _with_parties(self, threads: list[Who]) -> Iterator[tuple[Who, int]]:
        asked = 0
        for who in threads:
            process = who[:2]
            party = self._parties.pop(process, None)
            if party is None and asked < MAX_ASKED:
                asked += 1
                party = procfs.party_of(process[0])
            if party is not None:
                self._parties[process] = party
            yield who, procfs.UNKNOWN_PARTY if party is None else party
        while len(self._parties) > MAX_KNOWN:
            del self._parties[next(iter(self._parties))]


def _by_processes(threads: list[Who], rounds: int) -> Iterator[Who]:
    """Threads of a party, one of each process after the other, and all of them again."""
    turn: dict[int, int] = defaultdict(int)
    turns: list[tuple[int, Who]] = []
    for who in threads:
        turns.append((turn[who[0]], who))
        turn[who[0]] += 1
    turns.sort(key=lambda one: one[0])
    for _ in range(rounds):
        for _, who in turns:
            yield who
