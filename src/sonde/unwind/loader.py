# SPDX-License-Identifier: Apache-2.0
"""Tells the kernel how to walk the stacks of processes, as they come, change and go.

A process is told when a walk met it for the first time: until then its stacks are walked by frame
pointers, and so are those of its files whose table is still being made.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from sonde import _native, procfs
from sonde._native import CommEvent, ForkEvent, MmapEvent, ProcessEvent
from sonde.resolve import Resolver
from sonde.resolve.binaries import Binary
from sonde.resolve.live import LiveProcess
from sonde.resolve.mappings import Mapping
from sonde.resolve.recent import Recent
from sonde.unwind import foreseen
from sonde.unwind.cpython import Interpreter, UnsupportedPythonError, interpreter
from sonde.unwind.ends import ENDS
from sonde.unwind.tables import TableCache, key_of

UPDATE_S: Final = 0.025
"""After so long an update goes on the next time, so that the agent is not held up."""
READY_GAP_S: Final = 0.2
"""While tables are being made, tell a process what is ready this often."""
ROOM_AGAIN_S: Final = 1.5
"""After making room, until what was given back can be used."""
ROOM_LATER_S: Final = 60.0
"""A process that never finds room is tried again no less often than this."""
TELL_GAP_S: Final = 0.25
"""Between two times that a process is told because walks ask for it."""
PAGING_S: Final = 0.3
"""After a walk asked for a page of a table, more are expected for so long: of its callers."""
PAGING_LONGEST_S: Final = 3.0
"""Pages that are asked for all the time are waited for closely for this long at a time."""
MAX_PYTHONS: Final = 8192
"""Processes, ended ones too, whose Python is remembered."""
_PT_LOAD: Final = 1
_PF_X: Final = 1
_SKIPPED: Final = ("[uprobes]", "[vsyscall]")


@dataclass(slots=True)
class _File:
    """One file with code, as the kernel knows it."""

    key: str
    """By which its table is asked for."""
    table: int = 0
    """Number of its table in the kernel; 0: not there."""
    is_settled: bool = False
    """Its table is there, or there will be none."""
    was_rebuilt: bool = False
    """A table of its that was no good was made once more."""
    loads: tuple[tuple[int, int, int], ...] = ()
    """(file offset, address as linked, size) of the code that it has loaded."""
    python: Interpreter | None = None
    users: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Told:
    """A process that the kernel knows how to walk."""

    process: LiveProcess
    at_s: float
    files: set[int] = field(default_factory=set)
    python: Interpreter | None = None


class Unwinder:
    """Keeps the kernel's maps of tables and processes."""

    def __init__(
        self, owner: _native.Bpf, resolver: Resolver, cache: TableCache | None = None
    ) -> None:
        self._maps = _native.UnwindMaps(owner)
        self._resolver = resolver
        self._cache = cache or TableCache()
        self._files: dict[int, _File] = {}
        """By the index of their content (resolve.binaries)."""
        self._waiting: dict[str, set[int]] = {}
        """Processes that wait for a table, by the key of its file."""
        self._told: dict[int, _Told] = {}
        self._stale: set[int] = set()
        self._expected: set[int] = set()
        self._ready: set[int] = set()
        """Processes with a table that was finished since they were told."""
        self._told_s = 0.0
        self._put_off: dict[int, _PutOff] = {}
        """Processes for whose tables there was no room."""
        self._room_s = 0.0
        self._pages = 0
        """Loaded so far because walks asked for them."""
        self._paging_s = 0.0
        """Until when more are expected soon."""
        self._paging_since_s = 0.0
        self._walks: dict[int, int] = {}
        self._pythons: Recent[tuple[int, int], Interpreter] = Recent(MAX_PYTHONS)
        self.refused_python = 0
        """Files with a CPython that is not supported."""
        self.left_out = 0
        """Times that the kernel had no room for a table or a process."""
        self.refused: Counter[str] = Counter()
        """Times that a process could not be prepared for another reason, by its error."""

    def expect(self, pids: Iterable[int]) -> None:
        """Tell these processes and their children without waiting for a walk to meet them."""
        self._expected |= {pid for pid in pids if procfs.read_stat(pid) is not None}
        self._stale |= self._expected
        if self._expected:
            self._cache.warm_up()
        self.update()

    def foresee(self, program: str) -> None:
        """Have the tables made of a program that is about to be run, and of its loader and libc."""
        for path in foreseen.files(program):
            fd = procfs.open_regular(path, follow=True)
            if fd is None:
                continue
            with suppress(OSError):
                try:
                    binary = Binary(path.rpartition("/")[2])
                    binary.take(fd)
                    key = _key_of(binary)
                    if binary.is_elf and self._cache.find(key) is None:
                        self._cache.request(key, fd)
                finally:
                    os.close(fd)

    @property
    def is_busy(self) -> bool:
        """Whether something will be ready soon: ask again in a few milliseconds."""
        return self._cache.is_busy or bool(self._stale or self._ready)

    @property
    def is_paging(self) -> bool:
        """Whether walks are about to ask for more pages of tables, each one cut until it is there:
        `update` again in a few milliseconds."""
        return time.monotonic() < self._paging_s

    def expect_pages(self) -> None:
        """Walks begin."""
        self._pages_come(time.monotonic())

    def _pages_come(self, now_s: float) -> None:
        if now_s > self._paging_s + PAGING_LONGEST_S:
            self._paging_since_s = now_s
        self._paging_s = min(now_s + PAGING_S, self._paging_since_s + PAGING_LONGEST_S)

    def on_process_events(self, events: Iterable[ProcessEvent]) -> None:
        """Take in what processes did."""
        told, expected = self._told, self._expected
        for event in events:
            pid = event.pid
            if isinstance(event, MmapEvent):
                if pid in told or pid in expected:
                    self._stale.add(pid)
            elif isinstance(event, ForkEvent):
                if event.parent_pid in expected:
                    expected.add(pid)
            elif pid not in told and pid not in expected:
                continue
            elif isinstance(event, CommEvent):
                if event.is_exec:
                    self._forget(pid)
            elif event.tid == pid:
                expected.discard(pid)
                self._forget(pid)

    def update(self) -> bool:
        """Tell the kernel what is new. Cheap where nothing is; call it often. Returns whether a
        process was met for the first time, or walks came to code that they were never in."""
        known = len(self._told), self._pages
        for key in self._cache.poll():
            self._ready |= self._waiting.pop(key, set())
        if short := self._maps.load_pages():
            self.left_out += short
            self._make_room(0, set())
        now_s = time.monotonic()
        if (pages := self._maps.usage()[4]) != self._pages:
            self._pages = pages
            self._pages_come(now_s)
        if self._ready and (not self._cache.is_busy or now_s > self._told_s + READY_GAP_S):
            # All its mappings are told again: not for each one of its files.
            self._told_s = now_s
            self._stale |= self._ready
            self._ready = set()
        self._stale |= {pid for pid in self._maps.wanted() if self._is_due(pid, now_s)}
        for pid, put_off in self._put_off.items():
            if now_s > put_off.until_s:
                self._stale.add(pid)
        # Chosen ones first; the others when there is time: events wait to be read meanwhile.
        for pid in sorted(self._stale, key=lambda pid: pid not in self._expected):
            if time.monotonic() > now_s + UPDATE_S:
                break
            self._stale.discard(pid)
            try:
                has_room = self._tell(pid)
            except OSError as error:  # it costs this process its stacks, nobody else
                self.refused[errno.errorcode.get(error.errno or 0, "unknown")] += 1
                self._put(pid, now_s)
                continue
            if has_room:
                self._put_off.pop(pid, None)
            else:
                self.left_out += 1
                self._put(pid, now_s)
        return (len(self._told), self._pages) != known

    def resync(self) -> None:
        """Events were lost: tell all processes again."""
        self._stale |= self._told.keys()

    def _is_due(self, pid: int, now_s: float) -> bool:
        """Whether to tell a process that a walk asked for; it asks again while it is not."""
        told = self._told.get(pid)
        return told is None or now_s > told.at_s + TELL_GAP_S

    def python_of(self, key: tuple[int, int]) -> Interpreter | None:
        """The Python that a process runs or ran last, None where it runs none that is walked."""
        return self._pythons.get(key)

    def stops(self) -> dict[str, int]:
        """How walks ended so far, by name (unwind.ends)."""
        counts = zip(ENDS, self._maps.stops(), strict=True)
        return {end.name: count for end, count in counts if count}

    def losses(self) -> dict[str, int]:
        """Times so far that a process got no tables, by cause: no room, or an error."""
        found = {"no_room": self.left_out} if self.left_out else {}
        return found | {f"{name.lower()}.refused": n for name, n in self.refused.items()}

    def limit(self, bytes_: int) -> None:
        """Hold at most so many bytes of tables and mappings in the kernel."""
        self._maps.limit(bytes_)

    def usage(self) -> dict[str, int]:
        """What is held now, by name, for metrics."""
        size, free, tables, processes, pages = self._maps.usage()
        return {
            "table_bytes": size,
            "table_bytes_free": free,
            "tables": tables,
            "processes": processes,
            "pages_loaded": pages,
            "tables_built": self._cache.built,
            "tables_failed": self._cache.failed,
            "put_off": len(self._put_off),
            "left_out": self.left_out,
            "python_refused": self.refused_python,
        }

    def memory_bytes(self) -> int:
        """Kernel memory of the tables and mappings told."""
        return self._maps.usage()[0]

    def close(self) -> None:
        """End what runs beside us."""
        self._cache.close()

    def _put(self, pid: int, now_s: float) -> None:
        """Try a process again later, and later each time."""
        wait_s = ROOM_AGAIN_S
        if before := self._put_off.get(pid):
            wait_s = min(2 * before.wait_s, ROOM_LATER_S)
        self._put_off[pid] = _PutOff(now_s + wait_s, wait_s)

    def _tell(self, pid: int) -> bool:
        """Tell a process, or that it is gone. Returns whether there was room for all of it."""
        found = procfs.read_stat(pid)
        if found is None:
            self._forget(pid)
            return True
        if not found.start_code:  # a kernel thread, or on its way out
            return True
        process = self._resolver.processes.find(pid, found.start_ns)
        told = _Told(process, time.monotonic())
        ranges = []
        kernel_python = None
        has_room = True
        mappings = process.space().mappings
        is_musl = any("/ld-musl-" in mapping.path for mapping in mappings)
        for mapping in mappings:
            if "x" not in mapping.prot or mapping.path in _SKIPPED:
                continue
            try:
                file, index = self._file_of(process, mapping)
            except _NoRoomError:
                self._make_room(pid, told.files)
                has_room, file = False, None
            bias = _bias(mapping, file) if file is not None else None
            if file is None or bias is None:
                ranges.append((mapping.start, mapping.end, 0, 0))
                continue
            if not file.is_settled:
                self._waiting.setdefault(file.key, set()).add(pid)
            told.files.add(index)
            ranges.append((mapping.start, mapping.end, bias % 2**64, file.table))
            if file.python is not None:
                told.python = file.python
                kernel_python = file.python.for_kernel(bias, is_musl)
        try:
            self._maps.set_process(pid, found.start_code, ranges, kernel_python)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.E2BIG, errno.ENOMEM):
                raise
            self._make_room(pid, told.files)
            return False
        before = self._told.get(pid)
        if before is not None:
            self._leave(pid, before.files - told.files)
        for index in told.files:
            self._files[index].users.add(pid)
        self._told[pid] = told
        if told.python is not None:
            self._pythons.put(process.key, told.python)
        return has_room

    def _forget(self, pid: int) -> None:
        self._put_off.pop(pid, None)
        self._maps.drop_process(pid)
        told = self._told.pop(pid, None)
        if told is not None:
            self._leave(pid, told.files)

    def _leave(self, pid: int, files: Iterable[int]) -> None:
        for index in files:
            self._files[index].users.discard(pid)

    def _file_of(self, process: LiveProcess, mapping: Mapping) -> tuple[_File | None, int]:
        """The file behind a mapping with its table, as far as that is there; None without one."""
        known = mapping.binary
        if known is not None and (file := self._files.get(known.index)) and file.is_settled:
            return file, known.index
        binary = self._resolver.file_of(process, mapping)
        if binary is None:
            return None, 0
        found = self._files.get(binary.index)
        if found is None:
            found = self._files[binary.index] = _File(_key_of(binary), loads=_loads(binary.fd))
        if not found.is_settled:
            self._settle(found, binary)
        return found, binary.index

    def _settle(self, file: _File, binary: Binary) -> None:
        built = self._cache.find(file.key)
        if built is None:
            file.is_settled = self._cache.has_failed(file.key)
            if not file.is_settled:
                self._cache.request(file.key, binary.fd)
            return
        try:
            file.table = self._maps.add_table(str(built.path))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise _NoRoomError from error
            if file.was_rebuilt:
                self._cache.refuse(file.key)
                file.is_settled = True
                return
            file.was_rebuilt = True
            self._cache.forget(file.key)  # damaged, or of another version
            self._cache.request(file.key, binary.fd)
            return
        file.is_settled = True
        if built.python is not None:
            try:
                file.python = interpreter(built.python, binary.name)
            except UnsupportedPythonError:
                self.refused_python += 1

    def _make_room(self, pid: int, files: set[int]) -> None:
        """Let go of the processes that were walked least of late, and of tables nobody uses.

        What is given back can be used again a second later. `pid` and `files`: the process that is
        being told, and what its mappings name already: they stay.
        """
        now_s = time.monotonic()
        if now_s < self._room_s:
            return
        self._room_s = now_s + ROOM_AGAIN_S
        walks = self._maps.walks()
        walks.pop(pid, None)
        by_use = sorted(walks, key=lambda pid: walks[pid] - self._walks.get(pid, 0))
        self._walks = walks
        for other in by_use[: len(by_use) // 4 + 1]:
            self._forget(other)
        unused = [(i, it) for i, it in self._files.items() if it.table and not it.users]
        for index, file in unused:
            if index not in files:
                self._maps.drop_table(file.table)
                del self._files[index]


class _NoRoomError(Exception):
    """The kernel's maps are full."""


@dataclass(frozen=True, slots=True)
class _PutOff:
    """When a process for which there was no room is tried again."""

    until_s: float
    wait_s: float


def _key_of(binary: Binary) -> str:
    return key_of(binary.build_id, binary.identity)


def _loads(fd: int) -> tuple[tuple[int, int, int], ...]:
    """The program headers of a 64-bit ELF file that say what is loaded where."""
    try:
        header = os.pread(fd, 64, 0)
        at, size, count = (
            struct.unpack_from(layout, header, offset)[0]
            for layout, offset in (("<Q", 32), ("<H", 54), ("<H", 56))
        )
        raw = os.pread(fd, size * min(count, 256), at)
        found = []
        for offset in range(0, len(raw) - 55, size or 56):
            kind, flags, position, address, _, length = struct.unpack_from("<IIQQQQ", raw, offset)
            if kind == _PT_LOAD and flags & _PF_X:
                found.append((position, address, length))
    except (OSError, struct.error):
        return ()
    return tuple(found)


def _bias(mapping: Mapping, file: _File) -> int | None:
    """What the addresses of a mapping are above those as linked."""
    end = mapping.offset + mapping.end - mapping.start
    for position, address, length in file.loads:
        if position < end and mapping.offset < position + length:
            return mapping.start - (address + mapping.offset - position)
    return None
