# SPDX-License-Identifier: Apache-2.0
"""The files that frames lie in: found again when deleted or in another mount namespace.

A file is known by device and inode for as long as it is held open here: an inode in use is not
given to another file. Once closed, it is compared (size, time of change) when it is opened again.

What one process leads to serves every process that maps the same file, so it is kept by the device
and inode of the file that was opened, never by those that were looked for. On btrfs and, before
Linux 6.18, on overlayfs mappings may show those of another file: a file there is opened for each
process, and shared by the device it really has.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Final

from sonde import _native, procfs
from sonde.resolve.counters import Counters
from sonde.resolve.mappings import FileKey, Mapping
from sonde.resolve.recent import Recent
from sonde.resolve.seen_files import SeenFiles

if TYPE_CHECKING:
    from sonde.resolve.live import LiveProcess

MAX_FILES: Final = 4_096
"""Files known by device and inode."""
MAX_OPEN: Final = 96
"""Files held open."""
IDLE_NS: Final = 30_000_000_000
"""How long a file is held open after its last use, so that deleted ones are freed."""
MAX_NAME: Final = 128
"""Characters of a file name that a frame shows."""

_Identity = tuple[int, int, int, int, int]
"""Device, inode, size, times of change of the content, which anybody may set, and of the inode,
which nobody can: another file that gets the inode later is a different one."""
_ELF_MAGIC: Final = b"\x7fELF"
_indices = count(1)


class Binary:
    """One file with code in it."""

    __slots__ = (
        "build_id",
        "fd",
        "identity",
        "index",
        "is_copy",
        "is_elf",
        "key",
        "kind",
        "name",
        "owner",
        "used_ns",
    )

    def __init__(self, name: str, kind: str = "user") -> None:
        self.index = next(_indices)
        """Of the content: another one when the file changes."""
        self.name = procfs.printable(name)[:MAX_NAME]
        self.kind = kind
        """Kind of its frames: user, vdso."""
        self.build_id = ""
        self.is_elf = False
        self.key: FileKey | None = None
        """Of the file itself; None where it is known for one mapping only."""
        self.is_copy = False
        """What is open is a copy: reading the file itself could wait for somebody."""
        self.fd = -1
        """Open for reading, -1 not now."""
        self.identity: _Identity = (0, 0, 0, 0, 0)
        self.owner: LiveProcess | None = None
        """Who used it last."""
        self.used_ns = 0

    @property
    def holds_no_code(self) -> bool:
        """It was looked at and is no ELF file: code that a compiler keeps in a file of its own."""
        return self.identity[1] != 0 and not self.is_elf

    @property
    def path(self) -> str:
        """Leads to the open file."""
        return f"/proc/self/fd/{self.fd}"

    def take(self, fd: int, which: _Identity | None = None) -> None:
        """Hold it by this descriptor from now on, and learn what it is now.

        `which`: the file that it is a copy of, in memory.
        Raises OSError where it cannot be read (any more); then it is as before.
        """
        found = os.fstat(fd)
        times = found.st_mtime_ns, found.st_ctime_ns
        identity = which or (found.st_dev, found.st_ino, found.st_size, *times)
        if identity != self.identity:
            is_elf = os.pread(fd, 4, 0) == _ELF_MAGIC
            if self.identity[1]:
                self.index = next(_indices)
            self.identity, self.is_elf = identity, is_elf
            self.build_id = _native.build_id(f"/proc/self/fd/{fd}") if is_elf else ""
        self.fd, self.is_copy = fd, which is not None


class Binaries:
    """All files of all processes, as many of them open as is allowed."""

    def __init__(
        self, counters: Counters, max_open: int = MAX_OPEN, seen: SeenFiles | None = None
    ) -> None:
        """`seen` is told where each file was."""
        self._counters = counters
        self._seen = seen
        self._max_open = max_open
        self._known: Recent[FileKey, Binary] = Recent(MAX_FILES)
        self._open: dict[Binary, None] = {}
        """Those used last at the end."""
        self._vdso: Binary | None = None

    @property
    def held_open(self) -> int:
        """Descriptors in use."""
        return len(self._open)

    def of(self, process: LiveProcess, mapping: Mapping) -> Binary | None:
        """The file behind a mapping; None where there is none."""
        binary = mapping.binary
        if binary is None:
            if mapping.has_file:
                binary = self._find(process, mapping)
            elif mapping.path == "[vdso]":
                binary = self._own_vdso(mapping)
            mapping.binary = binary
        return binary

    def open(self, binary: Binary, process: LiveProcess, mapping: Mapping) -> bool:
        """Make sure that the file can be read. False where no way leads to it any more."""
        now_ns = time.monotonic_ns()
        if binary.fd < 0:
            found = self._open_mapped(process, mapping)
            if found is None:
                return False
            if found.key != binary.key:
                os.close(found.fd)
                return False
            if not self._hold(binary, found):
                return False
        elif binary in self._open:
            del self._open[binary]
            self._open[binary] = None
            if not binary.is_copy:
                try:
                    binary.take(binary.fd)
                except OSError:
                    self._counters.files_unopened += 1
                    self._release(binary)
                    return False
        binary.used_ns, binary.owner = now_ns, process
        return True

    def expire(self, now_ns: int) -> None:
        """Let go of files that nobody asked about for a while."""
        for binary in list(self._open):
            if binary.used_ns + IDLE_NS > now_ns:
                break
            owner = binary.owner
            if owner is None or not owner.is_alive or _has_name(binary.fd):
                self._release(binary)

    def close(self) -> None:
        """Let go of everything."""
        for binary in list(self._open):
            self._release(binary)
        if self._vdso is not None and self._vdso.fd >= 0:
            os.close(self._vdso.fd)
            self._vdso.fd = -1

    def _find(self, process: LiveProcess, mapping: Mapping) -> Binary:
        known = self._known.get(mapping.file)
        if known is not None and known.fd >= 0:
            return known
        found = self._open_mapped(process, mapping)
        if found is None:
            # It may be the known one or another: better no name than a wrong one.
            self._counters.files_unopened += 1
            return Binary(mapping.name)
        known = None if found.key is None else self._known.get(found.key)
        if known is not None and known.fd >= 0:
            os.close(found.fd)
            return known
        binary = known or Binary(mapping.name)
        binary.key = found.key
        if not self._hold(binary, found):
            return Binary(mapping.name)
        binary.owner, binary.used_ns = process, time.monotonic_ns()
        if found.key is not None:
            self._known.put(found.key, binary)
        if self._seen is not None and binary.build_id and not binary.is_copy:
            with suppress(OSError):
                opened_as = os.fstat(binary.fd)
                self._seen.note(binary.build_id, mapping.path, opened_as, process.pid)
        self._counters.files_evicted = self._known.evicted
        return binary

    def _hold(self, binary: Binary, found: procfs.Opened) -> bool:
        """False where it cannot be read."""
        try:
            binary.take(found.fd, found.which if found.is_copy else None)
        except OSError:
            self._counters.files_unopened += 1
            os.close(found.fd)
            return False
        self._counters.files_copied += found.is_copy
        self._counters.files_opened += 1
        while len(self._open) >= self._max_open:
            # Deleted ones cannot be opened again once their process is gone.
            still_there = (it for it in self._open if _has_name(it.fd))
            self._release(next(still_there, next(iter(self._open))))
        self._open[binary] = None
        return True

    def _release(self, binary: Binary) -> None:
        del self._open[binary]
        os.close(binary.fd)
        binary.fd, binary.owner = -1, None

    def _open_mapped(self, process: LiveProcess, mapping: Mapping) -> procfs.Opened | None:
        """The very file that is mapped, or a copy of it.

        Its mapping leads to it while the process lives, whatever became of the path; after that
        the path may, in the process's root, its parent's or ours. The mapping may show something
        else by now, and what lies at the path is others' choice.
        """
        pid, path, inode = process.pid, mapping.path, mapping.file[2]
        if process.is_alive:
            span = f"{mapping.start:x}-{mapping.end:x}"
            found = procfs.open_stable(f"/proc/{pid}/map_files/{span}")
            if found is not None:
                if found.is_strange or found.which[1] == inode:
                    return found
                os.close(found.fd)
        for root in (f"/proc/{pid}/root", f"/proc/{process.ppid}/root", ""):
            found = procfs.open_stable(root + path, inode=inode, who=pid)
            if found is not None:
                # Of the strange ones, those on a mount of the machine's own: not a user's.
                if found.key == mapping.file or (found.is_strange and not found.is_copy):
                    return found
                os.close(found.fd)
        return None

    def _own_vdso(self, mapping: Mapping) -> Binary | None:
        """The kernel maps the same image into every process of our kind: read it from our own."""
        if self._vdso is None:
            self._vdso = _dump_vdso()
        same = self._vdso is not None and self._vdso.identity[2] == mapping.end - mapping.start
        return self._vdso if same else None


def _has_name(fd: int) -> bool:
    """Whether the file can be found again, as far as can be told."""
    try:
        return os.fstat(fd).st_nlink > 0
    except OSError:
        return True


def _dump_vdso() -> Binary | None:
    for line in (procfs.read_maps(os.getpid()) or b"").split(b"\n"):
        if line.endswith(b"[vdso]"):
            start, _, end = line.partition(b" ")[0].partition(b"-")
            binary = Binary("[vdso]", "vdso")
            try:
                with open("/proc/self/mem", "rb", buffering=0) as memory:  # noqa: PTH123
                    image = os.pread(memory.fileno(), int(end, 16) - int(start, 16), int(start, 16))
                fd = os.memfd_create("vdso", os.MFD_CLOEXEC)
                os.write(fd, image)
            except OSError:
                return None
            binary.take(fd)
            return binary
    return None
