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
"""Executable files of one process."""
MAX_LINKS: Final = 8
"""From the name of a library to its file."""
FIRST_BYTES: Final = 256 << 10
"""Of the mappings of a process, read before all others had their turn: 2,500 lines."""
LONG_CPU_S: Final = 0.5
"""CPU time for what is longer than that, of all processes of one party."""
MAX_LONG_CPU_S: Final = 2.0
"""The same of all parties."""

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
    pid: int, unread: UnreadProcesses | None = None, most_bytes: int = procfs.MAX_MAPS_BYTES
) -> Iterator[MappedFile]:
    """The executable files that a process has mapped now, each once; nothing where it is gone.

    `unread` counts it where there is more than was read.
    """
    seen: set[tuple[bytes, bytes]] = set()
    try:
        with procfs.MapsReader(pid, most_bytes) as reader:
            for line in reader.lines():
                # start-end perms offset major:minor inode path; most lines are no code's
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


def mapped_now(unread: UnreadProcesses | None = None) -> Iterator[MappedFile]:
    """Every (process, executable file) of the machine, as far as its mount of /proc shows.

    Processes with very many mappings come last, the party first that has taken least time, and
    those of a party share a bound on the time they take: a hostile one delays nobody but its like.
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
    """The stat() of a file: on most file systems that is its identity, and costs a twentieth
    of asking for it."""
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
    """Paths of the dynamic linker's cache whose file name is wanted."""
    seen = set()
    for name, text in system_libraries.in_cache():
        if any(map(wanted, {name, *_names_along(text)})):
            path = os.path.realpath(text)
            if path not in seen:
                seen.add(path)
                yield path


def _names_along(path: str) -> Iterator[str]:
    """The file names of a path and of what it leads to; links of folders are not looked at, which
    would take the time of ten."""
    for _ in range(MAX_LINKS):
        folder, _, name = path.rpartition("/")
        yield name
        try:
            target = os.readlink(path)  # noqa: PTH115
        except OSError:
            return
        path = target if target.startswith("/") else f"{folder}/{target}"
