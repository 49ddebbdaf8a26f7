# SPDX-License-Identifier: Apache-2.0
"""What a thread waits for or does in the kernel, by its stack: the system call that it is in, the
kernel's functions below that, and the interpreter's above."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Final

from sonde.model.code import Frame
from sonde.model.interpreter_lock import LockUse
from sonde.model.libraries import CodeKind, kind_of_file, kind_of_native
from sonde.model.thread_stack import ThreadStack


class Doing(StrEnum):
    """What a thread waits for, or does with a file; the values are those of `sonde dump --json`."""

    UNKNOWN = ""
    """It runs, or its stack does not show it."""
    GIL = "gil"
    LOCK = "lock"
    THREAD = "thread"
    FUTEX = "futex"
    SLEEP = "sleep"
    CONNECTION = "connection"
    EVENTS = "events"
    SOCKET_READ = "socket read"
    SOCKET_WRITE = "socket write"
    PIPE_READ = "pipe read"
    PIPE_WRITE = "pipe write"
    TERMINAL = "terminal"
    FILE_READ = "file read"
    FILE_WRITE = "file write"
    SYNC = "sync"
    MEMORY = "memory"
    CHILD = "child"
    SIGNAL = "signal"
    DRIVER = "driver"

    @property
    def description(self) -> str:
        """For people: 'waits for a lock'; '' where it is not known."""
        return _TEXTS.get(self, "")

    @property
    def is_file(self) -> bool:
        """Whether a thread works on a file, which may take a CPU."""
        return self in (Doing.FILE_READ, Doing.FILE_WRITE, Doing.SYNC)


_TEXTS: Final = {
    Doing.GIL: "waits for the interpreter lock (GIL)",
    Doing.LOCK: "waits for a lock",
    Doing.THREAD: "waits for another thread",
    Doing.FUTEX: "waits for a lock or another thread",
    Doing.SLEEP: "sleeps",
    Doing.CONNECTION: "waits for a connection",
    Doing.EVENTS: "waits for events",
    Doing.SOCKET_READ: "waits for data on a socket",
    Doing.SOCKET_WRITE: "sends to a socket",
    Doing.PIPE_READ: "waits for data in a pipe",
    Doing.PIPE_WRITE: "writes to a pipe",
    Doing.TERMINAL: "waits for a terminal",
    Doing.FILE_READ: "reads a file",
    Doing.FILE_WRITE: "writes a file",
    Doing.SYNC: "syncs a file to its disk",
    Doing.MEMORY: "waits for memory",
    Doing.CHILD: "waits for a child process",
    Doing.SIGNAL: "waits for a signal",
    Doing.DRIVER: "is in a call of a driver",
}

_SYSCALL: Final = re.compile(
    r"^(?:__(?:(?:x64|arm64|ia32|riscv|s390x|do|se)_)?sys_|ksys_|kernel_|do_(?:sys_)?)(\w+)$"
)
"""Functions of the kernel that are a system call, or that the compiler lets one end in."""
_READ: Final = {"socket": Doing.SOCKET_READ, "pipe": Doing.PIPE_READ, "": Doing.FILE_READ}
_WRITE: Final = {"socket": Doing.SOCKET_WRITE, "pipe": Doing.PIPE_WRITE, "": Doing.FILE_WRITE}
_READS: Final = frozenset(("read", "pread64", "readv", "preadv", "preadv2", "getdents64"))
_WRITES: Final = frozenset(("write", "pwrite64", "writev", "pwritev", "pwritev2"))
_OF_SYSCALL: Final = {
    **dict.fromkeys(("nanosleep", "clock_nanosleep"), Doing.SLEEP),
    **dict.fromkeys(("poll", "ppoll", "select", "pselect6", "epoll_wait"), Doing.EVENTS),
    **dict.fromkeys(("epoll_pwait", "epoll_pwait2", "io_uring_enter"), Doing.EVENTS),
    **dict.fromkeys(("accept", "accept4"), Doing.CONNECTION),
    **dict.fromkeys(("recvfrom", "recvmsg", "recvmmsg"), Doing.SOCKET_READ),
    **dict.fromkeys(("sendto", "sendmsg", "sendmmsg", "connect"), Doing.SOCKET_WRITE),
    **dict.fromkeys(("fsync", "fdatasync", "sync", "syncfs", "msync"), Doing.SYNC),
    **dict.fromkeys(("wait4", "waitid", "vfork"), Doing.CHILD),
    **dict.fromkeys(("pause", "rt_sigsuspend", "rt_sigtimedwait"), Doing.SIGNAL),
    **dict.fromkeys(("mmap", "munmap", "mprotect", "madvise", "brk", "mremap"), Doing.MEMORY),
    "ioctl": Doing.DRIVER,
}
_FUTEX: Final = frozenset(("futex", "futex_wait", "futex_waitv"))
_KNOWN: Final = frozenset((*_OF_SYSCALL, *_FUTEX, *_READS, *_WRITES))
_FAULT: Final = re.compile(r"exc_page_fault$|^do_mem_abort$|^do_user_addr_fault$")
_SOCKET: Final = re.compile(r"^(sock|tcp|udp|inet|unix|vsock)\w*_(read_iter|recvmsg|sendmsg|write)")
_PIPE: Final = re.compile(r"^(anon_|fifo_)?pipe_(read|write)$")
_TERMINAL: Final = re.compile(r"^(n_)?tty_(read|write)$|^file_tty_write$")
_MUTEX: Final = re.compile(
    r"^(PyThread_acquire_lock\w*|__lll_lock_wait\w*|_*pthread_(mutex_\w*lock|rwlock_\w+)|_PyMutex_\w+"
    r"|PyMutex_Lock)$"
)


def doing_of(thread: ThreadStack, use: LockUse = LockUse.NONE) -> Doing:
    """What a thread does. `use`: what it has to do with the interpreter lock."""
    functions = [one.function for one in thread.frames if one.kind == "kernel"]
    calls = (match[1] for match in map(_SYSCALL.match, reversed(functions)) if match)
    call = next((one for one in calls if one in _KNOWN), "")
    if thread.state != "R" and any(map(_FAULT.search, functions)):
        return Doing.MEMORY
    found = _OF_SYSCALL.get(call, Doing.UNKNOWN)
    if call in _FUTEX:
        found = Doing.GIL if use == LockUse.WAITS else _of_futex(thread.frames)
    elif call in _READS or call in _WRITES:
        found = _of_file(functions, _READ if call in _READS else _WRITE)
    return found if thread.state != "R" or found.is_file else Doing.UNKNOWN


def _of_file(functions: Sequence[str], by_kind: dict[str, Doing]) -> Doing:
    """A read or write, by what of: the kernel's functions below the system call."""
    if any(map(_TERMINAL.match, functions)):
        return Doing.TERMINAL
    if any(map(_SOCKET.match, functions)):
        return by_kind["socket"]
    return by_kind["pipe" if any(map(_PIPE.match, functions)) else ""]


def _of_futex(frames: Collection[Frame]) -> Doing:
    """A wait on a futex: for a lock, or for another thread in a queue, a future, a condition."""
    python = next((one for one in frames if one.kind == "python"), None)
    if python and kind_of_file(python.file, python.function, python.origin) == CodeKind.QUEUE:
        return Doing.THREAD
    native = [one for one in frames if one.kind in ("user", "inlined")]
    kinds = {kind_of_native(one.binary, one.function, one.origin) for one in native}
    if CodeKind.QUEUE in kinds:
        return Doing.THREAD
    return Doing.LOCK if any(_MUTEX.match(one.function) for one in native) else Doing.FUTEX
