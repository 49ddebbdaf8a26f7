# SPDX-License-Identifier: Apache-2.0
"""How much memory caches may take that processes fill with what they like: names, paths, stacks.

Each cache has a bound, but a party may have many processes with one each. So all caches of a kind
have one bound in bytes together. Where it is reached, the largest cache of the party that holds
most is emptied: what one party names costs the others nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Protocol
from weakref import WeakSet


class Cache(Protocol):
    """One cache, of one process."""

    @property
    def party(self) -> int:
        """Whose process it is of (`procfs.party_of`)."""

    @property
    def held_bytes(self) -> int:
        """Memory that it takes now, about."""

    def empty(self) -> None:
        """Drop everything; `held_bytes` is 0 then."""


class PartyMemory:
    """One bound for caches of many processes, which it does not keep alive."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._caches: WeakSet[Cache] = WeakSet()
        self._bytes = 0
        """At least what the caches hold: those that are gone count until the next look."""
        self.emptied = 0
        """Caches that were emptied to make room."""

    def add(self, cache: Cache) -> None:
        """Bound a cache, too, as long as somebody has it."""
        self._caches.add(cache)

    def grew(self, count_bytes: int) -> None:
        """A cache holds more, as its `held_bytes` shows already; negative: less."""
        self._bytes += count_bytes
        if self._bytes > self._most:
            self._make_room()

    def _make_room(self) -> None:
        for cache in self._largest():
            cache.empty()
            self.emptied += 1

    def _largest(self) -> Iterator[Cache]:
        """Caches to be emptied, one after the other, until the others fit."""
        of_party: defaultdict[int, list[Cache]] = defaultdict(list)
        for cache in self._caches:
            of_party[cache.party].append(cache)
        held = {party: sum(it.held_bytes for it in its) for party, its in of_party.items()}
        for its in of_party.values():
            its.sort(key=lambda it: it.held_bytes)
        self._bytes = sum(held.values())
        while self._bytes > self._most:
            most = max(held, key=held.__getitem__)
            cache = of_party[most].pop()
            self._bytes -= cache.held_bytes
            held[most] -= cache.held_bytes
            yield cache

    @property
    def bytes(self) -> int:
        """Memory of all caches, about."""
        return sum(it.held_bytes for it in self._caches)
