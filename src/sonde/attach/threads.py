# SPDX-License-Identifier: Apache-2.0
"""Which of a process's threads may be borrowed; `_native` checks again once one is stopped."""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sonde import procfs
from sonde.attach import sockets
from sonde.attach.glibc import Mapped
from sonde.attach.process import read_status

SAFE_CALLS: Final = {
    7: "poll", 271: "ppoll", 23: "select", 270: "pselect6", 232: "epoll_wait", 281: "epoll_pwait",
    35: "nanosleep", 230: "clock_nanosleep", 0: "read", 45: "recvfrom", 47: "recvmsg", 43: "accept",
    288: "accept4", 61: "wait4", 247: "waitid", 128: "rt_sigtimedwait", 34: "pause",
}  # fmt: skip
"""System calls of x86-64, by number, that sleep, that C libraries make outside their own locks, and
that the kernel restarts unnoticed. No futex: a thread that waits for one may hold another."""

_READ: Final = 0
_QUEUES: Final = ("pipe:", "socket:", "anon_inode:")
"""How links of descriptors begin that a read() waits at without a lock of a file system."""
_SOCKET: Final = "socket:"
_EPOLL: Final = (232, 281)
_SIGTIMEDWAIT: Final = 128
_ON_SOCKETS: Final = (45, 47, 43, 288)
_FLAGS_OF: Final = {45: 4, 47: 3}  # of recvfrom and recvmsg: which argument has the flags
_MSG_WAITALL: Final = 0x100
_FOREVER: Final = 0xFFFFFFFF  # epoll_wait's timeout -1
_MAIN_STACK: Final = "[stack]"
_STACK_GROWS_BYTES: Final = 4 << 20  # a load needs no more below the mapped part
_GUARD_GAP_BYTES: Final = 1 << 20  # the kernel's stack_guard_gap


@dataclass(frozen=True, slots=True)
class Sleeper:
    """A thread asleep where it may be borrowed."""

    tid: int
    inner_tid: int
    call: int
    """Number of the system call that it is in."""
    sp: int
    """Its stack pointer."""
    stack: tuple[int, int]
    """The lowest address that it may grow down to, and the end of its mapping."""
    is_main: bool
    filters: int
    """Seccomp filters on it; -1: some, the kernel does not show how many."""
    starts_over: bool
    """Whether its call may have a timeout that starts from 0 when the call is restarted."""


def sleepers(
    pid: int,
    mappings: list[Mapped],
    proc: Path = Path("/proc"),
    until_s: float = math.inf,
) -> Iterator[Sleeper]:
    """Threads that may be borrowed, the main one last. Raises OSError when the process is gone.

    `mappings`: a thread whose stack is in none is left out: it was made since they were read.
    `until_s`: no thread is looked at after this time (time.monotonic).
    """
    starts = [m.start for m in mappings]
    tids = sorted((int(p.name) for p in (proc / str(pid) / "task").iterdir()), reverse=True)
    began_s = time.monotonic()
    positions = _positions(proc / str(pid), tids, began_s + (until_s - began_s) / 2)
    for tid in sorted(tids, key=lambda tid: tid == pid):
        if time.monotonic() > until_s:
            return
        seen = _sleeping(pid, proc / f"{pid}/task/{tid}")
        if seen is None:
            continue
        call, sp, starts_over = seen
        status = read_status(pid, tid, proc)
        index = bisect_right(starts, sp) - 1
        if status is None or index < 0 or sp >= mappings[index].end:
            continue
        # Stacks without a guard page may share a mapping: below its own there is another one's.
        if _is_between(positions, mappings[index].start, sp):
            continue
        is_main = tid == pid
        stack = _stack(pid, mappings, index, is_main)
        if stack is None or status.seccomp == 1:
            continue
        filters = status.filters if status.seccomp == 2 else 0
        if status.seccomp == 2 and not filters:
            filters = -1  # an older kernel does not count them
        yield Sleeper(tid, status.inner_tid, call, sp, stack, is_main, filters, starts_over)


def _positions(process: Path, tids: Sequence[int], until_s: float) -> list[int]:
    """The stack pointers of the threads that sleep, in order."""
    found = []
    for tid in tids:
        if time.monotonic() > until_s:
            break
        with suppress(OSError, ValueError):
            # As in `_sleeping`; in no system call it is 'NR SP PC'.
            words = (process / f"task/{tid}/syscall").read_text().split()
            if len(words) in (3, 9):
                found.append(int(words[-2], 16))
    return sorted(found)


def _is_between(positions: Sequence[int], low: int, high: int) -> bool:
    """Whether one of these is at `low` or above, and below `high`."""
    at = bisect_left(positions, low)
    return at < len(positions) and positions[at] < high


def _sleeping(pid: int, task: Path) -> tuple[int, int, bool] | None:
    """(number of the call, stack pointer, whether its timeout may start over) of a thread in a safe
    call; None of any other."""
    try:
        # NR ARG1 … ARG6 SP PC, or "running" (proc_pid_syscall(5)).
        words = (task / "syscall").read_text().split()
        if len(words) != 9 or int(words[0]) not in SAFE_CALLS:
            return None
        call, arguments = int(words[0]), [int(word, 16) for word in words[1:7]]
        target = ""
        if call == _READ or call in _FLAGS_OF:
            target = os.readlink(task / "fd" / str(arguments[0]))  # noqa: PTH115
        if call == _READ and not target.startswith(_QUEUES):
            # Reading a regular file ends soon, and may hold locks of the file system.
            return None
        # Interrupted, these would return what has come so far.
        if call in _FLAGS_OF and arguments[_FLAGS_OF[call] - 1] & _MSG_WAITALL:
            return None
        if target.startswith(_SOCKET) and sockets.low_water_mark(pid, arguments[0], target) != 1:
            return None
        return call, int(words[7], 16), _starts_over(call, arguments, target)
    except (OSError, ValueError):
        return None


def _starts_over(call: int, arguments: list[int], target: str) -> bool:
    """poll, select and sleep are restarted with the time that is left; these with the full one."""
    if call in _EPOLL:
        return arguments[3] & _FOREVER != _FOREVER
    if call == _SIGTIMEDWAIT:
        return arguments[2] != 0
    return call in _ON_SOCKETS or target.startswith(_SOCKET)  # may have SO_RCVTIMEO


def _stack(pid: int, mappings: list[Mapped], index: int, is_main: bool) -> tuple[int, int] | None:
    """`Sleeper.stack`, by the mapping that holds the stack pointer; None: it is no usual stack."""
    stack = mappings[index]
    if not stack.prot.startswith("rw"):
        return None
    if not is_main:
        return stack.start, stack.end
    if stack.path != _MAIN_STACK:
        return None  # a stack that the program made
    low = stack.start - _STACK_GROWS_BYTES
    if index:
        low = max(low, mappings[index - 1].end + _GUARD_GAP_BYTES)
    limit = _stack_limit_bytes(pid)
    if limit is not None:
        low = max(low, stack.end - limit)
    return min(low, stack.start), stack.end


def _stack_limit_bytes(pid: int) -> int | None:
    """The soft limit of its main stack; None: unlimited. Raises OSError when it is gone.

    Read from /proc, as prlimit(2) needs one capability more, CAP_SYS_RESOURCE.
    """
    for line in procfs.read_lines(f"/proc/{pid}/limits"):
        if line.startswith("Max stack size"):
            soft = line.split()[3]
            return None if soft == "unlimited" else int(soft)
    return None
