# SPDX-License-Identifier: Apache-2.0
"""How much memory the paths of queued mmap events take, and whose they are.

Events are queued until a sample needs them, and most never are; how long their paths are, processes
choose. What is queued ends with its image, in many ways: so it is counted again at each tick, and
what comes in between is added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from sonde.resolve.tracked_process import TrackedProcess, images_of

MAX_QUEUED_BYTES: Final = 16 << 20
"""Of all queued paths, as they are in memory. A thousand usual processes have 6 MB."""
MAX_OF_ONE_BYTES: Final = MAX_QUEUED_BYTES // 8
"""Beyond half of that, a user or container queues no more than this; the machine's root is under no
such limit."""
_ROOT: Final = 0


class QueuedPaths:
    """The paths queued in the images of the processes that `processes` returns."""

    def __init__(self, processes: Callable[[], Iterable[TrackedProcess]]) -> None:
        self._processes = processes
        self._bytes = 0
        self._parties: Counter[int] | None = None
        """Bytes by party (`procfs.party_of`); None as long as nobody asked."""

    def recount(self, total_bytes: int) -> None:
        """Begin a tick with `total_bytes` queued."""
        self._bytes, self._parties = total_bytes, None

    def admit(self, process: TrackedProcess, path_bytes: int) -> bool:
        """Whether a process may queue a path; counts it."""
        if self._bytes + path_bytes > MAX_QUEUED_BYTES:
            return False
        if self._bytes > MAX_QUEUED_BYTES // 2:
            if self._parties is None:
                self._parties = self._by_party()
            party = process.party
            if party != _ROOT and self._parties[party] + path_bytes > MAX_OF_ONE_BYTES:
                return False
            self._parties[party] += path_bytes
        self._bytes += path_bytes
        return True

    def _by_party(self) -> Counter[int]:
        parties: Counter[int] = Counter()
        seen: set[int] = set()
        for process in self._processes():
            for image in images_of(process, seen):
                if image.queued_bytes:
                    parties[process.party] += image.queued_bytes
        return parties
