# SPDX-License-Identifier: Apache-2.0
"""Who is at the other end of the sockets that threads wait on: of a few threads at a time, where
the process itself connected. A sample, as stacks are; it runs on little CPU time and with bounds,
because any process may have any number of sockets.

A thread that waits for any of several descriptors (poll, select, epoll) waits for a process where
all sockets among them lead to one that it asked. Where it asked several, or where others asked it,
too, these are candidates. Where only others asked, it is a server between two requests."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeVar

from sonde import procfs
from sonde.collect.awaited_sockets import OF_DESCRIPTOR, OF_SEVERAL, awaited_sockets
from sonde.collect.look_turns import LookTurns, Who
from sonde.model.rows import ActivityTuple

LEAST_WAIT_NS: Final = 50_000_000
"""A thread that waited in sockets for less of a tick is not looked at."""
LOOKS: Final = 64
"""At threads in one tick at most, of as many parties and processes as possible."""
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
MAX_CANDIDATES: Final = 4
"""Addresses that one wait may be for; where there are more, none is named."""
_REASONS: Final = ("socket", "poll", "read", "write")
_CALLS: Final = OF_DESCRIPTOR | OF_SEVERAL
PEER: Final = "peer"
"""Kind of a row: the thread waited for this one."""
CANDIDATE: Final = "peer-candidate"
"""Kind of a row: it waited for this one, or for another socket."""
CLIENT: Final = "client"
"""Kind of a row: it waited for what others, who had connected to it, ask next."""


@dataclass(frozen=True, slots=True)
class _Ends:
    """What the sockets that a thread waits on lead to."""

    asked: Sequence[procfs.OtherEnd] = ()
    """By its process, each address once."""
    clients: bool = False
    """There are some by which others asked."""
    others: bool = False
    """There are some that listen, or of which that is not known."""
    is_last: bool = False
    """Further looks in this tick would find the same: the thread polls what it serves."""


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


class PeerLooks:
    """Looks at threads that waited in sockets for long."""

    def __init__(self) -> None:
        self._left_s, self._since_s = BURST_S, time.monotonic()
        self._turns = LookTurns()
        self._ends: dict[int, procfs.OtherEnd] = {}
        """By inode of a process's socket."""
        self._searches: dict[str, _Search] = {}
        """By address."""
        self._holders: dict[int, tuple[int, str]] = {}
        """By inode of the socket at the other end: the process that has it, and what it runs."""
        self.cut = 0
        """Looks at which there were more sockets or descriptors than are read."""

    def rows(self, since_ns: int, activity: Iterable[ActivityTuple]) -> list[ActivityTuple]:
        """Rows of `activity`, of kinds PEER, CANDIDATE and CLIENT, on some of the threads that
        waited, by their rows of one tick."""
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
        waited, processes = _waiting(activity)
        looks: list[tuple[Who, _Ends]] = []
        tables: dict[str, procfs.TcpTables] = {}
        until_s = now_s + LOOK_PART * WALL_S
        # Of few threads each is looked at several times: they wait for this and for that.
        done: set[Who] = set()
        for who in self._turns.turns(waited, self._left_s, ROUNDS):
            if len(looks) >= LOOKS or time.monotonic() > until_s:
                break
            if who in done:
                continue
            began_s = _spent_s()
            ends = self._look_at(who, tables, until_s)
            looks.append((who, ends))
            if ends.is_last:
                done.add(who)
            self._turns.charge(who, max(0.0, _spent_s() - began_s))
        found = []
        for who, ends in looks:
            began_s = _spent_s()
            found += self._rows_of(since_ns, who, ends, processes, now_s + WALL_S)
            self._turns.charge(who, max(0.0, _spent_s() - began_s))
        return found

    def _rows_of(
        self,
        since_ns: int,
        who: Who,
        ends: _Ends,
        processes: Iterable[int],
        until_s: float,
    ) -> list[ActivityTuple]:
        """Rows of one look at a thread."""
        if not ends.asked:
            totals = (1, 0, 0, 0, 0, 0)
            is_server = ends.clients and not ends.others
            return [(since_ns, CLIENT, "", "", "", "", 0, *who, *totals)] if is_server else []
        holders = [self._holder(end, processes, until_s) for end in ends.asked]
        pids = {pid for pid, _ in holders}
        is_sure = not ends.clients and not ends.others
        if is_sure and len(pids) == 1 and 0 not in pids:
            # By several addresses: one process, all the same.
            ends, holders = _Ends(ends.asked[:1]), holders[:1]
        kind = PEER if is_sure and len(holders) == 1 else CANDIDATE
        return [
            (since_ns, kind, end.address, end.protocol, name, "", 0, *who, 1, 0, 0, 0, pid, 0)
            for end, (pid, name) in zip(ends.asked, holders, strict=True)
        ]

    def _look_at(self, who: Who, tables: dict[str, procfs.TcpTables], until_s: float) -> _Ends:
        """What a thread waits on now leads to."""
        pid = who[0]
        asked: dict[tuple[str, str, int], procfs.OtherEnd] = {}
        clients = others = False
        namespace = ""
        mine: set[str] | None = None
        with suppress(OSError):
            awaited = awaited_sockets(pid, who[2])
            self.cut += awaited.is_cut
            for inode in awaited.inodes:
                if time.monotonic() > until_s:
                    return _Ends()
                end = self._ends.pop(inode, None)
                if end is None:
                    namespace = namespace or procfs.read_link(f"/proc/{pid}/ns/net")
                    end = self._read_end(pid, inode, namespace, tables)
                if end is None:
                    others = True
                    continue
                _keep(self._ends, inode, end)
                if not end.asked:
                    clients = True
                    continue
                if awaited.is_one_of_several and not end.address:
                    # By a pair with both ends in one process its threads wake the one that polls.
                    mine = self._sockets_of(pid) if mine is None else mine
                    if str(end.inode) in mine:
                        continue
                # Of several connections to one address any may be the one.
                key = end.protocol, end.address, 0 if end.address else end.inode
                asked.setdefault(key, end)
                if len(asked) > MAX_CANDIDATES:
                    self.cut += 1
                    return _Ends(is_last=awaited.is_one_of_several)
            is_last = awaited.is_one_of_several and not asked
            return _Ends([*asked.values()], clients, others, is_last)
        return _Ends()

    def _sockets_of(self, pid: int) -> set[str]:
        found, is_cut = procfs.sockets_of(pid, MAX_DESCRIPTORS)
        self.cut += is_cut
        return found

    def _read_end(
        self, pid: int, inode: int, namespace: str, tables: dict[str, procfs.TcpTables]
    ) -> procfs.OtherEnd | None:
        if namespace not in tables:
            if len(tables) >= MAX_TABLES:
                self.cut += 1
                return None
            tables[namespace] = procfs.TcpTables(pid)
            self.cut += tables[namespace].is_cut
        if tables[namespace].has(inode):
            return tables[namespace].of(inode)
        is_ours = namespace == procfs.read_link("/proc/self/ns/net")
        return procfs.unix_end(inode) if is_ours else None

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


def _waiting(activity: Iterable[ActivityTuple]) -> tuple[Mapping[Who, int], list[int]]:
    """(threads that waited long for what may be a socket, with ns; processes that waited for
    sockets)."""
    waited: dict[Who, int] = defaultdict(int)
    processes: dict[int, None] = {}
    for row in activity:
        if row[1] != "blocked" or row[2] not in _REASONS:
            continue
        processes[row[7]] = None
        if row[4] in _CALLS:
            waited[row[7], row[8], row[9]] += row[11]
    long = {who: ns for who, ns in waited.items() if ns >= LEAST_WAIT_NS}
    return long, [*processes]


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
