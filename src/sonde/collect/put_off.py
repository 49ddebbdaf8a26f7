# SPDX-License-Identifier: Apache-2.0
"""Files that wait for their probes, as a process that maps them would keep the kernel waiting."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sonde import procfs
from sonde.collect.mapped_files import FileKey, MappedFile

FIRST_S: Final = 1.0
MAX_S: Final = 60.0
"""To the next attempt: twice as long each time, unless the process is gone."""
MAX_FILES: Final = 1_024
"""Files that wait; others have no probes until a process maps them again."""


@dataclass(slots=True)
class _Waiting:
    where: MappedFile | str
    """How to open it: by a mapping, or by the path where it is installed."""
    holder_pid: int
    """The process that would keep the kernel waiting."""
    gap_s: float
    due_s: float = 0.0
    attempts: int = 0


class PutOffFiles:
    """Which files wait for their probes, and when each is tried again."""

    def __init__(self) -> None:
        self._files: dict[FileKey, _Waiting] = {}
        self.count = 0
        """Files that had to wait so far; one that waits again later counts again."""
        self._no_room: set[FileKey] = set()

    def __contains__(self, key: FileKey) -> bool:
        return key in self._files

    def add(self, key: FileKey, where: MappedFile | str, holder: procfs.Holder) -> bool:
        """Put a file off, for the first time or again; True where it did not wait before."""
        known = self._files.get(key)
        is_new = known is None and key not in self._no_room
        self.count += is_new
        if known is None:
            if len(self._files) >= MAX_FILES:
                if len(self._no_room) >= MAX_FILES:
                    self._no_room.clear()
                self._no_room.add(key)
                return is_new  # counted, and found again when somebody maps it
            self._no_room.discard(key)
            known = self._files[key] = _Waiting(where, 0, FIRST_S / 2)
        known.holder_pid = holder.pid
        known.gap_s = min(2 * known.gap_s, MAX_S)
        known.due_s = time.monotonic() + known.gap_s
        known.attempts += 1
        return is_new

    def mapped(self, file: MappedFile) -> None:
        """One more process maps it: it can be opened by that one's mapping."""
        known = self._files[file.key]
        if isinstance(known.where, MappedFile):
            known.where = file

    def due(self) -> list[tuple[FileKey, MappedFile | str]]:
        """Files to be tried now, each in an `attempt`, and how to open them."""
        now_s = time.monotonic()
        return [
            (key, waiting.where)
            for key, waiting in self._files.items()
            if now_s >= waiting.due_s or not Path(f"/proc/{waiting.holder_pid}").exists()
        ]

    @contextmanager
    def attempt(self, key: FileKey) -> Iterator[None]:
        """A file is tried meanwhile: unless `add` puts it off again, it waits no longer."""
        before = self._files[key].attempts
        yield
        waiting = self._files.get(key)
        if waiting is not None and waiting.attempts == before:
            self.done(key)

    def done(self, key: FileKey) -> None:
        """Forget a file: it waits no longer."""
        self._files.pop(key, None)
