# SPDX-License-Identifier: Apache-2.0
"""Which processes there are, and what /proc shows of one; None where it is gone."""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from sonde.procfs import lookups
from sonde.procfs.broker import BROKER
from sonde.procfs.files import read_file, read_link
from sonde.procfs.ids import ids_of, is_gone
from sonde.procfs.looks import LOOK_DEADLINE_S, PATIENT_S
from sonde.procfs.names import printable, text

START_UNIT_NS: Final = 10_000_000
"""Starts of processes are cut to this, the unit of /proc."""
MAX_PARENTS: Final = 64
"""Of one process, that are followed."""
_TICK_NS: Final = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_ENDED: Final = "ZXx"
_MAX_COMPLETED: Final = 256
"""Processes whose first thread has ended before others, completed in one call of read_stats."""
_COMPLETE_S: Final = 0.05
"""How long that may take, and one process more."""
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_known_pids: list[int] = []
"""As they were listed last."""


@dataclass(frozen=True, slots=True)
class Stat:
    """Of /proc/PID/stat (proc_pid_stat(5)), fields 2, 3, 4, 14 to 17, 20, 22, 24 and 26."""

    comm: str
    state: str
    """One letter. Of the first thread; where that has ended before others, of one of them."""
    ppid: int
    start_ns: int
    """Since boot, cut to START_UNIT_NS."""
    cpu_ns: int
    """User and system time, of a process with all its threads; in ticks, of 10 ms as a rule."""
    resident_bytes: int
    start_code: int
    """Address of its code; 0 of kernel threads and of processes that are exiting."""
    threads: int = 1
    children_ns: int = 0
    """User and system time of its children that it has waited for, in ticks, and of theirs."""

    @property
    def goes_on(self) -> bool:
        """Whether any thread of the process still runs."""
        return self.state not in _ENDED


@dataclass(frozen=True, slots=True)
class Credentials:
    """Whose process it is, and which pid it has in its own namespace."""

    uids: tuple[int, ...]
    """Real and effective."""
    inner_pid: int
    levels: int
    """Pid namespaces from ours down to its own; 1: they are the same; 0: that is not known."""


def pids() -> list[int]:
    """Every process that /proc shows; that it showed before, while that is kept locked."""
    with suppress(OSError):  # it is kept locked, or the child that was asked ended
        _known_pids[:] = [int(name) for name in lookups.names_in("/proc") if name.isdecimal()]
    return list(_known_pids)


def read_stat(pid: int, tid: int = 0) -> Stat | None:
    """The basics of a process, or of one of its threads; None where it is gone."""
    if is_gone(pid):
        return None  # where many processes are short-lived, asking would take most of the time
    if tid:
        return _stat(read_file(f"/proc/{pid}/task/{tid}/stat"))
    return _completed(pid, _stat(read_file(f"/proc/{pid}/stat")))


def read_stats(pids: Sequence[int], *, is_patient: bool = False) -> list[Stat | None]:
    """The basics of many processes, which costs much less than one after the other. None, too, of
    those that are not read in the time that a look may take (`Broker.each`)."""
    raws = BROKER.each(pids, [f"/proc/{pid}/stat" for pid in pids], 4096, is_patient=is_patient)
    found = [_stat(raw) for raw in raws]
    headless = [at for at, it in enumerate(found) if it and not it.goes_on and it.threads > 1]
    until_s = time.monotonic() + (PATIENT_S if is_patient else _COMPLETE_S)
    for number, at in enumerate(headless[:_MAX_COMPLETED]):
        if time.monotonic() > until_s:
            BROKER.put_off(len(headless) - number)
            break
        found[at] = _completed(pids[at], found[at])
    return found


def busiest(count: int) -> list[int]:
    """Up to `count` processes that most likely run next: those that use a CPU now first, then by
    CPU time since their start. Kernel threads and processes that are exiting are left out."""
    there = pids()
    found = [
        ((stat.state == "R", stat.cpu_ns), pid)
        for pid, stat in zip(there, read_stats(there), strict=True)
        if stat is not None and stat.start_code and stat.goes_on
    ]
    return [pid for _, pid in heapq.nlargest(count, found)]


def memory_task(pid: int) -> int:
    """The thread below whose number in /proc the memory, files and folders of a process are seen:
    `pid`, unless its first thread has ended before another."""
    try:
        task: int = BROKER.ask(pid, ("task", pid), deadline_s=LOOK_DEADLINE_S)
    except OSError:
        return pid
    return task


