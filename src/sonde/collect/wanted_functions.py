# SPDX-License-Identifier: Apache-2.0
"""Which functions of a file are probed: those of device APIs, by their symbols, and what a library
hands out by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sonde import _native
from sonde.apis import Api, Call
from sonde.collect.entry_points import entry_points
from sonde.collect.plain_files import digest_of

SITES_OF_A_CALL = 16
"""Functions of a file that are probed for one call: its names and versions. A file may define as
many as it likes."""


class Place(NamedTuple):
    """A function in a file."""

    call: Call
    offset: int
    size: int
    """0: not known."""


class WantedFunctions:
    """What is looked for in files."""

    def __init__(self, apis: Iterable[Api], launches: bool) -> None:
        """`launches`: calls that launch kernels are wanted, too."""
        self._apis = tuple(apis)
        self._calls = {
            (api.name, call.function): call
            for api in self._apis
            for call in api.calls
            if launches or call.op != "launch"
        }
        self._symbols = {symbol: call for call in self._calls.values() for symbol in call.symbols}
        seen = [name for name, call in self._calls.items() if call.calls_back]
        self._at_entry = {name: number for number, name in enumerate(seen, 1)}
        self.digest = digest_of(self._symbols)
        """What is looked for, as text that changes with it."""

    def number_at_entry(self, call: Call) -> int:
        """From 1 on, of a function whose return is not probed: it runs code of its caller, and is
        counted at the entry. 0: it is counted at its return."""
        return self._at_entry.get((call.api, call.function), 0)

    def libraries(self, name: str) -> set[str]:
        """APIs of which a file of this name is the library."""
        return {api.name for api in self._apis if api.is_library(name)}

    def defined(self, path: str) -> list[Place]:
        """Those that a file defines, in its order. Raises OSError."""
        found = _native.find_functions(path, list(self._symbols))
        return [Place(self._symbols[it.name], it.offset, it.size) for it in found]

    def handed_out(self, fd: int, name: str) -> list[Place]:
        """Those that a library of this name hands out by name. It is loaded for that
        (`entry_points`)."""
        places: list[Place] = []
        for api in self._apis:
            if api.hands_out and api.is_library(name):
                wanted = {name: call for (of, name), call in self._calls.items() if of == api.name}
                places += [Place(wanted[name], at, 0) for name, at in entry_points(fd, wanted)]
        return places


def first_of_each(places: Sequence[Place], limit: int = SITES_OF_A_CALL) -> list[Place]:
    """The first `limit` places of each call, in their order."""
    seen: Counter[str] = Counter()
    kept = []
    for place in places:
        name = place.call.function
        seen[name] += 1
        if seen[name] <= limit:
            kept.append(place)
    return kept
