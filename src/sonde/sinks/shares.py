# SPDX-License-Identifier: Apache-2.0
"""A bounded table that parties share: a new party gets an equal share, even of a full table."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class SharedTable(Generic[Key, Value]):
    """Entries by key, each of one party. A party may fill what others leave free. In a full table,
    an entry of a party with less than an equal share replaces the newest entry of the party that
    has most.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._parties: dict[str, dict[Key, Value]] = {}
        self._party_of: dict[Key, str] = {}

    def __len__(self) -> int:
        return len(self._party_of)

    def __contains__(self, key: Key) -> bool:
        return key in self._party_of

    def get(self, key: Key) -> Value | None:
        """The entry; None where there is none."""
        party = self._party_of.get(key)
        return None if party is None else self._parties[party][key]

    def has_room(self, party: str) -> bool:
        """Whether a new entry of a party may be added."""
        if len(self) < self._max_entries:
            return True
        mine = self._parties.get(party, {})
        return len(mine) < self._max_entries // (len(self._parties) + (not mine))

    def add(self, party: str, key: Key, value: Value) -> tuple[Key, Value] | None:
        """Add a new entry; returns the one that it replaced, None where the table was not full.
        To be called only where `has_room`: it takes a place without checking the share."""
        evicted = None
        if len(self) >= self._max_entries:
            largest = max(self._parties.values(), key=len)
            newest = next(reversed(largest))
            evicted = newest, largest[newest]
            self.remove(newest)
        self._parties.setdefault(party, {})[key] = value
        self._party_of[key] = party
        return evicted

    def remove(self, key: Key) -> None:
        """Remove an entry, which must be there."""
        party = self._party_of.pop(key)
        mine = self._parties[party]
        del mine[key]
        if not mine:
            del self._parties[party]

    def remove_all(self, is_gone: Callable[[Value], bool]) -> list[tuple[Key, Value]]:
        """Remove all entries whose value `is_gone`, and return them."""
        gone = [(key, value) for key, value in self.items() if is_gone(value)]
        for key, _ in gone:
            self.remove(key)
        return gone

    def counts(self) -> dict[str, int]:
        """How many entries each party has."""
        return {party: len(mine) for party, mine in self._parties.items()}

    def items(self) -> Iterator[tuple[Key, Value]]:
        """Every entry."""
        for mine in self._parties.values():
            yield from mine.items()
