# SPDX-License-Identifier: Apache-2.0
"""Copies in memory of files whose reading could wait: how much they take, and who shares them.

A user decides how many such files there are, so what a party may hold is bounded, and what is
copied for it in a second. No copy holds its file's device: once its last mapping is gone the kernel
may give the numbers of that device to another one. So a copy is shared within its party alone, and
only while the process lives that mapped the file.
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
"""A party may have twice the bytes copied at once that it may hold …"""
BYTES_PER_S: Final = 1 << 20
"""… and this many more each second."""
MAX_SHARED: Final = 1024
"""Files whose copies other processes find."""

_SharedKey = tuple[int, FileKey, str]
"""(party, file, path), as mappings show them."""


class Copies:
    """The copies that are held, the least recently used first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._party_bytes = max_bytes // 4
        """What a party may hold; as much is kept free for the copy that is being made."""
        self._all_bytes = max_bytes - self._party_bytes
        """What all parties may hold together."""
        self._held: dict[Binary, tuple[int, int]] = {}
        """(party, bytes)"""
        self._shared: LruCache[_SharedKey, tuple[Binary, TrackedProcess]] = LruCache(MAX_SHARED)
        self._allowance = Allowance(BURST * self._party_bytes, BYTES_PER_S)

    @property
    def held_bytes(self) -> int:
        """Memory of all copies."""
        return sum(size for _, size in self._held.values())

    def find(self, process: TrackedProcess, mapping: Mapping) -> Binary | None:
        """The open copy of the file behind a mapping; None where there is none, or it may be that
        of another file by now."""
        found = self._shared.get((process.party, mapping.file, mapping.path))
        if found is None or found[0].fd < 0 or not found[1].is_alive:
            return None
        return found[0]

    def share(self, binary: Binary, process: TrackedProcess, mapping: Mapping) -> None:
        """Have a copy found by others of the party that map the same."""
        self._shared.put((process.party, mapping.file, mapping.path), (binary, process))

    def room_for(self, party: int) -> int:
        """Bytes that the next copy for a party may take."""
        return max(0, min(self._party_bytes, int(self._allowance.left(party))))

    def add(self, binary: Binary, party: int) -> list[Binary]:
        """Hold a copy for a party. Returns those that are to be dropped for it: the party's own,
        then of those who hold most."""
        size = _memory_of(binary.fd)
        self._allowance.take(party, size)
        others: Counter[int] = Counter()
        for whose, bytes_ in self._held.values():
            others[whose] += bytes_
        dropped: list[Binary] = []
        while others.total():
            if others[party] and others[party] + size > self._party_bytes:
                whose = party
            elif others.total() + size > self._all_bytes:
                whose = max(others, key=lambda it: others[it])
            else:
                break
            oldest = next(it for it, (of, _) in self._held.items() if of == whose)
            others[whose] -= self._held.pop(oldest)[1]
            dropped.append(oldest)
        self._held[binary] = party, size
        return dropped

    def use(self, binary: Binary) -> None:
        """Note that a copy was used just now."""
        if binary in self._held:
            self._held[binary] = self._held.pop(binary)

    def drop(self, binary: Binary) -> None:
        """Forget a copy that is closed."""
        self._held.pop(binary, None)


def _memory_of(fd: int) -> int:
    with suppress(OSError):
        return os.fstat(fd).st_blocks * 512
    return 0
