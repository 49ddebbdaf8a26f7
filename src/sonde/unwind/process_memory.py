# SPDX-License-Identifier: Apache-2.0
"""The memory of one process, held open as long as its runtime is read."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Final, Protocol

from sonde import procfs

USER_END: Final = 1 << 47
"""Addresses of user space are below."""


class Memory(Protocol):
    """What can be read: `ProcessMemory`, `procfs.HeldFile`."""

    def read_at(self, size: int, at: int) -> bytes:
        """What pread() returns. Raises OSError."""


def read_exactly(memory: Memory, size: int, at: int) -> bytes:
    """`size` bytes. Raises OSError or ValueError where they are not there."""
    if not 0 < at < USER_END:
        raise ValueError("no address of user space")
    content = memory.read_at(size, at)
    if len(content) != size:
        raise ValueError("memory ends")
    return content


def read_word(memory: Memory, at: int) -> int:
    """8 bytes as a number. Raises as `read_exactly`."""
    return int.from_bytes(read_exactly(memory, 8, at), "little")


class ProcessMemory:
    """Memory of a process, opened at the first read, and again where the broker's child that held
    it was replaced."""

    def __init__(self, pid: int, start_ns: int) -> None:
        """`start_ns`: as /proc/PID/stat has it; 0 unknown."""
        self._pid = pid
        self._start_ns = start_ns
        self._file: procfs.HeldFile | None = None
        self._is_closed = False

    def read_at(self, size: int, at: int) -> bytes:
        """What pread() returns. Raises OSError, ESRCH for another process with this pid."""
        return self._opened().read_at(size, at)

    def read_many(self, parts: Sequence[tuple[int, int]]) -> list[bytes]:
        """What pread() returns for each (size, address), b"" where it fails: one request for all.
        Raises as `read_at`."""
        return self._opened().read_many(parts)

    def close(self) -> None:
        """Close it for good: reads raise OSError from now on."""
        self._is_closed = True
        self._let_go()

    def _opened(self) -> procfs.HeldFile:
        if self._is_closed:
            raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))
        if self._file is not None and not self._file.is_held:
            self._let_go()
        if self._file is None:
            self._file = procfs.HeldFile(f"/proc/{self._pid}/mem")
            # Only now: until it is open, the pid may become another process's.
            stat = procfs.read_stat(self._pid)
            if stat is None or (self._start_ns and stat.start_ns != self._start_ns):
                self._let_go()
                self._is_closed = stat is not None  # without it: gone, or left alone for a while
                raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))
        return self._file

    def _let_go(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
