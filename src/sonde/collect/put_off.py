# SPDX-License-Identifier: Apache-2.0
"""Files that wait for their probes, as a process that maps them would keep the kernel waiting."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from sonde import procfs
from sonde.collect.mapped_files import FileKey, MappedFile

FIRST_S: Final = 1.0
MAX_S: Final = 60.0
"""To the next attempt: twice as long each time, unless the process is gone."""
MAX_FILES: Final = 1_024
"""Files that wait, shared by the parties for whose processes they wait; others have no probes
until a process maps them again."""


@dataclass(slots=True)
class _Waiting:
    where: MappedFile | str
    """How to open it: by a mapping, or by the path where it is installed."""
    holder_pid: int
    """The process that would keep the kernel waiting."""
    party: int
    """That process's."""
    gap_s: float
    due_s: float = 0.0
    attempts: int = 0


class PutOffFiles:
    """Which files wait for their probes, and when each is tried again."""

    def __init__(self) -> None:
        self._files: dict[FileKey, _Waiting] = {}
        self.count = 0
        """Files that had to wait so far; one that waits again later counts again."""
        self._no_room: OrderedDict[FileKey, None] = OrderedDict()
        """Files that found no room and were counted, the oldest first."""

    def __contains__(self, key: FileKey) -> bool:
        return key in self._files

    def add(self, key: FileKey, where: MappedFile | str, holder: procfs.Holder) -> bool:
        """Put a file off, for the first time or again; True where it did not wait before."""
        known = self._files.get(key)
        is_new = known is None and key not in self._no_room
        self.count += is_new
        if known is None:
            if not self._has_room(holder.party):
                self._leave_out(key)
                return is_new
            self._no_room.pop(key, None)
            known = self._files[key] = _Waiting(where, 0, holder.party, FIRST_S / 2)
        known.holder_pid, known.party = holder.pid, holder.party
        known.gap_s = min(2 * known.gap_s, MAX_S)
        known.due_s = time.monotonic() + known.gap_s
        known.attempts += 1
        return is_new

    def _has_room(self, party: int) -> bool:
        """Whether one more file may wait for a party's process. Where all places are taken, the
        newest of the party with most makes room for a party that has fewer."""
        if len(self._files) < MAX_FILES:
            return True
        held = Counter(waiting.party for waiting in self._files.values())
        (most, count), *_ = held.most_common(1)
        if held[party] + 1 >= count:
            return False
        newest = next(key for key in reversed(self._files) if self._files[key].party == most)
        del self._files[newest]
        self._leave_out(newest)
        return True

    def _leave_out(self, key: FileKey) -> None:
        """It is counted, and found again when somebody maps it."""
        self._no_room[key] = None
        if len(self._no_room) > MAX_FILES:
            self._no_room.popitem(last=False)

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
            if now_s >= waiting.due_s or not procfs.is_there(f"/proc/{waiting.holder_pid}")
        ]

    @contextmanager
    def attempt(self, key: FileKey) -> Iterator[None]:
        """A file is tried meanwhile: unless `add` puts it off again, it waits no longer. It may
        have made room for another since it was due."""
        waiting = self._files.get(key)
        before = waiting.attempts if waiting is not None else 0
        yield
        waiting = self._files.get(key)
        if waiting is not None and waiting.attempts == before:
            self.done(key)

    def done(self, key: FileKey) -> None:
        """Forget a file: it waits no longer."""
        self._files.pop(key, None)
