# SPDX-License-Identifier: Apache-2.0
"""Who is at the other end of the sockets that threads wait on: of a few threads at a time, where
the process itself connected. A sample, as stacks are; it runs on little CPU time and with bounds,
because any process may have any number of sockets."""

from __future__ import annotations

import random
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from typing import Final, TypeVar

from sonde import procfs
from sonde.collect.reasons import reason_of
from sonde.model.rows import ActivityTuple

LEAST_WAIT_NS: Final = 50_000_000
"""A thread that waited in sockets for less of a tick is not looked at."""
LOOKS: Final = 64
"""At threads in one tick at most, of as many processes as possible."""
ROUNDS: Final = 8
"""Looks at one thread in a tick at most."""
BURST_S: Final = 0.15
"""CPU time of the first looks: a short recording is to know, too. The tables of a network namespace
take 10 ms, and the descriptors of a process 0.2."""
SHARE: Final = 0.001
"""Of one core, for looks after that."""
WALL_S: Final = 0.1
"""No further look, and no further step of a search, in a tick after this."""
LOOK_PART: Final = 0.6
"""Of that, for looks."""
MAX_DESCRIPTORS: Final = 4_096
"""Of a process, that are searched for the socket at the other end."""
MAX_KNOWN: Final = 1_024
"""Connections that are remembered: the ones looked at last."""
MAX_SEARCHES: Final = 32
"""Addresses whose processes are searched for, or remembered."""
MAX_SEARCHED: Final = 4_096
"""Processes that are asked in one search at most."""
MAX_TABLES: Final = 4
"""Network namespaces whose connections are read in one tick: 2 MiB each."""
MAX_HOLDERS: Final = 8
"""Processes at one address that are remembered: workers of one service."""
AGAIN_S: Final = 10.0
"""After this, processes are searched for those at an address again."""
_REASONS: Final = ("socket", "poll", "read", "write")
_OF_DESCRIPTOR: Final = frozenset(
    (
        *("read", "readv", "write", "writev", "recvfrom", "recvmsg", "recvmmsg", "connect"),
        *("sendto", "sendmsg", "sendmmsg"),
    )
)
"""System calls whose first argument is the descriptor that is waited for."""


@dataclass(slots=True)
class _Search:
    """For the processes that have sockets at one address open."""

    waiting: deque[int] = field(default_factory=deque)
    """Processes to be asked yet."""
    holders: list[int] = field(default_factory=list)
    """Those that had one."""
    next_s: float = 0.0
    """When all processes may be asked again (time.monotonic)."""


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
Who = tuple[int, int, int]
"""(pid, start_ns, tid)"""


