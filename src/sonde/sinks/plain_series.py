# SPDX-License-Identifier: Apache-2.0
"""The last values of series that are about no process.

There are three tables, each with a bound: of the machine and its devices, of control groups, and of
network namespaces. Any user can make groups and namespaces, so in the last two tables parties share
the room; a network namespace is a party by itself, as several users may have processes in it. What
finds no room is counted by party, for as long as it has values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from sonde.sinks.shares import SharedTable
from sonde.sinks.tenants import Attributes

MAX_SERIES: Final = 10_000
"""Series of the machine, and as many of all control groups together."""
MAX_OF_NAMESPACES: Final = 4_096
"""Series of all network namespaces together."""
FORGOTTEN_AFTER_S: Final = 60.0
"""A series without a new value is dropped after this: longer than any interval of readings."""
MAX_LEFT_OUT: Final = 10_000
"""Series that found no room and are remembered, so that each counts once. Parties share this room,
too: no party's hide that another lacks some."""
MAX_NAMED: Final = 32
"""Parties whose series left out are counted separately; the others are summed as `other`."""
GROUP: Final = "sonde.cgroup"
NAMESPACE: Final = "sonde.network.namespace"
MACHINE: Final = ""
"""In place of a party: series of the machine itself, of no control group and no namespace. A group
whose party is MACHINE (one of root's services; each with `no_party`) has its series there, too."""

Key = tuple[str, Attributes]
"""(name of the metric, attributes of the series)"""
PartyLookup = Callable[[str], str]
"""The name of the party that a control group belongs to, by its path; MACHINE for none."""


def no_party(_path: str) -> str:
    """The lookup where parties are not known."""
    return MACHINE


@dataclass(slots=True)
class Last:
    """The last value of a series."""

    value: float
    time_ns: int
    """0: forgotten."""


class PlainSeries:
    """Series by name and attributes."""

    def __init__(self, party_of_group: PartyLookup) -> None:
        self._party_of_group = party_of_group
        self._machine: SharedTable[Key, Last] = SharedTable(MAX_SERIES)
        self._groups: SharedTable[Key, Last] = SharedTable(MAX_SERIES)
        self._namespaces: SharedTable[Key, Last] = SharedTable(MAX_OF_NAMESPACES)
        self._left_out: SharedTable[Key, Last] = SharedTable(MAX_LEFT_OUT)
        """Series that found no room, and when each found none last (`time_ns`)."""
        self._forgot_ns = 0

    def __len__(self) -> int:
        return sum(map(len, self._tables()))

    def slot(self, key: Key, now_ns: int) -> Last | None:
        """Where the value of a series is kept; None where there is no room for it."""
        table, party = self._place(dict(key[1]))
        if known := table.get(key):
            return known
        if not table.has_room(party) and now_ns - self._forgot_ns > FORGOTTEN_AFTER_S * 1e9:
            self.forget(now_ns)  # else only reading the series does it, which may never happen
        if not table.has_room(party):
            if lacking := self._left_out.get(key):
                lacking.time_ns = now_ns
            elif self._left_out.has_room(party):
                self._left_out.add(party, key, Last(0.0, now_ns))
            return None
        if key in self._left_out:
            self._left_out.remove(key)
        last = Last(0.0, 0)
        if evicted := table.add(party, key, last):
            evicted[1].time_ns = 0
        return last

    def items(self) -> Iterator[tuple[Key, Last]]:
        """Every series."""
        for table in self._tables():
            yield from table.items()

    def forget(self, now_ns: int) -> None:
        """Drop what has had no value for a while."""
        self._forgot_ns = now_ns
        oldest_ns = now_ns - FORGOTTEN_AFTER_S * 1e9
        for table in self._tables():
            for _, last in table.remove_all(lambda last: last.time_ns < oldest_ns):
                last.time_ns = 0
        self._left_out.remove_all(lambda lacking: lacking.time_ns < oldest_ns)

    def left_out(self) -> list[tuple[str, int]]:
        """(party, number of its series that find no room), the largest number first."""
        found = Counter(self._left_out.counts()).most_common()
        others = sum(count for _, count in found[MAX_NAMED:])
        return found[:MAX_NAMED] + ([("other", others)] if others else [])

    def _tables(self) -> tuple[SharedTable[Key, Last], ...]:
        return self._machine, self._groups, self._namespaces

    def _place(self, attributes: Mapping[str, str]) -> tuple[SharedTable[Key, Last], str]:
        """The table of a series, and its party there."""
        if (path := attributes.get(GROUP)) and (party := self._party_of_group(path)) != MACHINE:
            return self._groups, party
        if namespace := attributes.get(NAMESPACE):
            return self._namespaces, f"network namespace {namespace}"
        return self._machine, MACHINE
