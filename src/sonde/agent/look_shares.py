# SPDX-License-Identifier: Apache-2.0
"""How many suspicions are looked at, and whose: any user can have processes that become slower all
the time. Looks are shared between parties (`procfs.party_of`), so that others' are not used up.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from sonde import procfs
from sonde.diagnose.detector import LARGE, Suspicion

MAX_OPEN: Final = 16
"""Suspicions at a time; more are left out and counted."""
EXPLAINED_PER_S: Final = 1.5
"""Suspicions that are explained in the long run: bounds the cost, whatever happens on the node."""
BURST: Final = 16.0
"""The same at once (the size of the token bucket)."""
RESERVE: Final = 4.0
"""Of these, for large slowdowns alone (`detector.LARGE`)."""
PARTS: Final = 4
"""A PARTS-th of all this is each party's own share. A party that has used up its own leaves as much
to others."""
MAX_PROCESSES: Final = 8_192
"""Processes whose parties are remembered."""


class Parties:
    """The parties of processes: looked up once for each."""

    def __init__(self, starts: Mapping[int, int]) -> None:
        """`starts`: start times by pid."""
        self._starts = starts
        self._known: dict[int, tuple[int, int]] = {}
        """By pid: start, and party."""

    def of(self, pid: int) -> int:
        """The party of a process, as first found."""
        start_ns = self._starts.get(pid, 0)
        known = self._known.pop(pid, None)
        if known is None or known[0] != start_ns:
            known = start_ns, procfs.party_of(pid)
        self._known[pid] = known  # the last one in order
        while len(self._known) > MAX_PROCESSES:
            del self._known[next(iter(self._known))]
        return known[1]


class LookShares:
    """Tokens for looks, one for each suspicion."""

    def __init__(self, party_of: Callable[[int], int]) -> None:
        self._party_of = party_of
        self._all = BURST
        self._own: dict[int, float] = {}
        """Tokens left of a party's own share, where it is not whole; part of `_all`."""
        self._took: dict[int, int] = {}
        """By these parties: the number of the last look of it."""
        self._looks = 0

    def refill(self, seconds: float) -> None:
        """Time has passed."""
        self._all = min(BURST, self._all + seconds * EXPLAINED_PER_S)
        more = seconds * EXPLAINED_PER_S / PARTS
        self._own = {
            party: left + more for party, left in self._own.items() if left + more < BURST / PARTS
        }
        self._took = {party: it for party, it in self._took.items() if party in self._own}

    def in_turn(self, found: Iterable[Suspicion]) -> list[Suspicion]:
        """The suspicion of each party that lost most, then the next of each, and so on; first those
        of the parties that had no look for longest."""
        of_party: dict[int, list[Suspicion]] = defaultdict(list)
        for suspicion in found:
            of_party[self._party_of(suspicion.pid)].append(suspicion)
        turns = [
            (turn, self._took.get(party, 0), -suspicion.lost, suspicion.pid, suspicion)
            for party, its in of_party.items()
            for turn, suspicion in enumerate(sorted(its, key=lambda it: -it.lost))
        ]
        return [one[-1] for one in sorted(turns, key=lambda it: it[:-1])]

    def take(self, suspicion: Suspicion, opened: Iterable[int]) -> bool:
        """Take a token for a look; False: there is none for it. `opened`: the pids of suspicions
        that are looked at now."""
        party = self._party_of(suspicion.pid)
        parties = Counter(map(self._party_of, opened))
        number, its_number = parties.total(), parties[party]
        is_large = suspicion.lost >= LARGE
        own = self._own.get(party, BURST / PARTS)
        has_own = own >= 1 + (0 if is_large else RESERVE / PARTS) and its_number < MAX_OPEN // PARTS
        others = 0 if has_own else 1 / PARTS
        least = 1 + others * BURST + (0 if has_own or is_large else RESERVE)
        if self._all < least or number >= MAX_OPEN - others * MAX_OPEN:
            return False
        self._all -= 1
        self._own[party] = max(0.0, own - 1)
        self._looks += 1
        self._took[party] = self._looks
        return True
