# SPDX-License-Identifier: Apache-2.0
"""Report bodies until they are verified: append-only files that are synced and later unlinked.

A body is needed for about a second. In a database it would be written twice (log and table), hashed
and read back; here it is written once, with one call per group, from the buffer that received it.
The database decides which bodies exist: a body counts once its row is committed. A body without a
row is left over from a crash and is deleted with its file.
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
from sonde.fleet.party_files import STATE_OPEN_FLAGS
from sonde.private_files import is_ours

SEGMENT_BYTES = 64 << 20
"""A file of bodies (a segment) that has reached this size gets no further ones."""
_MAX_PIECES = 512  # bodies in one pwritev; Linux allows 1,024 (IOV_MAX)


class Extent(NamedTuple):
    """Where a body is stored: number of its segment; offset and size in bytes."""

    segment: int
    offset: int
    size: int


class ReportSpool:
    """The body files of one state. Thread-safe.

    Nothing is written before `take_ownership`: other processes (`sonde fleet budget`) may read a
    state in use.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._held: Counter[int] = Counter()  # bodies that still wait, per segment
        self._lock = threading.Lock()
        self._directory_fd: int | None = None
        self._file: int | None = None  # the segment that is appended to: descriptor, number, size
        self._segment = self._size = 0

    def take_ownership(self, held: Callable[[], Iterable[int]]) -> None:
        """Locks the directory for this process and removes what a crash left. Raises SinkError,
        also if another process holds it.

        `held` returns the segment of each body that still waits. It is called under the lock,
        because before that the previous owner may still add bodies.
        """
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            self._directory_fd = os.open(
                self._directory, os.O_RDONLY | os.O_DIRECTORY | STATE_OPEN_FLAGS
            )
            if not is_ours(self._directory_fd):
                raise OSError("others could change what is in it")
            fcntl.flock(self._directory_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._held = Counter(held())
            old = [int(path.stem) for path in self._directory.glob("*.reports")]
            for segment in set(old) - set(self._held):
                self._path(segment).unlink()
        except BlockingIOError as error:
            raise SinkError(f"another process uses {self._directory}", "stop it first") from error
        except (OSError, ValueError) as error:
            raise SinkError(f"cannot use {self._directory}: {error}") from error
        self._segment = max([0, *old])  # never appended to again: its end may be incomplete

    def close(self) -> None:
        for file in (self._file, self._directory_fd):
            if file is not None:
                os.close(file)
        self._file = self._directory_fd = None

    def append(self, bodies: Sequence[bytes | memoryview]) -> list[Extent]:
        """Writes and syncs bodies. Raises SinkError; none of them is then stored."""
        with self._lock:
            try:
                file = self._open()
                extents, at = [], self._size
                for body in bodies:
                    extents.append(Extent(self._segment, at, len(body)))
                    at += len(body)
                for first in range(0, len(bodies), _MAX_PIECES):
                    _write(file, bodies[first : first + _MAX_PIECES], extents[first].offset)
                os.fdatasync(file)
            except OSError as error:
                raise SinkError(f"cannot keep reports in {self._directory}: {error}") from error
            self._size = at
            self._held[self._segment] += len(bodies)
            return extents

    def read(self, extent: Extent) -> bytes:
        """A body; shorter if its file ends before. Raises OSError."""
        file = os.open(self._path(extent.segment), os.O_RDONLY | STATE_OPEN_FLAGS)
        try:
            return os.pread(file, extent.size, extent.offset)
        finally:
            os.close(file)

    def drop(self, segments: Counter[int]) -> None:
        """Removes this number of bodies from each segment; an empty segment is deleted."""
        with self._lock:
            self._held.subtract(segments)
            for segment in segments:
                if self._held[segment] <= 0 and segment != self._segment:
                    del self._held[segment]
                    self._path(segment).unlink(missing_ok=True)

    def _open(self) -> int:
        """The descriptor of the segment to append to; a new one if the last is full."""
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
            if self._directory_fd is not None:
                os.fsync(self._directory_fd)  # the file's name must survive a power failure
        return self._file

    def _path(self, segment: int) -> Path:
        return self._directory / f"{segment:08}.reports"


def _write(file: int, bodies: Sequence[bytes | memoryview], offset: int) -> None:
    """Writes all bodies, also if the kernel accepts only a part at a time."""
    left = [memoryview(body) for body in bodies]
    while left:
        written = os.pwritev(file, left, offset)
        offset += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left and written:
            left[0] = left[0][written:]
