# SPDX-License-Identifier: Apache-2.0
"""Copies in memory of files whose reading could wait: how much they take, and who shares them.

A user decides how many such files there are, so each party may hold a part of all, and have only so
many bytes copied in a second. No copy holds its file's device: once its last mapping is gone the
kernel may give the numbers of the device to somebody else's. So a copy is shared within its party
alone, and only while the process lives that mapped the file.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from typing import Final

from sonde.resolve.allowance import Allowance
from sonde.resolve.binary import Binary, FileKey
from sonde.resolve.lru_cache import LruCache
from sonde.resolve.mappings import Mapping
from sonde.resolve.tracked_process import TrackedProcess

MAX_BYTES: Final = 128 << 20
"""Of all copies, with the one that is being made. A party may hold a quarter."""
BURST: Final = 2
"""Times what it may hold that a party may have copied at once …"""
BYTES_PER_S: Final = 1 << 20
"""… of which so much comes back."""
MAX_SHARED: Final = 1024

_Place = tuple[int, FileKey, str]
"""(party, file, path), as mappings show them."""


class Copies:
    """The copies that are held, the least recently used first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._of_party = max_bytes // 4
        self._of_all = max_bytes - self._of_party
        self._held: dict[Binary, tuple[int, int]] = {}
        """(party, bytes)"""
        self._shared: LruCache[_Place, tuple[Binary, TrackedProcess]] = LruCache(MAX_SHARED)
        self._allowance = Allowance(BURST * self._of_party, BYTES_PER_S)

    @property
    def held_bytes(self) -> int:
        """Of memory, of all parties."""
        return sum(size for _, size in self._held.values())

    def find(self, process: TrackedProcess, mapping: Mapping) -> Binary | None:
        """The open copy of the file behind a mapping, if it is that file's for sure."""
        found = self._shared.get((process.party, mapping.file, mapping.path))
        if found is None or found[0].fd < 0 or not found[1].is_alive:
            return None
        return found[0]

    def share(self, binary: Binary, process: TrackedProcess, mapping: Mapping) -> None:
        """Have a copy found by others of the party that map the same."""
        self._shared.put((process.party, mapping.file, mapping.path), (binary, process))

    def room_for(self, party: int) -> int:
        """Bytes that the next copy for a party may take."""
        return max(0, min(self._of_party, int(self._allowance.left(party))))

    def add(self, binary: Binary, party: int) -> list[Binary]:
        """A copy is held for a party. Returns those that are to be dropped for it: the party's own,
        then of those who hold most."""
        size = _memory_of(binary.fd)
        self._allowance.take(party, size)
        others: Counter[int] = Counter()
        for whose, bytes_ in self._held.values():
            others[whose] += bytes_
        dropped: list[Binary] = []
        while others.total():
            if others[party] and others[party] + size > self._of_party:
                whose = party
            elif others.total() + size > self._of_all:
                whose = max(others, key=lambda it: others[it])
            else:
                break
            oldest = next(it for it, (of, _) in self._held.items() if of == whose)
            others[whose] -= self._held.pop(oldest)[1]
            dropped.append(oldest)
        self._held[binary] = party, size
        return dropped

    def use(self, binary: Binary) -> None:
        """It was used just now."""
        if binary in self._held:
            self._held[binary] = self._held.pop(binary)

    def drop(self, binary: Binary) -> None:
        """It is closed."""
        self._held.pop(binary, None)


def _memory_of(fd: int) -> int:
    with suppress(OSError):
        return os.fstat(fd).st_blocks * 512
    return 0
