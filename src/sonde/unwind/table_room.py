# SPDX-License-Identifier: Apache-2.0
"""How much the unwind tables on disk take: all of them, and those of one user or container.

A table is larger than its file where that is compressed or repeats itself, and anybody can make any
number of such files. So what a party has built is limited, at once and in time: of what goes beyond
it no table is kept. Where all tables together are too many, the one that was not
used for longest goes, of the party that holds most by far, if one does.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from sonde.resolve.allowance import ROOT, Allowance

ENDING: Final = ".unw"
PARTY_SHARE: Final = 4
"""A party may have such a part of all built at once …"""
PARTY_BYTES_PER_S: Final = 4 << 10
"""… of which so much comes back."""
MOST_SHARE: Final = 16
"""A party that holds more than such a part of all gives way first."""
LOOK_EVERY: Final = 256
"""Tables that are added between two looks at the folder, which other recorders use, too."""


class TableRoom:
    """The tables in a folder, the least recently used first."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._allowance = Allowance(max_bytes // PARTY_SHARE, PARTY_BYTES_PER_S)
        self._sizes: dict[str, int] = {}
        """Of files, by name; in order of use."""
        self._total = 0
        self._builders: dict[str, int] = {}
        """Parties, by the names of the tables that were built for them in this run."""
        self._added = 0
        self._look()
        self._shrink()

    def use(self, name: str) -> None:
        """A table is used, and is to stay longer than others."""
        if (size := self._sizes.pop(name + ENDING, None)) is not None:
            self._sizes[name + ENDING] = size

    def add(self, name: str, party: int) -> bool:
        """A table was built for a party. False where it has no room for it: it is gone then."""
        file = name + ENDING
        size = 0
        with suppress(OSError):
            size = (self._folder / file).stat().st_size
        self._total += size - self._sizes.pop(file, 0)
        self._sizes[file] = size
        if party != ROOT:
            if size > self._allowance.left(party):
                self._delete(file)
                return False
            self._allowance.take(party, size)
            self._builders[file] = party
        self._added += 1
        if self._added % LOOK_EVERY == 0:
            self._look()
        self._shrink()
        return True

    def _delete(self, file: str) -> None:
        self._total -= self._sizes.pop(file)
        self._builders.pop(file, None)
        with suppress(OSError):
            (self._folder / file).unlink()

    def _look(self) -> None:
        found = []
        with suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    status = entry.stat()
                    found.append(
                        (max(status.st_atime, status.st_mtime), entry.name, status.st_size)
                    )
        self._sizes = {name: size for _, name, size in sorted(found)}
        self._total = sum(self._sizes.values())
        self._builders = {it: who for it, who in self._builders.items() if it in self._sizes}

    def _shrink(self) -> None:
        """Delete tables until the rest is no more than may be."""
        if self._total <= self._max_bytes:
            return
        held: Counter[int] = Counter()
        for file, party in self._builders.items():
            held[party] += self._sizes[file]
        while self._total > self._max_bytes and self._sizes:
            party, most = held.most_common(1)[0] if held else (ROOT, 0)
            names: Iterator[str] = iter(self._sizes)
            if most > self._max_bytes // MOST_SHARE:
                names = (it for it in self._sizes if self._builders.get(it) == party)
            file = next(names)
            if (builder := self._builders.get(file)) is not None:
                held[builder] -= self._sizes[file]
            self._delete(file)
