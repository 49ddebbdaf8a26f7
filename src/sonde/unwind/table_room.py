# SPDX-License-Identifier: Apache-2.0
"""Limits how much disk the unwind tables take: in all, and those of one user or container.

A table can be larger than its file, where that is compressed or repeats itself, and anybody can
make any number of such files. So the bytes of tables that are built for a party are limited: by a
budget that is refilled at a rate. A table beyond it is deleted at once. Where all tables together
take too much, the least recently used one is deleted: of the party that holds most, if that is more
than one part in MOST_SHARE of all.
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
"""The budget of a party is one part in this many of all bytes …"""
PARTY_BYTES_PER_S: Final = 4 << 10
"""… and is refilled at this rate."""
MOST_SHARE: Final = 16
LOOK_EVERY: Final = 256
"""Tables that are added between two looks at the folder, which other recorders use, too."""


class TableRoom:
    """The tables in a folder, the least recently used first."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._allowance = Allowance(max_bytes // PARTY_SHARE, PARTY_BYTES_PER_S)
        self._sizes: dict[str, int] = {}
        """Bytes of tables by file name, the least recently used first."""
        self._total = 0
        self._builders: dict[str, int] = {}
        """Parties, by the names of the tables that were built for them in this run."""
        self._added = 0
        self._used: list[str] = []
        """Names that `use` got before the first look."""
        self._has_looked = False

    def use(self, name: str) -> None:
        """Note that a table is used now."""
        if not self._has_looked:
            self._used.append(name)
            return
        if (size := self._sizes.pop(name + ENDING, None)) is not None:
            self._sizes[name + ENDING] = size

    def add(self, name: str, party: int) -> bool:
        """Note that a table was built for a party. False where it is beyond the party's budget, and
        was deleted."""
        if not self._has_looked:
            self._begin()
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

    def _begin(self) -> None:
        """The first look. It comes with the first new table, as a run that finds all its tables
        built has to delete none: to look takes 10 ms for a thousand tables."""
        self._has_looked = True
        self._look()
        for name in self._used:
            self.use(name)
        self._used.clear()
        self._shrink()

    def _delete(self, file: str) -> None:
        self._total -= self._sizes.pop(file)
        self._builders.pop(file, None)
        with suppress(OSError):
            (self._folder / file).unlink()

    def _look(self) -> None:
        """Read which tables the folder has."""
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
        """Delete tables until the rest takes no more than the limit."""
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
