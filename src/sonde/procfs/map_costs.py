# SPDX-License-Identifier: Apache-2.0
"""What the map lock of a process costs a uprobe: how often it is taken, and how long that takes.

Part of the child of `procfs.broker` (serve.py), and of `procfs.map_locks`, which decides.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING or __package__:
    from sonde.procfs.proc_folder import here
else:
    from proc_folder import here

NOWHERE = 0x7FFF_FFFF_FFFF_F000
"""An address at and above which no process has memory."""
MAX_TASKS = 8
"""Threads asked for the memory of a process whose first thread has ended."""
MAX_MAPS_BYTES = 32 << 20
"""Of a /proc/PID/maps that are read."""
MANY = 4096
"""Mappings of one file; more are not counted."""
ANSWERED_S = 0.1
"""A map lock that takes longer was held by somebody."""
CONTENDED_S = 0.001
"""One that takes longer is taken three times, and the median counts."""
ORDINARY = 4
"""Mappings over one place of a file that any process may have: the loader makes one or two."""
MAX_OF_PROCESS = 32
"""Such mappings of one process: the kernel takes its lock for each, for each probed function."""
MAX_OF_PARTY = 256
"""The same of all processes of a party, beyond the ordinary ones of each."""
MAX_WAIT_S = 0.05
"""What the kernel may wait for the locks of one party, for one probed function: so long no fork on
the machine returns."""


def read_start(path: str, size: int) -> bytes:
    """The first bytes of a file of the kernel's."""
    with open(here(path), "rb", buffering=0) as file:  # noqa: PTH123
        return file.read(size)


def tasks_of(pid: int) -> list[str]:
    """The folder of a process, and those of threads that may have its memory where it has not."""
    try:
        tids = os.listdir(here(f"/proc/{pid}/task"))  # noqa: PTH208
    except OSError:
        tids = []
    others = [f"/proc/{pid}/task/{tid}" for tid in tids if tid != str(pid)]
    return [f"/proc/{pid}", *others[:MAX_TASKS]]


def take_map_lock(pid: int) -> None:
    """Wait until the lock of a process's memory map (mmap_lock) can be had, and let it go.

    It is done by a read at NOWHERE, for which the kernel looks for a stack that could be grown. For
    that it takes the lock for writing, as a uprobe does (Linux 6.5, 6.1.37, 6.3.11: mm/memory.c,
    expand_stack), in older kernels for reading. Nothing of the process is read or changed.
    """
    for task in tasks_of(pid):
        try:
            fd = os.open(here(f"{task}/mem"), os.O_RDONLY | os.O_CLOEXEC)
        except PermissionError:  # pagemap needs fewer rights, but takes the lock for reading alone
            read_start(f"{task}/pagemap", 8)
            return
        except OSError:
            continue  # it has no memory
        try:
            if os.pread(fd, 1, NOWHERE) == b"":
                continue  # nor has this
        except OSError:
            pass  # there is nothing at that address
        finally:
            os.close(fd)
        return


def map_lock_wait_s(pid: int) -> float:
    """How long this thread waited for the map lock of a process, without its own work and its waits
    for a CPU. Raises OSError."""
    first_s = _lock_wait_s(pid)
    if first_s < CONTENDED_S:
        return first_s
    return sorted((first_s, _lock_wait_s(pid), _lock_wait_s(pid)))[1]


def _lock_wait_s(pid: int) -> float:
    began_s = time.perf_counter() - time.thread_time() - _run_queue_s()
    take_map_lock(pid)
    return time.perf_counter() - time.thread_time() - _run_queue_s() - began_s


def _run_queue_s() -> float:
    with suppress(OSError, IndexError):
        return int(read_start("/proc/thread-self/schedstat", 128).split()[1]) / 1e9
    return 0.0


def times_mapped(fd: int, inode: int) -> int | None:
    """How many private mappings of a file, in the /proc/PID/maps `fd`, cover the same place of it,
    with any rights: so often the lock is taken for one uprobe there. MANY where there are more, or
    the list is too long; None of an empty list.

    The file is found by its inode alone: each overlayfs above it shows another device.
    """
    line = re.compile(rb"(?:^|\n)(\w+)-(\w+) \S{3}p (\w+) \S+ %d(?=[ \n])" % inode)
    word = b" %d" % inode
    seen, rest, ends = 0, b"", list[tuple[int, int]]()
    while piece := os.read(fd, 1 << 16):
        seen += len(piece)
        text = rest + piece
        if word in text:
            end = text.rfind(b"\n") + 1
            for found in line.finditer(text, 0, end):
                start, stop, at = (int(it, 16) for it in found.groups())
                ends += (at, 1), (at + stop - start, -1)
        if seen >= MAX_MAPS_BYTES or len(ends) > 2 * MANY:
            return MANY
        rest = b"\n" + text.rpartition(b"\n")[2]
    most = depth = 0
    for _, step in sorted(ends):  # at one place, ends (-1) come before begins (1)
        depth += step
        most = max(most, depth)
    return most if seen else None


def cost_of(pid: int, inode: int) -> tuple[int, float]:
    """How often a process's lock is taken for a uprobe in a file, and how long each takes (s)."""
    times = 0
    for task in tasks_of(pid):
        with open(here(f"{task}/maps"), "rb", buffering=0) as file:  # noqa: PTH123
            found = times_mapped(file.fileno(), inode)
        if found is not None:
            times = found
            break
    return times, map_lock_wait_s(pid) if times else 0.0


def too_much(costs: list[tuple[int, int, float]]) -> int | None:
    """The first process of one party's (process, times, wait) with which the limits above are
    exceeded, by itself or together with those before it; None: they are not."""
    surplus, wait_s = 0, 0.0
    for pid, times, each_s in costs:
        surplus += max(0, times - ORDINARY)
        wait_s += times * each_s
        if times > MAX_OF_PROCESS or surplus > MAX_OF_PARTY or wait_s > MAX_WAIT_S:
            return pid
    return None


def wait_until_removable(inodes: set[int]) -> None:
    """Return once no process of the machine keeps its map lock, and none has mapped one of these
    files too often."""
    pause_s = 0.1
    while True:
        longest_s, is_crowded = 0.0, False
        for name in os.listdir(here("/proc")):  # noqa: PTH208
            if name.isdecimal():
                began_s = time.monotonic()
                with suppress(OSError):
                    for inode in inodes:
                        times, wait_s = cost_of(int(name), inode)
                        is_crowded |= too_much([(int(name), times, wait_s)]) is not None
                    take_map_lock(int(name))
                longest_s = max(longest_s, time.monotonic() - began_s)
        if longest_s < ANSWERED_S and not is_crowded:
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 2.0)
