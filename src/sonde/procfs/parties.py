# SPDX-License-Identifier: Apache-2.0
"""Which party a process belongs to: somebody who cannot make more of themselves.

What all share is divided between parties, so that none gets more of it by more processes, user ids
or namespaces. The kernel's side divides by the same rule (bpf/share.h):

1. in a user namespace: the owner of the outermost one below the machine's, unless that is root.
   One user may have 65,536 subordinate ids, each in a process of its own;
2. else in a pid namespace below the machine's: that container, by its outermost one. Its processes
   may take any user id there is;
3. else the real user.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

NOBODY: Final = -1
"""The party of a process that is gone, or of no process."""

_NS_GET_PARENT: Final = 0xB702
_NS_GET_OWNER_UID: Final = 0xB704
"""linux/nsfs.h."""
_INITIAL_USER: Final = 0xEFFFFFFD
_INITIAL_PID: Final = 0xEFFFFFFC
"""Inode numbers of the machine's own (linux/proc_ns.h)."""
_MAX_LEVELS: Final = 33
"""The kernel nests namespaces of a kind no deeper."""
_MAX_STATUS_BYTES: Final = 8192


def party_of(pid: int) -> int:
    """The party of a process: a user's id, or for a container the negated inode number of its
    outermost pid namespace; NOBODY where the process is gone. Takes none of its locks."""
    user = _real_user(pid)
    if user == NOBODY:
        return NOBODY
    owner, outermost_user = _outermost(pid, "user", _INITIAL_USER)
    if owner:
        return owner
    _, outermost_pid = _outermost(pid, "pid", _INITIAL_PID)
    if outermost_pid or outermost_user:
        return -(outermost_pid or outermost_user)
    return user


def name_of(party: int) -> str:
    """A party in words."""
    if party == NOBODY:
        return "nobody"
    return f"user {party}" if party >= 0 else f"the container of namespace {-party}"


def _real_user(pid: int) -> int:
    """The owner of /proc/PID may be root where the process is somebody else's: asks `status`."""
    with suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/status", "rb") as file:  # noqa: PTH123
            raw = file.read(_MAX_STATUS_BYTES)
        return int(raw.partition(b"\nUid:")[2].split(None, 1)[0])
    return NOBODY


def _outermost(pid: int, kind: str, initial: int) -> tuple[int, int]:
    """(owner, inode number) of the outermost namespace of a kind below the machine's own; (0, 0)
    where the process is in that one, and for a pid namespace without the owner."""
    owner = inode = 0
    for fd in _chain(pid, kind):
        found = os.fstat(fd).st_ino
        if found == initial:
            break
        inode = found
        if kind == "user":
            raw = fcntl.ioctl(fd, _NS_GET_OWNER_UID, bytes(4))
            owner = struct.unpack("=I", raw)[0]
    return owner, inode


def _chain(pid: int, kind: str) -> Iterator[int]:
    """Descriptors of a process's namespace and of those around it, as far as they can be had; each
    is open until the next is asked for."""
    try:
        fd = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    for _ in range(_MAX_LEVELS):
        try:
            yield fd
            outer = fcntl.ioctl(fd, _NS_GET_PARENT)
        except OSError:
            return
        finally:
            os.close(fd)
        fd = outer
    os.close(fd)
