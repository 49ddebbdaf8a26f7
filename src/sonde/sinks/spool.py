# SPDX-License-Identifier: Apache-2.0
"""Chunks on disk that a server has not acknowledged yet, oldest first, within a bound.

```
DIR/lock                    held (flock) while an agent uses the spool
DIR/0000000000000042.chunk  one chunk each, numbered in order; an empty spool begins with 1
DIR/N.draft, dropped.draft  being written; removed at the next start
DIR/dropped                 how many chunks were dropped since the spool was made
```

A chunk is in the page cache when `add` returns, so it survives a kill of the agent. Files are
synced only after a failed request and at the end (`sync`): chunks that are acknowledged at once
cost no disk write. Where the bound is reached, or the disk is full, the oldest chunks are dropped
and counted; a single chunk beyond the bound is kept.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sonde import private_files
from sonde.errors import SinkError, UsageError

SPOOL_BYTES = 256 << 20
"""Default bound of all chunks."""
SPOOL_CHUNKS = 20_000
"""The most chunks: bounds the files in the folder."""
_SUFFIX, _DRAFT = ".chunk", ".draft"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class SpooledChunk:
    """A chunk and its number in the spool."""

    number: int
    content: bytes


class Spool:
    """The spool of one agent. Not thread-safe."""

    def __init__(self, path: Path, most_bytes: int = SPOOL_BYTES) -> None:
        """Open the spool, or make it. Raises SinkError; UsageError where another agent uses it, or
        where other users could change it."""
        self.path = path
        self.most_bytes = most_bytes
        """Bound of all chunks. May be changed; the next `add` drops what exceeds it."""
        with private_files.secret_folder(path, "chunks") as folder, _reported(path):
            self._fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder.fd)
        with contextlib.ExitStack() as opened:
            opened.callback(os.close, self._fd)
            self._lock_fd = self._locked()
            opened.callback(os.close, self._lock_fd)
            self._sizes, self.dropped = self._read()
            opened.pop_all()
        self._next = next(reversed(self._sizes), 0) + 1
        self._unsynced: set[int] = set()
        """Numbers of chunks that may not survive a power loss."""
        self._unwritten: set[int] = set()
        """Those of them whose sync failed."""
        self.size_bytes = sum(self._sizes.values())

    def __len__(self) -> int:
        """How many chunks wait."""
        return len(self._sizes)

    def close(self) -> None:
        """Release the spool; its chunks stay on disk."""
        if self._fd >= 0:
            os.close(self._lock_fd)
            os.close(self._fd)
            self._fd = -1

    def add(self, chunk: bytes) -> None:
        """Append a chunk, dropping the oldest where it does not fit. Raises SinkError."""
        while self._sizes and (
            self.size_bytes + len(chunk) > self.most_bytes or len(self._sizes) >= SPOOL_CHUNKS
        ):
            self._drop_oldest()
        while True:
            try:
                self._write(chunk)
            except OSError as error:
                if error.errno not in _FULL or not self._sizes:
                    raise SinkError(
                        f"cannot write to the spool {self.path}: {error.strerror}",
                        "free some space; chunks are sent from memory meanwhile",
                    ) from error
                self._drop_oldest()
            else:
                return

    def oldest(self, most_bytes: int, most_chunks: int) -> list[SpooledChunk]:
        """The oldest chunks within both bounds, at least one if there is any. One that cannot be
        read is dropped and counted."""
        found: list[SpooledChunk] = []
        size = 0
        for number, size_bytes in list(self._sizes.items()):
            if found and (size + size_bytes > most_bytes or len(found) >= most_chunks):
                break
            try:
                content = self._content(number, size_bytes)
            except OSError:
                self._drop(number)
                continue
            size += size_bytes
            found.append(SpooledChunk(number, content))
        return found

    def remove(self, number: int) -> None:
        """Remove a chunk that was acknowledged, or that no server takes."""
        self.size_bytes -= self._sizes.pop(number, 0)
        self._unsynced.discard(number)
        self._unwritten.discard(number)
        with contextlib.suppress(OSError):
            os.unlink(_name(number), dir_fd=self._fd)

    def sync(self) -> None:
        """Make all chunks survive a power loss, as far as the disk obeys a flush.

        A chunk whose sync fails is written again by the next call: the kernel marks pages that it
        could not write as clean, so a second fdatasync() would succeed without writing them.
        """
        if not self._unsynced:
            return
        self._unwritten = {number for number in sorted(self._unsynced) if not self._synced(number)}
        with contextlib.suppress(OSError):
            os.fsync(self._fd)
            self._unsynced &= self._unwritten

    def _synced(self, number: int) -> bool:
        try:
            if number in self._unwritten:
                content = self._content(number, self._sizes[number])
                self._replace(_name(number), _draft(number), content)
            fd = self._opened(number)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)
        except OSError:
            return False
        return True

    def _locked(self) -> int:
        with _reported(self.path):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open("lock", flags, private_files.MODE, dir_fd=self._fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise UsageError(
                f"another agent uses the spool {self.path}",
                "give this one another --spool; or `sonde up` another --state",
            ) from error
        except OSError as error:
            os.close(fd)
            raise SinkError(
                f"cannot lock the spool {self.path}: {error.strerror}",
                "give another directory with --spool, on a file system with locks",
            ) from error
        return fd

    def _read(self) -> tuple[OrderedDict[int, int], int]:
        """(sizes by number, oldest first; how many were dropped before)."""
        sizes: dict[int, int] = {}
        with _reported(self.path):
            for name in os.listdir(self._fd):  # noqa: PTH208 (a descriptor)
                stem, suffix = os.path.splitext(name)  # noqa: PTH122
                if suffix == _DRAFT:
                    os.unlink(name, dir_fd=self._fd)
                elif stem.isascii() and stem.isdigit() and name == _name(int(stem)):
                    found = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
                    sizes[int(stem)] = found.st_size
        dropped = 0
        with contextlib.suppress(OSError, ValueError):
            fd = os.open("dropped", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
            try:
                dropped = int(os.read(fd, 32))
            finally:
                os.close(fd)
        return OrderedDict(sorted(sizes.items())), dropped

    def _write(self, chunk: bytes) -> None:
        self._replace(_name(self._next), _draft(self._next), chunk)
        self._sizes[self._next] = len(chunk)
        self._unsynced.add(self._next)
        self.size_bytes += len(chunk)
        self._next += 1

    def _opened(self, number: int) -> int:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(_name(number), flags, dir_fd=self._fd)

    def _content(self, number: int, size_bytes: int) -> bytes:
        fd = self._opened(number)
        with os.fdopen(fd, "rb") as file:
            return file.read(size_bytes)

    def _drop_oldest(self) -> None:
        self._drop(next(iter(self._sizes)))

    def _drop(self, number: int) -> None:
        self.remove(number)
        self.dropped += 1
        with contextlib.suppress(OSError):
            self._replace("dropped", f"dropped{_DRAFT}", b"%d\n" % self.dropped)

    def _replace(self, name: str, draft: str, content: bytes) -> None:
        """Write a file whole or not at all (draft and rename). Raises OSError, and leaves no draft
        then."""
        fd = os.open(draft, _NEW, private_files.MODE, dir_fd=self._fd)
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(fd, view) :]
            os.rename(draft, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(draft, dir_fd=self._fd)
            raise
        finally:
            os.close(fd)


def _name(number: int) -> str:
    return f"{number:016d}{_SUFFIX}"


def _draft(number: int) -> str:
    return f"{number:016d}{_DRAFT}"


@contextlib.contextmanager
def _reported(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SinkError(
            f"cannot use the spool {path}: {error.strerror}", "give another directory with --spool"
        ) from error
