# SPDX-License-Identifier: Apache-2.0
"""A file of /proc/PID that is read in pieces: held open by the child of the broker."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import count
from typing import Final

from sonde.procfs.broker import BROKER
from sonde.procfs.lookups import whose

_numbers: Final = count(1)


class HeldFile:
    """One file of one process; where it is our own, read directly."""

    __slots__ = ("_child", "_fd", "_first", "_is_all", "_number", "_pid")

    def __init__(self, path: str, first: int = 0) -> None:
        """`first`: bytes that are read with the opening, which saves a request where the file is no
        longer.

        Raises OSError; Hung where it makes readers wait.
        """
        self._first, self._is_all = b"", False
        self._pid = whose(path)
        self._fd = -1
        self._number = self._child = 0
        if self._pid is None:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return
        self._number = next(_numbers)
        if first:
            request = ("first", self._number, path, first)
            self._first, self._is_all = BROKER.ask(self._pid, request)
        else:
            BROKER.ask(self._pid, ("begin", self._number, path))
        self._child = BROKER.generation

    def read(self, most: int) -> bytes:
        """The next `most` bytes, fewer at the end. Raises OSError."""
        if self._first or self._is_all:
            piece, self._first = self._first[:most], self._first[most:]
            return piece
        if self._pid is not None:
            content: bytes = BROKER.ask(self._pid, ("more", self._number, most))
            return content
        pieces = []
        while most > 0 and (piece := os.read(self._fd, most)):
            pieces.append(piece)
            most -= len(piece)
        return b"".join(pieces)

    def read_at(self, size: int, at: int) -> bytes:
        """What pread() returns. Raises OSError."""
        if self._pid is not None:
            request = ("at", self._number, size, at)
            # Memory: a page of it may be that of a file which its server does not bring.
            content: bytes = BROKER.ask(self._pid, request, is_deadly=True)
            return content
        return os.pread(self._fd, size, at)

    def read_many(self, parts: Sequence[tuple[int, int]]) -> list[bytes]:
        """What pread() returns for each (size, offset), b"" where it fails: one request for all.
        Raises OSError."""
        if self._pid is not None:
            request = ("many", self._number, list(parts))
            found: list[bytes] = BROKER.ask(self._pid, request, is_deadly=True)
            return found
        found = []
        for size, at in parts:
            try:
                found.append(os.pread(self._fd, size, at))
            except (OSError, OverflowError):
                found.append(b"")
        return found

    @property
    def is_held(self) -> bool:
        """Whether the child that holds it is still there, as far as is known."""
        return self._pid is None or self._child == BROKER.generation

    def close(self) -> None:
        """Close it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        elif self._pid is not None and not self._is_all:
            BROKER.notify(("end", self._number), self._child)
