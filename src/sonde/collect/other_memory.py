# SPDX-License-Identifier: Apache-2.0
"""Gives memory of a process to the BPF program that walks its threads (bpf/other_memory.h).

A BPF program that reads another process's memory itself waits for pages of a FUSE file, or of
memory with a page fault handler in user space (userfaultfd), for as long as their owner likes.
Nothing ends it meanwhile, and no other BPF program of the machine can be removed. So it lists the
pages that it lacks, they are read by process_vm_readv(2), which SIGKILL does end, and it walks
again.
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
"""Bytes of the next page that are kept with a page, so that one read may cross its end."""
MAX_PAGES: Final = 4096
"""Kept at a time: room of the map `other_pages`."""
MAX_PAGES_OF_THREAD: Final = 256
"""Beyond, its memory counts as unreadable."""
STILL_SCANS: Final = 16
"""For this many scans pages count only while their thread stands still, until it runs again; then
longer, as some threads run all the time."""
MAX_SCANS: Final = 4096
"""Of all threads; what lacks a page after the last one stays without a stack."""

_KEY: Final = struct.Struct("=IIQ")
"""struct other_page_key: tid, switches, page."""
_STATE: Final = struct.Struct("=III")
"""struct other_state: misses, any_time, is_full."""
_LENGTH: Final = struct.Struct("=Q")
"""Of the content of a page, with which struct other_page begins."""


class _Iovec(ctypes.Structure):
    """struct iovec of process_vm_readv(2)."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class OtherMemory:
    """The pages for walks of all threads; to be used in a process that may be killed."""

    def __init__(self, bpf: _native.Bpf, pid: int) -> None:
        self._bpf = bpf
        self._pid = procfs.memory_task(pid)
        self._read = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self._read.restype = ctypes.c_ssize_t
        self._room = ctypes.create_string_buffer(PAGE + TAIL)
        self._kept: dict[int, list[bytes]] = defaultdict(list)
        """Keys of pages by thread."""

    def walk(self, link: int) -> None:
        """Scan the threads, which walks their stacks, again and again until none lacks a page;
        `link`: of the iterator. Raises OSError where memory may not be read at all."""
        for number in range(MAX_SCANS):
            any_time = number >= STILL_SCANS
            self._bpf.set_array("other_state", 0, _STATE.pack(0, any_time, 0))
            self._bpf.walk(link)
            wanted = [row[:3] for row in self._bpf.entries("other_pages_wanted")]
            if not wanted:
                break
            self._provide(sorted(wanted))
        for tid in list(self._kept):
            self._forget(tid)

    def _provide(self, wanted: list[tuple[int, ...]]) -> None:
        """Read pages and put them into the map; `wanted`: (tid, context switches so far, page)."""
        lacking = {tid for tid, _, _ in wanted}
        for tid in self._kept.keys() - lacking:
            self._forget(tid)  # its stack is walked
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
        """Whether there is room for one more page of a thread; pages of threads with higher numbers
        are dropped for it."""
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
        """As much of a page and the TAIL behind it as can be read."""
        at = page * PAGE
        if at + PAGE + TAIL >= 1 << 63:
            return b""
        ours = _Iovec(ctypes.addressof(self._room), PAGE + TAIL)
        theirs = (_Iovec * 2)(_Iovec(at, PAGE), _Iovec(at + PAGE, TAIL))
        arguments = ctypes.byref(ours), ctypes.c_ulong(1), theirs, ctypes.c_ulong(2)
        got = self._read(self._pid, *arguments, ctypes.c_ulong(0))
        if got < 0:
            number = ctypes.get_errno()
            if number == errno.EPERM:
                raise OSError(number, os.strerror(number))
            return b""
        return self._room.raw[:got]
