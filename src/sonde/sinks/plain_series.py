# SPDX-License-Identifier: Apache-2.0
"""Last values of series that name no process.

Those of the machine and its devices have separate room. So have those of control groups and
those of network namespaces, which any user makes: there parties share it (of namespaces, which are
shared between users where they are read, each is one). What was left out is counted by party, for
as long as it is left out.
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
FORGOTTEN_AFTER_S: Final = 60.0
"""Longer than the longest interval between readings."""
MAX_LEFT_OUT: Final = 10_000
"""Series left out that are distinguished."""
MAX_NAMED: Final = 32
"""Parties whose series left out are counted apart."""
GROUP: Final = "sonde.cgroup"
NAMESPACE: Final = "sonde.network.namespace"
MACHINE: Final = ""

Key = tuple[str, Attributes]
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
        self._left_out: dict[Key, tuple[str, int]] = {}
        """Party, and when it was left out last."""
        self._forgot_ns = 0

    def __len__(self) -> int:
        return sum(map(len, self._tables()))

    def slot(self, key: Key, now_ns: int) -> Last | None:
        """Where the value of a series is kept; None where there is no room for it."""
        table, party = self._place(dict(key[1]))
        if known := table.get(key):
            return known
        if not table.has_room(party) and now_ns - self._forgot_ns > FORGOTTEN_AFTER_S * 1e9:
            self.forget(now_ns)  # nobody may have asked for the page
        if not table.has_room(party):
            if key in self._left_out or len(self._left_out) < MAX_LEFT_OUT:
                self._left_out[key] = party, now_ns
            return None
        self._left_out.pop(key, None)
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
        for key in [key for key, (_, time_ns) in self._left_out.items() if time_ns < oldest_ns]:
            del self._left_out[key]

    def left_out(self) -> list[tuple[str, int]]:
        """(party, series that it had and that found no room), those with most first."""
        found = Counter(party for party, _ in self._left_out.values()).most_common()
        rest = sum(count for _, count in found[MAX_NAMED:])
        return found[:MAX_NAMED] + ([("other", rest)] if rest else [])

    def _tables(self) -> tuple[SharedTable[Key, Last], ...]:
        return self._machine, self._groups, self._namespaces

    def _place(self, attributes: Mapping[str, str]) -> tuple[SharedTable[Key, Last], str]:
        """The table of a series, and its party there."""
        if (path := attributes.get(GROUP)) and (party := self._party_of_group(path)) != MACHINE:
            return self._groups, party
        if namespace := attributes.get(NAMESPACE):
            return self._namespaces, f"network namespace {namespace}"
        return self._machine, MACHINE
