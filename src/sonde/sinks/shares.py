# SPDX-License-Identifier: Apache-2.0
"""A bounded table that parties share: each can have its equal part of it when it comes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class SharedTable(Generic[Key, Value]):
    """Entries by key, each of one party. A party may fill what others leave free. Once the table is
    full, one that has less than an equal share takes the place of the newest entry of the largest.
    """

    def __init__(self, most: int) -> None:
        self._most = most
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
        """Whether a new entry of a party finds a place."""
        if len(self) < self._most:
            return True
        mine = self._parties.get(party, {})
        return len(mine) < self._most // (len(self._parties) + (not mine))

    def add(self, party: str, key: Key, value: Value) -> tuple[Key, Value] | None:
        """Add a new entry, where `has_room`; returns the one that made way, None where none had to.

        Without room a party would take more than its part.
        """
        evicted = None
        if len(self) >= self._most:
            largest = max(self._parties.values(), key=len)
            newest = next(reversed(largest))
            evicted = newest, largest[newest]
            self.remove(newest)
        self._parties.setdefault(party, {})[key] = value
        self._party_of[key] = party
        return evicted

    def remove(self, key: Key) -> None:
        """Take an entry away."""
        party = self._party_of.pop(key)
        mine = self._parties[party]
        del mine[key]
        if not mine:
            del self._parties[party]

    def remove_all(self, is_gone: Callable[[Value], bool]) -> list[tuple[Key, Value]]:
        """Take away all entries that are gone, and return them."""
        gone = [(key, value) for key, value in self.items() if is_gone(value)]
        for key, _ in gone:
            self.remove(key)
        return gone

    def items(self) -> Iterator[tuple[Key, Value]]:
        """Every entry."""
        for mine in self._parties.values():
            yield from mine.items()
