# SPDX-License-Identifier: Apache-2.0
"""On which sockets a thread waits now: the one of its system call, or those among the descriptors
that it polls, by the array in its memory or by its epoll instance. The process chooses how long all
of these are: what is longer than the bounds here is not looked at."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sonde import procfs
from sonde.collect.reasons import reason_of

OF_DESCRIPTOR: Final = frozenset(
    (
        *("read", "readv", "write", "writev", "recvfrom", "recvmsg", "recvmmsg", "connect"),
        *("sendto", "sendmsg", "sendmmsg"),
    )
)
"""System calls whose first argument is the descriptor that is waited for."""
_POLL: Final = frozenset(("poll", "ppoll"))
_SELECT: Final = frozenset(("select", "pselect6"))
_EPOLL: Final = frozenset(("epoll_wait", "epoll_pwait", "epoll_pwait2"))
OF_SEVERAL: Final = _POLL | _SELECT | _EPOLL
"""System calls that wait for any of several descriptors."""
MAX_POLLED: Final = 256
"""Descriptors of one wait."""
MAX_OF_EPOLL: Final = 512
"""Descriptors of a process whose epoll instance is read: the kernel lists all that it watches at
once, at some 2 us each, and keeps the instance locked meanwhile."""
_MAX_LISTED_BYTES: Final = 1 << 17
_MAX_NUMBER: Final = 1024
"""Descriptors from this on are not in an fd_set of the C library."""
_POLLFD: Final = struct.Struct("=ihh")
_INODE: Final = re.compile(rb"^tfd:.*\bino:([0-9a-f]{1,16})\b", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Awaited:
    """What a thread waits on."""

    inodes: Sequence[int] = ()
    """Of the sockets."""
    is_one_of_several: bool = False
    """The system call is one that waits for any of several descriptors."""
    is_cut: bool = False
    """There are more than are looked at: none is given."""


def awaited_sockets(pid: int, tid: int) -> Awaited:
    """The sockets on which a thread waits now. Raises OSError."""
    # NR ARG1 ... ARG6 SP PC, or "running" (proc_pid_syscall(5)).
    words = (procfs.read_file(f"/proc/{pid}/task/{tid}/syscall", 256) or b"").split()
    if len(words) < 7 or not words[0].isdigit():
        return Awaited()
    call = reason_of(int(words[0]))[1]
    arguments = [int(word, 16) for word in words[1:7]]
    if call in OF_DESCRIPTOR:
        return Awaited(_sockets(pid, tid, arguments[:1]))
    if call in _EPOLL:
        return _of_epoll(pid, tid, arguments[0])
    if call in _POLL:
        numbers = _of_poll(pid, tid, *arguments[:2])
    elif call in _SELECT:
        numbers = _of_select(pid, tid, arguments)
    else:
        return Awaited()
    if len(numbers) > MAX_POLLED:
        return Awaited(is_one_of_several=True, is_cut=True)
    return Awaited(_sockets(pid, tid, numbers), is_one_of_several=True)


def _sockets(pid: int, tid: int, numbers: Sequence[int]) -> list[int]:
    """Inodes of the sockets among some descriptors of a thread."""
    wanted = [number for number in dict.fromkeys(numbers) if 0 <= number < 1 << 31]
    links = procfs.links_at(pid, f"/proc/{pid}/task/{tid}/fd", wanted) if wanted else []
    return [int(link[8:-1]) for link in dict.fromkeys(links) if link.startswith("socket:[")]


def _of_poll(pid: int, tid: int, at: int, count: int) -> list[int]:
    """Descriptors of an array of struct pollfd: one more than MAX_POLLED where there are more."""
    wanted = min(count & 0xFFFFFFFF, MAX_POLLED + 1)
    (raw,) = _memory(pid, tid, [(wanted * _POLLFD.size, at)]) if wanted else (b"",)
    whole = raw[: len(raw) // _POLLFD.size * _POLLFD.size]
    return [number for number, _, _ in _POLLFD.iter_unpack(whole) if number >= 0]


def _of_select(pid: int, tid: int, arguments: Sequence[int]) -> list[int]:
    """Descriptors of the sets of those to be read and written."""
    most = min(arguments[0] & 0x7FFFFFFF, _MAX_NUMBER)
    size = (most + 63) // 64 * 8  # the kernel reads longs
    sets = _memory(pid, tid, [(size, at) for at in arguments[1:3] if at]) if size else []
    bits = 0
    for raw in sets:
        bits |= int.from_bytes(raw, "little")
    return [number for number in range(most) if bits >> number & 1]


def _of_epoll(pid: int, tid: int, number: int) -> Awaited:
    """The sockets that an epoll instance watches, of those that the process has open."""
    mine, is_cut = procfs.sockets_of(pid, MAX_OF_EPOLL)
    if is_cut or number >= 1 << 31:
        return Awaited(is_one_of_several=True, is_cut=is_cut)
    path = f"/proc/{pid}/task/{tid}/fdinfo/{number}"
    listed = procfs.read_file(path, _MAX_LISTED_BYTES) or b""
    inodes = [int(found, 16) for found in dict.fromkeys(_INODE.findall(listed))]
    sockets = [inode for inode in inodes if str(inode) in mine]
    is_cut = len(listed) >= _MAX_LISTED_BYTES or len(sockets) > MAX_POLLED
    return Awaited([] if is_cut else sockets, is_one_of_several=True, is_cut=is_cut)


def _memory(pid: int, tid: int, parts: Sequence[tuple[int, int]]) -> list[bytes]:
    """What the process has at each (size, address), b"" where it cannot be read. Raises OSError."""
    memory = procfs.HeldFile(f"/proc/{pid}/task/{tid}/mem")
    try:
        return memory.read_many(parts)
    finally:
        memory.close()
