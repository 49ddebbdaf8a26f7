# SPDX-License-Identifier: Apache-2.0
"""How many probes the files of one user or container may have, as the room for them is limited. A
place is room for one probe, at one site (an instruction) of a file."""

from __future__ import annotations

from typing import Final

from sonde import procfs
from sonde.collect.mapped_files import FileKey

PLACES_OF_PARTY: Final = 1_024
"""Of the 4,096 of all (probes.MAX_SITES). A driver library has at most 145 functions that are
probed."""
FILES_OF_PARTY: Final = 64
"""Each of them takes a descriptor and up to four links, and time when it is probed; a framework
brings some ten device libraries."""
ROOT: Final = 0
"""The party of the machine's own root: each of its files is limited as others are, their sum is
not.
"""


class PlaceShares:
    """Which party each probed file counts for: the one whose process led to it."""

    def __init__(self) -> None:
        self._of: dict[FileKey, tuple[int, int]] = {}
        """Party and places of a file."""
        self.refused = 0
        """Files without probes because the share of their user or container was used up, each time
        that one was found."""

    def room(self, party: int) -> int:
        """How many places a party may still take."""
        if party == ROOT:
            return PLACES_OF_PARTY
        taken = [places for of, places in self._of.values() if of == party]
        return PLACES_OF_PARTY - sum(taken) if len(taken) < FILES_OF_PARTY else 0

    def take(self, key: FileKey, party: int, places: int) -> None:
        """A file has probes now; nothing where it counts for a party already."""
        self._of.setdefault(key, (party, places))

    def give_back(self, key: FileKey) -> None:
        """A file has no probes any more."""
        self._of.pop(key, None)

    def refuse(self, party: int) -> str | None:
        """Count a file left out; a line for people at the first one of all parties together."""
        self.refused += 1
        return f"further files of {procfs.name_of(party)}" if self.refused == 1 else None
