# SPDX-License-Identifier: Apache-2.0
"""Which party holds how many connections, and which of them gives way when all places are taken."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from itertools import chain
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)
_ByParty = dict[str, OrderedDict[C, None]]


class HeldConnections(Generic[C]):
    """Open connections, each of one party: of a tenant, or of a client's machine.

    One gives way only while its client is awaited: while it is idle, or a request of it arrives.
    It is one of the party that holds most of all, so that a party that takes all places is in the
    way of none but itself. The name of a party is not ''. For use in one event loop. Each method
    takes constant time, but those that look for one that gives way: they look at each party.
    """

    def __init__(self) -> None:
        self._party: dict[C, str] = {}
        self._held: Counter[str] = Counter()
        self._idle: _ByParty[C] = {}
        """Those that only wait for another request, the longest first; no party without any."""
        self._sending: _ByParty[C] = {}
        """The same of those whose next request has begun and is not here as a whole."""

    def __len__(self) -> int:
        return len(self._party)

    def add(self, one: C, party: str) -> None:
        """A connection of `party` is open; its first request is awaited."""
        self._party[one] = party
        self._held[party] += 1
        self.sends(one)

    def remove(self, one: C) -> None:
        """It is closed, or about to be; nothing where it was removed before."""
        self.serves(one)
        party = self._party.pop(one, None)
        if party is not None:
            self._held[party] -= 1
            if not self._held[party]:
                del self._held[party]

    def move(self, one: C, party: str) -> None:
        """It is a connection of `party`. It counts as having begun to wait just now."""
        before = self._party.get(one)
        if before is None or before == party:
            return
        table = next((it for it in (self._idle, self._sending) if one in it.get(before, ())), None)
        self.remove(one)
        self._party[one] = party
        self._held[party] += 1
        if table is not None:
            self._wait(table, one)

    def idles(self, one: C) -> None:
        """It waits for another request."""
        self._wait(self._idle, one)

    def sends(self, one: C) -> None:
        """A request of it is awaited that has begun, or its first one."""
        self._wait(self._sending, one)

    def serves(self, one: C) -> None:
        """A request of it is here as a whole: it gives no way until the answer is complete."""
        party = self._party.get(one, "")
        for table in (self._idle, self._sending):
            ones = table.get(party, OrderedDict())
            ones.pop(one, None)
            if not ones:
                table.pop(party, None)

    def longest_idle(self) -> C | None:
        """Of the party that holds most of all whose clients are awaited, the connection that is
        idle for longest; None where there is none, or that is less than an equal share."""
        return next(iter(self._idle.get(self._largest(), ())), None)

    def giving_way(self) -> C | None:
        """The same, or where that party has no idle one, its connection whose request began to
        arrive first."""
        largest = self._largest()
        return next(chain(self._idle.get(largest, ()), self._sending.get(largest, ())), None)

    def _wait(self, table: _ByParty[C], one: C) -> None:
        self.serves(one)
        party = self._party.get(one)
        if party is not None:
            table.setdefault(party, OrderedDict())[one] = None

    def _largest(self) -> str:
        """'': none that has connections to give."""
        parties = chain(self._idle, self._sending)
        party = max(parties, key=self._held.__getitem__, default="")
        return party if self._held[party] * len(self._held) >= len(self._party) else ""
