# SPDX-License-Identifier: Apache-2.0
"""Looks names up in /proc so that nobody keeps this thread waiting.

Who can list a folder (of /proc most can be listed by anybody) can keep it locked: getdents64()
holds its lock while it copies to a page, as of a FUSE file, that never arrives, and a mkdir() that
is refused anyway queues for the lock and has everybody else's listing of that folder, and each
look-up in it of a name that is not in memory yet, wait; no signal ends such a look-up.

So we have an instance of procfs that is mounted nowhere (CAP_SYS_ADMIN, Linux 5.8): its folders
are others than those that anybody else can list, and lead to the same processes. Units of systemd
and containers, which have no such privilege, have an instance that nobody else can open at /proc.

Where that cannot be had, a name is looked up here only where the kernel has it in memory, which
takes no lock (openat2(2) with RESOLVE_CACHED, Linux 5.12; of processes from 5.16 on). All others,
and listings, are asked of the child of the broker.
"""

from __future__ import annotations

import errno
import os
import re
from itertools import islice
from typing import Final, Protocol

_NOT_KNOWN: Final = frozenset({errno.EAGAIN, errno.EINVAL, errno.ENOSYS, errno.EPERM})
"""EAGAIN: not in memory; EINVAL before Linux 5.12, ENOSYS before 5.6, EPERM by a filter of system
calls that is older."""
_OF_PROCESS: Final = re.compile(r"/proc/([0-9]+)(?:/|\Z)")


class Asked(Protocol):
    """Who looks up what is not in memory. Its methods raise OSError; Hung, which is one, where it
    does not answer, or may not be asked now."""

    def look_up(self, who: int | None, path: str, flags: int) -> int:
        """A descriptor of a file of /proc."""
        ...

    def names_in(self, who: int | None, path: str, most: int) -> list[str]:
        """The first names in a folder of /proc."""
        ...


_asked: list[Asked] = []
_own: list[int] = []
"""The root of our own instance of procfs; -1: there is none. Empty until it is looked for."""


def ask(child: Asked) -> None:
    """Have this one asked from now on."""
    _asked[:] = [child]


def own_procfs() -> int:
    """The root of our own instance of procfs; -1: there is none."""
    if not _own:
        _own.append(_make_own())
    return _own[0]


def _make_own() -> int:
    try:
        from sonde import _native
    except ImportError:  # who needs it more reports that
        return -1
    root = _native.own_procfs()
    if root < 0:
        return -1
    if os.readlink("self", dir_fd=root) != os.readlink("/proc/self"):  # noqa: PTH115
        os.close(root)  # /proc has the numbers of another pid namespace
        return -1
    _native.use_procfs(root)
    return root


def open_file(path: str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a file, or a folder: of /proc so that nobody can make its look-up wait.
    Raises OSError, Hung."""
    if path[:6] not in ("/proc/", "/proc"):
        return os.open(path, flags | os.O_CLOEXEC)
    if (root := own_procfs()) >= 0:
        return os.open(path[len("/proc/") :] or ".", flags | os.O_CLOEXEC, dir_fd=root)
    fd = _open_known(path, flags)
    if fd >= 0:
        return fd
    if -fd not in _NOT_KNOWN:
        raise OSError(-fd, os.strerror(-fd), path)
    return _asked[0].look_up(whose(path), for_child(path), flags)


def open_known(path: str) -> int:
    """The same without our own instance of names in memory alone: nobody is asked. Raises
    OSError."""
    if own_procfs() >= 0:
        return open_file(path)
    fd = _open_known(path, os.O_RDONLY)
    if fd < 0:
        raise OSError(-fd, os.strerror(-fd), path)
    return fd


def read(path: str, limit: int) -> bytes:
    """The content of a file whose reading waits for nobody, cut at `limit` bytes. Raises OSError,
    Hung."""
    fd = open_file(path)
    try:
        pieces = []
        while limit > 0 and (piece := os.read(fd, min(limit, 1 << 18))):
            pieces.append(piece)
            limit -= len(piece)
        return b"".join(pieces)
    finally:
        os.close(fd)


def names_in(path: str, most: int = 1 << 22) -> list[str]:
    """The first names in a folder of /proc, in the kernel's order. Raises OSError, Hung."""
    if own_procfs() >= 0:
        fd = open_file(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with os.scandir(fd) as entries:
                return [it.name for it in islice(entries, most)]
        finally:
            os.close(fd)
    return _asked[0].names_in(whose(path), for_child(path), most)


def is_there(path: str) -> bool:
    """Whether a path of /proc leads to something; also where that cannot be found out in time."""
    try:
        os.close(open_file(path, os.O_PATH))
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESRCH)
    return True


def owner_of(pid: int) -> int:
    """The owner of /proc/PID: the effective user id, dumpable or not. Raises OSError, Hung."""
    fd = open_file(f"/proc/{pid}", os.O_PATH)
    try:
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)


def _open_known(path: str, flags: int) -> int:
    try:
        from sonde import _native
    except ImportError:
        return -errno.ENOSYS
    return _native.open_known(path, flags)


def whose(path: str) -> int | None:
    """The process that may make readers of a path wait: that of /proc/PID/…; None of another path,
    and for this process."""
    match = _OF_PROCESS.match(path)
    return None if match is None or int(match[1]) == os.getpid() else int(match[1])


def for_child(path: str) -> str:
    """A path by which the child of the broker finds what `path` is for us."""
    if path.startswith("/proc/self/"):
        return path.replace("/proc/self/", f"/proc/{os.getpid()}/", 1)
    return path
