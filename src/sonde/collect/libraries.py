# SPDX-License-Identifier: Apache-2.0
"""Which executable files processes have mapped, and how to open exactly those.

A path means little: another mount namespace has another file there, a deleted file has none, an
upgrade puts a new one in its place. What counts is the file that a process runs, named by device
and inode as its mappings say.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

FileKey = tuple[int, int, int]
"""(major, minor, inode) of a file as /proc/PID/maps and mmap events give them."""

_DELETED = " (deleted)"
_CACHE = Path("/etc/ld.so.cache")
_CACHE_MAGIC = b"glibc-ld.so.cache1.1"


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


def mapped_by(pid: int) -> Iterator[MappedFile]:
    """The executable files that a process has mapped now; nothing where it is gone."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as lines:  # noqa: PTH123
            for line in lines:
                # start-end perms offset major:minor inode path
                parts = line.split(maxsplit=5)
                if len(parts) < 6 or "x" not in parts[1] or parts[4] == "0":
                    continue
                start, _, end = parts[0].partition("-")
                major, _, minor = parts[3].partition(":")
                key = (int(major, 16), int(minor, 16), int(parts[4]))
                path = parts[5].rstrip("\n")
                yield MappedFile(pid, key, path, int(start, 16), int(end, 16))
    except (OSError, ValueError):
        return


def mapped_now() -> Iterator[MappedFile]:
    """Every (process, executable file) of the machine, as far as its mount of /proc shows."""
    for name in os.listdir("/proc"):  # noqa: PTH208 (a Path for each would double the time)
        if name.isdecimal():
            seen: set[FileKey] = set()
            for file in mapped_by(int(name)):
                if file.key not in seen:
                    seen.add(file.key)
                    yield file


def open_mapped(file: MappedFile) -> int:
    """Open the very file that is mapped. Returns a descriptor; raises OSError where it is gone.

    The mapping itself leads to it while the process lives, whatever became of the path; after that
    the path may, if device and inode still say so.
    """
    for path in (
        f"/proc/{file.pid}/map_files/{file.start:x}-{file.end:x}",
        f"/proc/{file.pid}/root{file.path}",
        file.path,
    ):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            continue
        if _stat_key(fd) == file.key or identity(fd) == file.key:
            return fd
        os.close(fd)
    raise FileNotFoundError(errno.ENOENT, "no path leads to it any more", file.path)


def _stat_key(fd: int) -> FileKey | None:
    """What stat() says of a regular file: on most file systems that is its identity, and costs a
    twentieth of asking for it."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        return None
    return os.major(found.st_dev), os.minor(found.st_dev), found.st_ino


def identity(fd: int) -> FileKey | None:
    """Device and inode of an open file as its mappings will say; None where it cannot be mapped.

    stat() may say otherwise: btrfs and overlayfs show another device there than in mappings.
    """
    try:
        with mmap.mmap(fd, 1, mmap.MAP_PRIVATE) as view:
            anchor = ctypes.c_char.from_buffer(view)
            start = f"{ctypes.addressof(anchor):x}-"
            del anchor  # the mapping cannot be closed while it is referred to
            maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    except (OSError, ValueError):
        return None
    for line in maps.splitlines():
        if line.startswith(start):
            device, inode = line.split(maxsplit=5)[3:5]
            major, _, minor = device.partition(":")
            return int(major, 16), int(minor, 16), int(inode)
    return None


def installed(wanted: Callable[[str], bool]) -> Iterator[str]:
    """Paths of the dynamic linker's cache whose file name is wanted."""
    try:
        raw = _CACHE.read_bytes()
    except OSError:
        return
    # glibc, sysdeps/generic/dl-cache.h, struct cache_file_new: 48 bytes, then entries of 24 bytes
    # (flags, key, value, osversion, hwcap); offsets of the strings count from the header.
    base = raw.find(_CACHE_MAGIC)
    if base < 0 or len(raw) < base + 48:
        return
    (count,) = struct.unpack_from("<I", raw, base + len(_CACHE_MAGIC))
    seen = set()
    for entry in range(min(count, (len(raw) - base - 48) // 24)):
        (at,) = struct.unpack_from("<I", raw, base + 48 + 24 * entry + 8)
        text = raw[base + at : raw.find(b"\0", base + at)].decode(errors="surrogateescape")
        path = os.path.realpath(text)
        if path not in seen and (wanted(Path(text).name) or wanted(Path(path).name)):
            seen.add(path)
            yield path
