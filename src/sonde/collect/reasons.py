# SPDX-License-Identifier: Apache-2.0
"""What a thread waits for: by the system call that it is in, or by how else it left its CPU."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_NOT_CALLS = {
    -1: "preempted",
    -2: "page fault",
    -3: "stopped",
    -4: "kernel thread",
    -5: "new thread",
}
"""`enum wait_reason` of abi/events.h."""

_CLASSES: dict[str, tuple[str, ...]] = {
    "futex": ("futex", "futex_wait", "futex_waitv", "futex_requeue"),
    "poll": (
        *("poll", "ppoll", "select", "pselect6", "epoll_wait", "epoll_pwait", "epoll_pwait2"),
        *("io_getevents", "io_pgetevents", "io_uring_enter"),
    ),
    "sleep": ("nanosleep", "clock_nanosleep"),
    "read": ("read", "pread64", "readv", "preadv", "preadv2", "splice", "sendfile", "tee"),
    "write": ("write", "pwrite64", "writev", "pwritev", "pwritev2", "vmsplice"),
    "sync to disk": ("fsync", "fdatasync", "sync", "syncfs", "sync_file_range", "msync"),
    "socket": (
        *("accept", "accept4", "connect", "recvfrom", "recvmsg", "recvmmsg"),
        *("sendto", "sendmsg", "sendmmsg"),
    ),
    "child": ("wait4", "waitid", "vfork", "clone", "clone3"),
    "signal": ("pause", "rt_sigsuspend", "rt_sigtimedwait"),
    "driver": ("ioctl",),
    "file": (
        *("open", "openat", "openat2", "close", "stat", "fstat", "lstat", "newfstatat", "statx"),
        *("getdents64", "unlink", "unlinkat", "rename", "renameat2", "flock", "fcntl", "ftruncate"),
    ),
    "memory": ("mmap", "munmap", "mprotect", "madvise", "brk", "mremap", "mlock", "migrate_pages"),
    "message queue": ("msgrcv", "msgsnd", "semop", "semtimedop", "mq_timedreceive", "mq_timedsend"),
}
_CLASS_OF = {call: name for name, calls in _CLASSES.items() for call in calls}


@dataclass(frozen=True, slots=True)
class ReasonNames:
    """The class of a wait and the system call, by reason: the call's number, or one of
    _NOT_CALLS."""

    names: dict[int, str]
    calls: dict[int, str]


@cache
def reason_names() -> ReasonNames:
    """All reasons known on this machine."""
    table = json.loads(files(__package__).joinpath("syscalls.json").read_text())
    calls = dict(enumerate(table.get(platform.machine(), [])))
    names = {nr: _CLASS_OF.get(call, "system call") for nr, call in calls.items()}
    return ReasonNames(names | _NOT_CALLS, calls)


def reason_of(nr: int) -> tuple[str, str]:
    """(class of the wait, system call or '') for a reason as the kernel side numbers it."""
    known = reason_names()
    return known.names.get(nr, "system call"), known.calls.get(nr, "" if nr < 0 else f"call {nr}")
