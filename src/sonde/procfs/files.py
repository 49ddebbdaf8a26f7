# SPDX-License-Identifier: Apache-2.0
"""Files of /proc, and files at paths that others chose: read and opened without side effects.

Opening is not harmless: a pipe blocks, a device starts something, and a terminal becomes that of a
daemon without one, whose hang-up then ends it. So a path that another user may have made is first
opened with O_PATH, which does none of this; what it leads to is checked on that handle, and the
very same file is then opened through the handle.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sonde.procfs import lookups
from sonde.procfs.broker import BROKER
from sonde.procfs.lookups import for_child, whose

QUIETLY: Final = os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
"""Flags to open what others may have made: it neither blocks nor becomes our terminal."""

_MAX_LINES_BYTES: Final = 4 << 20
_WITHOUT_LOCKS: Final = frozenset({"cgroup", "comm", "limits", "mountinfo", "statm", "status"})
"""Files of /proc/PID that take none of the locks that the process can hold for long
(signal->exec_update_lock, mmap_lock)."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A file, or a copy of it."""

    fd: int
    which: tuple[int, int, int, int, int]
    """The identity of the file that was opened: device, inode, size, times (ns) of change of
    content and inode. Of a copy: of the original."""
    is_copy: bool
    """`fd` is a copy in memory: of a file that could not be opened harmlessly by itself."""
    is_strange: bool
    """It lies on btrfs or overlayfs: in /proc/PID/maps such a file has another device number than
    stat() gives, so `key` and a mapping's numbers cannot be compared."""
    key: tuple[int, int, int] | None
    """(major, minor, inode) that no other file has, of any owner; None where that is not known.
    Mappings of it show the same, unless it is strange."""


def _takes_no_lock(path: str) -> bool:
    return path.rpartition("/")[2] in _WITHOUT_LOCKS


def read_file(path: str, limit: int = 1 << 16) -> bytes | None:
    """A file's content, cut at `limit` bytes; None where it cannot be read, or not in time."""
    pid = whose(path)
    if pid is not None and not _takes_no_lock(path):
        try:
            content: bytes = BROKER.ask(pid, ("read", path, limit))
        except OSError:
            return None
        return content
    try:
        return lookups.read(path, limit)
    except OSError:
        return None


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """Lines of a file of /proc, of a process its first 4 MiB at most. Raises OSError.

    Only a line feed ends one. The kernel lets names of threads and control groups hold every other
    character at which splitlines() and files opened as text begin a line: a carriage return there
    would forge a field.
    """
    path = os.fspath(path)
    pid = whose(path)
    if pid is not None and not _takes_no_lock(path):
        raw: bytes = BROKER.ask(pid, ("read", path, _MAX_LINES_BYTES))
    else:
        raw = lookups.read(path, sys.maxsize if pid is None else _MAX_LINES_BYTES)
    return raw.decode("utf-8", "replace").split("\n")


def read_link(path: str, deadline_s: float | None = None) -> str:
    """Where a link of /proc/PID leads to. `deadline_s`: as in `Broker.ask`. Raises OSError."""
    pid = whose(path)
    if pid is None:
        return os.readlink(path)  # noqa: PTH115
    return os.fsdecode(BROKER.ask(pid, ("link", path), deadline_s=deadline_s))


def links_of(pid: int, limit: int, prefix: str) -> tuple[set[str], bool]:
    """Where the first `limit` descriptors of a process lead to, as far as it begins with `prefix`;
    and whether it has more descriptors. Raises OSError."""
    links, is_cut = BROKER.ask(pid, ("links", f"/proc/{pid}/fd", limit, os.fsencode(prefix)))
    return set(map(os.fsdecode, links)), is_cut


def links_at(pid: int, folder: str, names: Sequence[int]) -> list[str]:
    """Where some descriptors of a process lead to, '' of those that are not there; `folder`: a path
    to its descriptors. Raises OSError."""
    return [*map(os.fsdecode, BROKER.ask(pid, ("links at", folder, list(names))))]


def sockets_of(pid: int, limit: int) -> tuple[set[str], bool]:
    """Inodes of the sockets among the first `limit` descriptors of a process, and whether it has
    more descriptors. Raises OSError."""
    links, is_cut = links_of(pid, limit, "socket:[")
    return {link[8:-1] for link in links}, is_cut


def read_inode(path: str) -> int:
    """Inode of what a link of /proc/PID leads to. Raises OSError."""
    pid = whose(path)
    if pid is None:
        return os.stat(path).st_ino  # noqa: PTH116
    inode: int = BROKER.ask(pid, ("inode", path))
    return inode


def character_device(path: str) -> int:
    """Number of the character device that a link of /proc/PID leads to, 0 of anything else. Raises
    OSError."""
    number: int = BROKER.ask_of_file(whose(path), ("device", for_child(path)))
    return number


def identity_of(path: str, who: int | None) -> tuple[int, int, int]:
    """Device, inode and owner of the file that a path of others leads to. Raises OSError.

    `who`: the process that chose the path.
    """
    device, inode, user, _ = BROKER.ask_of_file(who, ("which", for_child(path)))
    return device, inode, user


def open_regular(path: str, *, follow: bool = False, who: int | None = None) -> int | None:
    """A descriptor of the regular file at `path`, which others may have put there; None otherwise,
    and where somebody can make its readers wait (`opening.py` decides where that is).

    The last component must not be a symbolic link, except one of /proc's own, unless `follow`.
    Below /proc/PID/root, links lead to where they lead that process.
    `who`: the process that chose the path, where that does not begin with /proc/PID.
    """
    found = open_stable(path, follow=follow, who=who)
    return None if found is None else found.fd


def open_stable(
    path: str,
    *,
    follow: bool = False,
    copy_bytes: int = 0,
    inode: int = 0,
    who: int | None = None,
) -> Opened | None:
    """The same with what is known of the file; as a copy where reading the file itself could wait
    and `copy_bytes` of memory are enough for one. `inode`: which the file must have; 0: any."""
    pid = whose(path) or who
    follow = follow or "/map_files/" in path
    asked = ("open", for_child(path), follow, pid or os.getpid(), inode, copy_bytes)
    try:
        (is_copy, which, is_strange, key), fd = BROKER.open(pid, (*asked, False), (*asked, True))
    except (OSError, ValueError):
        return None
    return Opened(fd, which, is_copy, is_strange, key)


def open_memory(path: str, size: int) -> int | None:
    """A descriptor, for reading and writing, of the memory of memfd_create() that `path`, a link
    of /proc, leads to; None where it leads to anything else, or to memory of another size.

    Raises OSError where it may not be opened, or is gone.
    """
    try:
        _, fd = BROKER.open(whose(path), ("memory", for_child(path), _memory_device(), size))
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise
    return fd


def reopen(handle: int, flags: int) -> int:
    """The file held by an O_PATH descriptor, opened. Raises OSError."""
    return os.open(f"/proc/self/fd/{handle}", flags | QUIETLY)


def _memory_device() -> int:
    """The device of the kernel's own mount for such memory: no user's file lies there."""
    fd = os.memfd_create("sonde-device", os.MFD_CLOEXEC)
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)