def _completed(pid: int, found: Stat | None) -> Stat | None:
    """With the fields of another thread that a first thread has lost by its end."""
    if found is None or found.goes_on or found.threads < 2:
        return found
    task = memory_task(pid)
    other = _stat(read_file(f"/proc/{task}/stat")) if task != pid else None
    if other is None:
        return found
    return replace(
        found,
        state=other.state,
        resident_bytes=other.resident_bytes,
        start_code=other.start_code,
    )


def _stat(raw: bytes | None) -> Stat | None:
    # The name may hold anything, parentheses too.
    before, parenthesis, after = (raw or b"").rpartition(b") ")
    fields = after.split()
    if not parenthesis or len(fields) < 24:
        return None
    start_ns = int(fields[19]) * _TICK_NS
    return Stat(
        comm=text(before.partition(b" (")[2]),
        state=fields[0].decode(),
        ppid=int(fields[1]),
        start_ns=start_ns - start_ns % START_UNIT_NS,
        cpu_ns=(int(fields[11]) + int(fields[12])) * _TICK_NS,
        resident_bytes=int(fields[21]) * _PAGE_BYTES,
        start_code=int(fields[23]),
        threads=int(fields[17]),
        children_ns=(int(fields[13]) + int(fields[14])) * _TICK_NS,
    )


def parents(pid: int) -> Iterator[int]:
    """The parent of the process, its parent, and so on, as far as they are still there."""
    for _ in range(MAX_PARENTS):
        stat = read_stat(pid)
        if stat is None or stat.ppid < 1:
            return
        pid = stat.ppid
        yield pid


def descends(pid: int, roots: Container[int]) -> bool:
    """Whether it is one of `roots` or descends from one; not by pid 1, which adopts orphans."""
    return pid in roots or any(parent in roots for parent in parents(pid) if parent > 1)


def family(roots: Iterable[int], *, is_patient: bool = False) -> set[int]:
    """These processes and all that descend from them now. `is_patient`: as in `read_stats`."""
    waiting = list(roots)
    children: dict[int, list[int]] = {}
    there = pids() if waiting else []
    for pid, stat in zip(there, read_stats(there, is_patient=is_patient), strict=True):
        if stat is not None:
            children.setdefault(stat.ppid, []).append(pid)
    found: set[int] = set()
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, ())
    return found


def tids(pid: int) -> set[int]:
    """The threads that a process has now. Takes none of its locks."""
    try:
        return set(map(int, lookups.names_in(f"/proc/{pid}/task")))
    except OSError:
        return set()


def inner_tids(pid: int, tids: Sequence[int]) -> dict[int, int]:
    """What threads of a process are called in their own pid namespace, by thread id; those that
    have ended are left out."""
    paths = [f"/proc/{pid}/task/{tid}/status" for tid in tids]
    found = {}
    for tid, raw in zip(tids, BROKER.each([pid] * len(tids), paths, 4096), strict=True):
        numbers = (raw or b"").partition(b"\nNSpid:")[2].partition(b"\n")[0].split()
        if numbers and numbers[-1].isdigit():
            found[tid] = int(numbers[-1])
    return found


def read_comm(pid: int, tid: int) -> str | None:
    """The name of a thread; None where it is gone."""
    raw = read_file(f"/proc/{pid}/task/{tid}/comm")
    return None if raw is None else text(raw.rstrip(b"\n"))


def read_exe(pid: int) -> str:
    """File name of the executable; '' of a kernel thread, and where it cannot be read."""
    try:
        path = read_link(f"/proc/{pid}/exe", LOOK_DEADLINE_S)
    except OSError:
        return ""
    return printable(path.removesuffix(" (deleted)").rpartition("/")[2])


def read_credentials(pid: int) -> Credentials | None:
    """The user ids and pids of a process; None where it is gone."""
    found = ids_of(pid)
    if found is None:
        return None
    inner = found.pids[-1] if found.pids else pid
    return Credentials((found.uid, found.effective), inner, found.levels)


def has_threads(pid: int) -> bool:
    """Whether any thread of the process still runs; its first one may have ended before others."""
    found = read_stat(pid)
    return found is not None and found.goes_on
