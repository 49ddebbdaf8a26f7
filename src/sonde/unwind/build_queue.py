# SPDX-License-Identifier: Apache-2.0
"""Whose unwind table is built next.

One subprocess builds all tables, and a user makes as many files as they like, each of which takes
as long as a file may. So the CPU time of builds is charged to the party that brought the file: the
table of a party that has used less is built first, of equal ones that of the party whose last turn
is longest ago. In a full queue a party has an equal share at least.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from sonde.resolve.allowance import Allowance

LEVEL_S: Final = 1.0
"""Parties that differ by less in what they have used are equal. The 135 libraries of PyTorch take
3 s, most of it one of them."""
MOST_LEVELS: Final = 30
"""So are those that have used more than this many times that …"""
SHARE: Final = 0.1
"""… of which this much comes back in a second."""
_MAX_PARTIES: Final = 1024
"""Parties whose turns are remembered."""


@dataclass(slots=True)
class Request:
    """A table that somebody waits for."""

    key: str
    fd: int
    party: int
    weight: float = 0.0
    """How much it is needed."""
    times_late: int = 0
    """How often its build was given up as it took too long by the clock."""


class BuildQueue:
    """Requests that the subprocess does not have yet, by party: those needed most first."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._waiting: dict[int, deque[Request]] = {}
        self._left = Allowance(MOST_LEVELS * LEVEL_S, SHARE)
        self._served: dict[int, int] = {}
        """Number of the last turn of a party; the oldest turn first."""
        self._turns = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _share_of(self, party: int) -> int:
        """Requests that a party may have in a full queue."""
        parties = len(self._waiting) + (party not in self._waiting)
        return max(1, self._max_requests // parties)

    def _held_by(self, party: int) -> int:
        return len(self._waiting.get(party, ()))

    def has_place(self, party: int) -> bool:
        """Whether a request of a party can be added."""
        return len(self) < self._max_requests or self._held_by(party) < self._share_of(party)

    def has_room(self, party: int) -> bool:
        """Whether many of a party can be."""
        few = self._held_by(party) <= self._share_of(party) // 2
        return few or len(self) <= self._max_requests // 2

    def add(self, request: Request) -> Request | None:
        """Add a request that `has_place`. Returns the one that it replaced: of the party with most,
        that which is needed least. None where the queue was not full."""
        evicted = None
        if len(self) >= self._max_requests:
            most = max(self._waiting, key=self._held_by)
            evicted = self._waiting[most].pop()
            self._clean(most)
        self._waiting.setdefault(request.party, deque()).append(request)
        return evicted

    def put_back(self, requests: Iterable[Request]) -> None:
        """Add requests that were taken before, in their order ahead of all others of their
        party."""
        for request in reversed(list(requests)):
            self._waiting.setdefault(request.party, deque()).appendleft(request)

    def order(self, weights: Mapping[str, float]) -> None:
        """Put those with the greatest weights first; of equal ones the first asked for."""
        for party, its in self._waiting.items():
            for request in its:
                request.weight = weights.get(request.key, 0.0)
            self._waiting[party] = deque(sorted(its, key=lambda it: -it.weight))

    def charge(self, party: int, seconds: float) -> None:
        """A build of a party took as much CPU time."""
        self._left.take(party, seconds)

    def level(self, party: int) -> int:
        """How much a party has used, in LEVEL_S; 0 of the machine's own root."""
        used_s = MOST_LEVELS * LEVEL_S - self._left.left(party)
        return max(0, min(MOST_LEVELS, int(used_s / LEVEL_S)))

    def take(self, sent: Counter[int]) -> Request | None:
        """Remove the request whose turn it is. `sent`: unanswered requests by party: of one that
        has used LEVEL_S, one at a time is sent ahead. None where there is no other."""
        turns = [
            (level, self._served.get(party, 0), -its[0].weight, party)
            for party, its in self._waiting.items()
            if not (level := self.level(party)) or not sent[party]
        ]
        if not turns:
            return None
        *_, party = min(turns)
        request = self._waiting[party].popleft()
        self._clean(party)
        self._turns += 1
        self._served.pop(party, None)
        if len(self._served) >= _MAX_PARTIES:
            del self._served[next(iter(self._served))]
        self._served[party] = self._turns
        return request

    def clear(self) -> list[Request]:
        """Remove all, and return them."""
        requests = [request for its in self._waiting.values() for request in its]
        self._waiting.clear()
        return requests

    def _clean(self, party: int) -> None:
        if not self._waiting[party]:
            del self._waiting[party]
