# SPDX-License-Identifier: Apache-2.0
"""Bodies of reports until they are verified: files that are appended to, synced, and unlinked.

A body lives for about a second. In a database each would be written twice (log and table), hashed
and read back; here it is written once, in one call for a whole group, straight from where it was
received. Which bodies exist is the database's to say: a body counts once its row is committed, and
what lies in a file without one is left over from a crash and goes with its file.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from sonde.errors import SinkError
from sonde.fleet.party_files import STATE_FLAGS
from sonde.private_files import is_ours

SEGMENT_BYTES = 64 << 20
_TOGETHER = 512  # below the kernel's limit of pieces in one write


class Place(NamedTuple):
    """Where a body lies."""

    segment: int
    offset: int
    size: int


class Spool:
    """Threads may share it.

    Nothing is touched before `own`: others (`sonde fleet budget`) may look at a state in use.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._held: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._owned: int | None = None
        self._file: int | None = None
        self._segment = self._size = 0

    def own(self, held: Callable[[], Iterable[int]]) -> None:
        """Takes the directory for this process and clears away what a crash has left. Raises
        SinkError, also where another process has it.

        `held` tells the segment of every body that is still waited for. It is asked when no one
        else can add to them any more: before, the last owner may be about to.
        """
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            self._owned = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | STATE_FLAGS)
            if not is_ours(self._owned):
                raise OSError("others could change what is in it")
            fcntl.flock(self._owned, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._held = Counter(held())
            old = [int(path.stem) for path in self._directory.glob("*.reports")]
            for segment in set(old) - set(self._held):
                self._path(segment).unlink()
        except BlockingIOError as error:
            raise SinkError(f"another process uses {self._directory}", "stop it first") from error
        except (OSError, ValueError) as error:
            raise SinkError(f"cannot use {self._directory}: {error}") from error
        self._segment = max([0, *old])  # never appended to again: its end may be torn

    def close(self) -> None:
        for file in (self._file, self._owned):
            if file is not None:
                os.close(file)
        self._file = self._owned = None

    def append(self, bodies: Sequence[bytes | memoryview]) -> list[Place]:
        """Writes bodies and syncs them. Raises SinkError; then none of them is held."""
        with self._lock:
            try:
                file = self._open()
                places, at = [], self._size
                for body in bodies:
                    places.append(Place(self._segment, at, len(body)))
                    at += len(body)
                for first in range(0, len(bodies), _TOGETHER):
                    _write(file, bodies[first : first + _TOGETHER], places[first].offset)
                os.fdatasync(file)
            except OSError as error:
                raise SinkError(f"cannot keep reports in {self._directory}: {error}") from error
            self._size = at
            self._held[self._segment] += len(bodies)
            return places

    def read(self, place: Place) -> bytes:
        file = os.open(self._path(place.segment), os.O_RDONLY | STATE_FLAGS)
        try:
            return os.pread(file, place.size, place.offset)
        finally:
            os.close(file)

    def drop(self, segments: Counter[int]) -> None:
        """So many bodies of each segment are done with; a segment without any goes."""
        with self._lock:
            self._held.subtract(segments)
            for segment in segments:
                if self._held[segment] <= 0 and segment != self._segment:
                    del self._held[segment]
                    self._path(segment).unlink(missing_ok=True)

    def _open(self) -> int:
        """The segment to append to; a new one when the last is full."""
        if self._file is not None and self._size >= SEGMENT_BYTES:
            os.close(self._file)
            self._file = None
            if self._held[self._segment] <= 0:
                del self._held[self._segment]
                self._path(self._segment).unlink(missing_ok=True)
        if self._file is None:
            path = self._path(self._segment + 1)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._segment, self._size = self._segment + 1, 0
            if self._owned is not None:
                os.fsync(self._owned)  # or the file's name may be lost with the power
        return self._file

    def _path(self, segment: int) -> Path:
        return self._directory / f"{segment:08}.reports"


def _write(file: int, bodies: Sequence[bytes | memoryview], offset: int) -> None:
    """All of it, also where the kernel takes only a part at a time."""
    left = [memoryview(body) for body in bodies]
    while left:
        written = os.pwritev(file, left, offset)
        offset += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left and written:
            left[0] = left[0][written:]
