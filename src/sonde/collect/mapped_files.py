# SPDX-License-Identifier: Apache-2.0
"""Which executable files processes have mapped, and how to open exactly those.

A path means little: another mount namespace has another file there, a deleted file has none, an
upgrade puts a new one in its place. What counts is the file that a process runs, named by device
and inode as in its mappings.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from sonde import procfs, system_libraries

FileKey = tuple[int, int, int]
"""(major, minor, inode) of a file as /proc/PID/maps and mmap events give them."""

MAX_FILES: Final = 4_096
"""Executable files of one process that are looked at."""
MAX_LINKS: Final = 8
"""Symbolic links that are followed from the name of a library to its file."""
FIRST_BYTES: Final = 256 << 10
"""Of /proc/PID/maps, read in the first pass over all processes: about 2,500 lines."""
LONG_CPU_S: Final = 0.5
"""CPU time of one `mapped_now` for processes with more than that, all those of one party."""
MAX_LONG_CPU_S: Final = 2.0
"""The same for all parties together."""

_DELETED = " (deleted)"


@dataclass(frozen=True, slots=True)
class MappedFile:
    """A file that a process has mapped with the right to execute."""

    pid: int
    key: FileKey
    path: str
    """As the process sees it."""
    start: int
    end: int
    """Addresses of the mapping."""

    @property
    def name(self) -> str:
        """File name without folders."""
        return self.path.removesuffix(_DELETED).rpartition("/")[2]


@dataclass(slots=True)
class UnreadProcesses:
    """How often not all of what a process has mapped was looked at."""

    processes: int = 0


def mapped_by(
    pid: int, unread: UnreadProcesses | None = None, max_bytes: int = procfs.MAX_MAPS_BYTES
) -> Iterator[MappedFile]:
    """The executable files that a process has mapped now, each once; nothing where it is gone or
    may not be looked at.

    `unread` counts it where there is more than `max_bytes`, MAX_FILES or the CPU time of a
    `MapsReader` allow.
    """
    seen: set[tuple[bytes, bytes]] = set()
    try:
        with procfs.MapsReader(pid, max_bytes) as reader:
            for line in reader.lines():
                # start-end perms offset major:minor inode path; most lines are not of code
                at = line.find(b" ")
                if line[at + 3 : at + 4] != b"x":
                    continue
                parts = line.split(None, 5)
                if len(parts) < 6 or parts[4] == b"0" or (parts[3], parts[4]) in seen:
                    continue
                if len(seen) >= MAX_FILES:
                    reader.is_cut = True
                    break
                seen.add((parts[3], parts[4]))
                start, _, end = parts[0].partition(b"-")
                major, _, minor = parts[3].partition(b":")
                key = (int(major, 16), int(minor, 16), int(parts[4]))
                path = os.fsdecode(parts[5])
                yield MappedFile(pid, key, path, int(start, 16), int(end, 16))
            if reader.is_cut and unread is not None:
                unread.processes += 1
    except (OSError, ValueError):
        return


def own_devices() -> set[tuple[int, int]]:
    """(major, minor) of the devices of executable files that this process maps: as long as it does,
    these numbers go to no other file system."""
    return {file.key[:2] for file in mapped_by(os.getpid())}


def mapped_now(unread: UnreadProcesses | None = None) -> Iterator[MappedFile]:
    """Every (process, executable file) of the machine, as far as its mount of /proc shows.

    Processes with very many mappings come last, each time one of the party that has taken least
    time, and the time of one party is bounded: a hostile process delays only those of its party.
    `unread` counts those that were not read to their end.
    """
    long: dict[int, list[int]] = {}
    for pid in procfs.pids():
        here = UnreadProcesses()
        yield from mapped_by(pid, here, FIRST_BYTES)
        if here.processes:
            long.setdefault(procfs.party_of(pid), []).append(pid)
    spent_s = dict.fromkeys(long, 0.0)
    while long:
        party = min(long, key=lambda it: spent_s[it])
        if spent_s[party] > LONG_CPU_S or sum(spent_s.values()) > MAX_LONG_CPU_S:
            if unread is not None:
                unread.processes += sum(map(len, long.values()))
            return
        pid = long[party].pop(0)
        if not long[party]:
            del long[party]
        began_s = time.thread_time()
        files = list(mapped_by(pid, unread))
        spent_s[party] += time.thread_time() - began_s
        yield from files


def open_mapped(file: MappedFile) -> int:
    """Open the very file that is mapped. Returns a descriptor; raises OSError where it is gone.

    The mapping itself leads to it while the process lives, whatever became of the path; after that
    the path may, if device and inode still match.
    """
    for path in (
        f"/proc/{file.pid}/map_files/{file.start:x}-{file.end:x}",
        f"/proc/{file.pid}/root{file.path}",
        file.path,
    ):
        fd = procfs.open_regular(path, follow=True, who=file.pid)
        if fd is None:
            continue
        with suppress(OSError):
            if _stat_key(fd) == file.key or identity(fd) == file.key:
                return fd
        os.close(fd)
    raise FileNotFoundError(errno.ENOENT, "no path leads to it any more", file.path)


def _stat_key(fd: int) -> FileKey:
    """A file's key by fstat(2): on most file systems the same as `identity`, at a twentieth of the
    cost."""
    found = os.fstat(fd)
    return os.major(found.st_dev), os.minor(found.st_dev), found.st_ino


def identity(fd: int) -> FileKey | None:
    """Device and inode of an open file as in its mappings; None where it cannot be mapped.

    stat() may differ: btrfs and overlayfs show another device there than in mappings.
    """
    try:
        with mmap.mmap(fd, 1, mmap.MAP_PRIVATE) as view:
            anchor = ctypes.c_char.from_buffer(view)
            start = b"%x-" % ctypes.addressof(anchor)
            del anchor  # the mapping cannot be closed while it is referred to
            with procfs.MapsReader("self") as reader:
                for line in reader.lines():
                    if line.startswith(start):
                        device, inode = line.split(maxsplit=5)[3:5]
                        major, _, minor = device.partition(b":")
                        return int(major, 16), int(minor, 16), int(inode)
    except (OSError, ValueError):
        pass
    return None


def installed(wanted: Callable[[str], bool]) -> Iterator[str]:
    """Paths of the dynamic linker's cache for which `wanted` is true of the name in the cache, or
    of a file name that it leads to."""
    seen = set()
    for name, text in system_libraries.in_cache():
        if any(map(wanted, {name, *_names_along(text)})):
            path = os.path.realpath(text)
            if path not in seen:
                seen.add(path)
                yield path


def _names_along(path: str) -> Iterator[str]:
    """The file names of a path and of the links that it leads to; links among the folders are not
    resolved, which would take ten times as long."""
    for _ in range(MAX_LINKS):
        folder, _, name = path.rpartition("/")
        yield name
        try:
            target = os.readlink(path)  # noqa: PTH115
        except OSError:
            return
        path = target if target.startswith("/") else f"{folder}/{target}"