class PeerLooks:
    """Looks at threads that waited in sockets for long."""

    def __init__(self) -> None:
        self._left_s, self._since_s = BURST_S, time.monotonic()
        self._ends: dict[int, procfs.OtherEnd] = {}
        """By inode of a process's socket."""
        self._searches: dict[str, _Search] = {}
        """By address."""
        self._holders: dict[int, tuple[int, str]] = {}
        """By inode of the socket at the other end: the process that has it, and what it runs."""
        self.cut = 0
        """Looks at which there were more sockets or descriptors than are read."""

    def rows(self, since_ns: int, activity: Iterable[ActivityTuple]) -> list[ActivityTuple]:
        """Rows of `activity`, kind peer, on some of the threads that waited, by their rows of one
        tick."""
        now_s = time.monotonic()
        self._left_s = min(BURST_S, self._left_s + SHARE * (now_s - self._since_s))
        self._since_s = now_s
        if self._left_s <= 0:
            return []
        began_s = _spent_s()
        found = self._look(since_ns, activity, now_s)
        self._left_s -= max(0.0, _spent_s() - began_s)
        return found

    def _look(
        self, since_ns: int, activity: Iterable[ActivityTuple], now_s: float
    ) -> list[ActivityTuple]:
        threads, processes = _waiting(activity)
        ends: list[tuple[Who, procfs.OtherEnd]] = []
        tables: dict[str, procfs.TcpTables] = {}
        # Of few threads each is looked at several times: they wait for this and for that.
        for who in islice(chain.from_iterable(repeat(threads, ROUNDS)), LOOKS):
            if time.monotonic() > now_s + LOOK_PART * WALL_S:
                break
            if (end := self._end(who, tables)) is not None:
                ends.append((who, end))
        found = []
        for who, end in ends:
            pid, name = self._holder(end, processes, now_s + WALL_S)
            totals = (1, 0, 0, 0, pid, 0)
            found.append((since_ns, "peer", end.address, end.protocol, name, "", 0, *who, *totals))
        return found

    def _end(self, who: Who, tables: dict[str, procfs.TcpTables]) -> procfs.OtherEnd | None:
        """The other end of what a thread waits on now; None: not known, or others connected."""
        pid = who[0]
        with suppress(OSError):
            number = _descriptor(pid, who[2])
            link = procfs.read_link(f"/proc/{pid}/fd/{number}") if number >= 0 else ""
            if not link.startswith("socket:["):
                return None
            inode = int(link[8:-1])
            end = self._ends.pop(inode, None)
            if end is None:
                end = self._read_end(pid, inode, tables)
            if end is None:
                return None
            _keep(self._ends, inode, end)
            return end if end.asked else None
        return None

    def _read_end(
        self, pid: int, inode: int, tables: dict[str, procfs.TcpTables]
    ) -> procfs.OtherEnd | None:
        namespace = procfs.read_link(f"/proc/{pid}/ns/net")
        if namespace not in tables:
            if len(tables) >= MAX_TABLES:
                self.cut += 1
                return None
            tables[namespace] = procfs.TcpTables(pid)
            self.cut += tables[namespace].is_cut
        end = tables[namespace].of(inode)
        if end is None and namespace == procfs.read_link("/proc/self/ns/net"):
            end = procfs.unix_end(inode)
        return end

    def _holder(
        self, end: procfs.OtherEnd, processes: Iterable[int], until_s: float
    ) -> tuple[int, str]:
        """(process that has the socket at the other end open, what it runs), as far as that is
        found in time; (0, '') not. `processes`: those that wait for sockets, which are asked first.
        """
        if not end.inode:
            return 0, ""
        if (known := self._holders.pop(end.inode, None)) is not None:
            _keep(self._holders, end.inode, known)
            return known
        search = self._searches.pop(end.address, None) or _Search()
        _keep(self._searches, end.address, search, MAX_SEARCHES)
        for pid in search.holders:
            if self._has(pid, end.inode):
                return self._found(search, pid, end.inode)
        if not search.waiting and time.monotonic() >= search.next_s:
            every = dict.fromkeys([*processes, *procfs.may_hold(end.user)])
            self.cut += len(every) > MAX_SEARCHED
            search.waiting.extend(islice(every, MAX_SEARCHED))
            search.next_s = time.monotonic() + AGAIN_S
        while search.waiting and time.monotonic() < until_s:
            pid = search.waiting.popleft()
            if self._has(pid, end.inode):
                return self._found(search, pid, end.inode)
        return 0, ""

    def _has(self, pid: int, inode: int) -> bool:
        """Whether a process has a socket open."""
        try:
            links, is_cut = procfs.links_of(pid, MAX_DESCRIPTORS, f"socket:[{inode}]")
        except OSError:
            return False
        self.cut += is_cut and not links
        return bool(links)

    def _found(self, search: _Search, pid: int, inode: int) -> tuple[int, str]:
        search.waiting.clear()
        search.next_s = 0.0
        search.holders = [pid, *(it for it in search.holders if it != pid)][:MAX_HOLDERS]
        found = pid, _name(pid)
        _keep(self._holders, inode, found)
        return found


def _waiting(activity: Iterable[ActivityTuple]) -> tuple[list[Who], list[int]]:
    """(threads that waited long for what may be a socket, one of each process first, those that
    waited longest most likely first; processes that waited for sockets)."""
    waited: dict[Who, int] = defaultdict(int)
    processes: dict[int, None] = {}
    for row in activity:
        if row[1] != "blocked" or row[2] not in _REASONS:
            continue
        processes[row[7]] = None
        if row[4] in _OF_DESCRIPTOR:
            waited[row[7], row[8], row[9]] += row[11]
    long = [(who, ns) for who, ns in waited.items() if ns >= LEAST_WAIT_NS]
    long.sort(key=lambda one: one[1] * random.random(), reverse=True)
    turn: dict[int, int] = defaultdict(int)
    turns: list[tuple[int, Who]] = []
    for who, _ in long:
        turns.append((turn[who[0]], who))
        turn[who[0]] += 1
    turns.sort(key=lambda one: one[0])
    return [who for _, who in turns], [*processes]


def _descriptor(pid: int, tid: int) -> int:
    """The descriptor on which a thread waits now; -1 where it waits for anything else."""
    # NR ARG1 … ARG6 SP PC, or "running" (proc_pid_syscall(5)).
    words = (procfs.read_file(f"/proc/{pid}/task/{tid}/syscall", 256) or b"").split()
    if (
        len(words) < 2
        or not words[0].isdigit()
        or reason_of(int(words[0]))[1] not in _OF_DESCRIPTOR
    ):
        return -1
    number = int(words[1], 16)
    return number if number < 1 << 31 else -1


def _name(pid: int) -> str:
    """What a process runs: its script, else the kernel's name of it."""
    comm = procfs.read_comm(pid, pid) or ""
    return procfs.with_comm(procfs.scripts_of([pid])[0] or "", comm) or comm


def _spent_s() -> float:
    """CPU time of this thread, and of the child that reads for it."""
    return time.thread_time() + procfs.BROKER.cpu_s()


def _keep(known: dict[_Key, _Value], key: _Key, value: _Value, most: int = MAX_KNOWN) -> None:
    """As the last one of a dictionary of at most `most`."""
    known.pop(key, None)
    known[key] = value
    while len(known) > most:
        del known[next(iter(known))]
