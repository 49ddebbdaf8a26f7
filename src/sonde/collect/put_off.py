# SPDX-License-Identifier: Apache-2.0
"""Files that wait for their probes, as a process that maps them would keep the kernel waiting."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sonde import procfs
from sonde.collect.libraries import FileKey, MappedFile

FIRST_S: Final = 1.0
MOST_S: Final = 60.0
"""To the next attempt: twice as long each time, unless the process is gone."""
MAX_FILES: Final = 1_024


@dataclass(slots=True)
class _Waiting:
    where: MappedFile | str
    """How to open it: by a mapping, or by the path where it is installed."""
    holder_pid: int
    gap_s: float
    due_s: float


class PutOffFiles:
    """When to try again."""

    def __init__(self) -> None:
        self._files: dict[FileKey, _Waiting] = {}
        self.count = 0
        """Of files, so far: each once as long as it waits."""

    def __contains__(self, key: FileKey) -> bool:
        return key in self._files

    def add(self, key: FileKey, where: MappedFile | str, holder: procfs.Holder) -> bool:
        """Put a file off, or once more; True where it is new."""
        known = self._files.get(key)
        if known is None:
            self.count += 1
            if len(self._files) >= MAX_FILES:
                return True  # counted, and found again when somebody maps it
            known = self._files[key] = _Waiting(where, 0, FIRST_S / 2, 0.0)
        is_new = known.due_s == 0.0
        known.holder_pid = holder.pid
        known.gap_s = min(2 * known.gap_s, MOST_S)
        known.due_s = time.monotonic() + known.gap_s
        return is_new

    def mapped(self, file: MappedFile) -> None:
        """One more process maps it: a way to it while that one lives."""
        known = self._files[file.key]
        if isinstance(known.where, MappedFile):
            known.where = file

    def due(self) -> Iterator[tuple[FileKey, MappedFile | str]]:
        """Files to be tried now. One that is not put off again then waits no longer."""
        now_s = time.monotonic()
        for key, waiting in list(self._files.items()):
            if now_s >= waiting.due_s or not Path(f"/proc/{waiting.holder_pid}").exists():
                before_s = waiting.due_s
                yield key, waiting.where
                if waiting.due_s == before_s:
                    self.done(key)

    def done(self, key: FileKey) -> None:
        """It waits no longer."""
        self._files.pop(key, None)
