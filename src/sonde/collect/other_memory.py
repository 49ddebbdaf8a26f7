# SPDX-License-Identifier: Apache-2.0
"""Brings memory of a process to the program that walks its threads (bpf/other_memory.h).

A program that reads another process's memory itself waits for pages of a FUSE file, or of memory
with a separate handler (userfaultfd), for as long as their owner likes. Nothing ends it
meanwhile, and no other program of the machine can be removed. So it asks for the pages that it
lacks, they are read by process_vm_readv(2), which SIGKILL does end, and it walks again.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections import defaultdict
from typing import Final

from sonde import _native, procfs

PAGE: Final = 4096
TAIL: Final = 16
"""Of the page behind, as far as it can be read."""
MAX_PAGES: Final = 4096
"""Kept at a time: room of the map `other_pages`."""
MAX_PAGES_OF_THREAD: Final = 256
"""Beyond, its memory counts as unreadable."""
STILL_ROUNDS: Final = 16
"""After this many, pages count that were read before their thread ran again: some never rest."""
MAX_ROUNDS: Final = 4096

_KEY: Final = struct.Struct("=IIQ")
_STATE: Final = struct.Struct("=III")
_LENGTH: Final = struct.Struct("=Q")


class _Piece(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class OtherMemory:
    """For one walk over all threads; to be used in a process that may be killed."""

    def __init__(self, bpf: _native.Bpf, pid: int) -> None:
        self._bpf = bpf
        self._pid = procfs.memory_task(pid)
        self._read = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self._read.restype = ctypes.c_ssize_t
        self._room = ctypes.create_string_buffer(PAGE + TAIL)
        self._kept: dict[int, list[bytes]] = defaultdict(list)
        """Keys of pages by thread."""

    def walk(self, link: int) -> None:
        """Walk until no thread lacks a page. Raises OSError where memory may not be read at all."""
        for number in range(MAX_ROUNDS):
            is_late = number >= STILL_ROUNDS
            self._bpf.set_array("other_state", 0, _STATE.pack(0, is_late, 0))
            self._bpf.walk(link)
            wanted = [row[:3] for row in self._bpf.entries("other_pages_wanted")]
            if not wanted:
                break
            self._bring(sorted(wanted))
        for tid in list(self._kept):
            self._forget(tid)

    def _bring(self, wanted: list[tuple[int, ...]]) -> None:
        lacking = {tid for tid, _, _ in wanted}
        for tid in self._kept.keys() - lacking:
            self._forget(tid)  # its walk is done
        for tid, switches, page in wanted:
            key = _KEY.pack(tid, switches, page)
            self._bpf.delete_hash("other_pages_wanted", key)
            if self._has_room(tid):
                is_over = len(self._kept[tid]) >= MAX_PAGES_OF_THREAD
                content = b"" if is_over else self._content(page)
                value = _LENGTH.pack(len(content)) + content.ljust(PAGE + TAIL, b"\0")
                self._bpf.set_hash("other_pages", key, value)
                self._kept[tid].append(key)

    def _has_room(self, tid: int) -> bool:
        """Room for one more page of a thread; those with higher numbers give way."""
        while sum(map(len, self._kept.values())) >= MAX_PAGES:
            last = max(self._kept)
            if last <= tid:
                return False
            self._forget(last)
        return True

    def _forget(self, tid: int) -> None:
        for key in self._kept.pop(tid):
            self._bpf.delete_hash("other_pages", key)

    def _content(self, page: int) -> bytes:
        """Of a page and what is behind it, as much as can be read."""
        at = page * PAGE
        if at + PAGE + TAIL >= 1 << 63:
            return b""
        ours = _Piece(ctypes.addressof(self._room), PAGE + TAIL)
        theirs = (_Piece * 2)(_Piece(at, PAGE), _Piece(at + PAGE, TAIL))
        arguments = ctypes.byref(ours), ctypes.c_ulong(1), theirs, ctypes.c_ulong(2)
        got = self._read(self._pid, *arguments, ctypes.c_ulong(0))
        if got < 0:
            number = ctypes.get_errno()
            if number == errno.EPERM:
                raise OSError(number, os.strerror(number))
            return b""
        return self._room.raw[:got]
