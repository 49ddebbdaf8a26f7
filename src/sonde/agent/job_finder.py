# SPDX-License-Identifier: Apache-2.0
"""Which processes of this node are ranks of one job, by what the kernel shows of them.

Ranks run the same program for the same user, have a collective library mapped, are no descendants
of one another (loaders are), and are connected: by TCP in one network namespace, or by a file of
shared memory of such a library. In a namespace that a process has made it may have any address, so
the ends of a connection there connect it to nobody elsewhere. The environment is read for one
thing, the number of a rank, and nothing but that number is kept.
"""

from __future__ import annotations

import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from sonde import procfs
from sonde.resolve.allowance import Allowance

CANDIDATES: Final = 128
"""Processes that are looked into at a time."""
NEWCOMERS: Final = CANDIDATES // 2
"""Of these, that are no known ranks: jobs that are watched keep nobody else's from being found."""
OWNERS_READ: Final = 1_024
"""Processes whose owner is read where there are more candidates than that."""
AGAIN_S: Final = 4.0
"""From the first look into a process to the next one; twice as long each time, up to 64 times."""
LOOKS: Final = 8
"""Into a process that has a library."""
REMEMBERED: Final = 1_024
SHARES: Final = 64
"""Files of shared memory of one process."""
RANKS: Final = 64
"""Of one job on this node."""
DESCRIPTORS: Final = 1_024
CONNECTIONS: Final = 8_192
NET_BYTES: Final = 1 << 21
ENVIRON_BYTES: Final = 1 << 17
NAMESPACES: Final = 8
"""Network namespaces of one job whose connections are read in a look at it."""
BURST_S: Final = 1.0
"""Time (CPU) that looking into the processes of one party may take at once."""
SHARE: Final = 0.02
"""Of a processor: what comes back of it in a second."""
_CHILDS: Final = 5
"""Times what it takes here: the child that reads for us has most of it."""
_ESTABLISHED: Final = "01"
_LISTENING: Final = "0A"

_LIBRARY = re.compile(
    rb"/(lib(nccl|rccl|gloo|mpi|mpich|ucp|ucc|ccl|horovod|torch_cpu|torch_hip|jax_common)\b[^/\n]*"
    rb"|xla_extension[^/\n]*|libtensorflow_framework[^/\n]*)$"
)
"""Libraries with collectives in them: PyTorch has gloo in libtorch_cpu, JAX in its own."""
_FILE = re.compile(
    rb"[0-9a-f]+-[0-9a-f]+ \S{4} [0-9a-f]+ ([0-9a-f]+:[0-9a-f]+ \d+) +/dev/shm/"
    rb"(?:nccl|mpi|ucx|vader|psm|gloo|rccl|cma)"
)
"""Device and inode: a name is of its mount namespace, and others may choose the same one. From the
begin of a line on, as a path may hold anything."""
_NUMBERS: Final = (
    b"RANK", b"OMPI_COMM_WORLD_RANK", b"PMIX_RANK", b"PMI_RANK", b"SLURM_PROCID", b"LOCAL_RANK",
)  # fmt: skip
Tables = dict[int, list[tuple[str, str, str, str]]]
"""`connections` by network namespace."""
BY_START: Final = "the order in which they began"


@dataclass(frozen=True, slots=True)
class Rank:
    """A process of a job."""

    pid: int
    start_ns: int
    number: int


@dataclass(frozen=True, slots=True)
class Job:
    """Ranks of one job on this node."""

    name: str
    ranks: tuple[Rank, ...]
    """By number."""
    numbered_by: str
    party: int = procfs.NOBODY
    """Whose it is, as what all share is divided by (`procfs.party_of`)."""


@dataclass(slots=True)
class _Process:
    pid: int
    parent: int
    start_ns: int
    key: tuple[int, str]
    """User and program."""
    inodes: set[str] = field(default_factory=set)
    shares: set[bytes] = field(default_factory=set)
    party: int = procfs.UNKNOWN_PARTY


class _Costs:
    """Time that looking into the processes of each party takes."""

    def __init__(self) -> None:
        self._time = Allowance(BURST_S, SHARE)

    def is_over(self, party: int) -> bool:
        """Whether none is left."""
        return self._time.left(party) <= 0

    @contextmanager
    def of(self, party: int) -> Iterator[None]:
        """What is done within costs a party time."""
        began_s = time.thread_time()
        try:
            yield
        finally:
            self._time.take(party, _CHILDS * (time.thread_time() - began_s))


class JobFinder:
    """Remembers what it has looked into: a process maps its libraries when it begins."""

    def __init__(self) -> None:
        self._maps: dict[tuple[int, int], tuple[bool, set[bytes], int, float]] = {}
        """By process: whether it has a library, its shared memory, times looked, when next."""
        self._costs = _Costs()
        self.left_out = 0
        """Candidates that were not looked into, summed over all calls."""

    def find(
        self, pids: Iterable[int], owner_of: Callable[[int], str], known: Container[int] = (),
    ) -> list[Job]:  # fmt: skip
        """Jobs among these processes. `owner_of`: whose a process is; `known`: ranks, which come
        first where there are too many. Raises nothing."""
        found: dict[tuple[int, str], list[_Process]] = defaultdict(list)
        candidates = sorted(set(pids))
        chosen = _chosen(candidates, known)
        self.left_out += len(candidates) - len(chosen)
        for pid in chosen:
            if (one := _look(pid)) is not None:
                found[one.key].append(one)
        jobs = []
        alive = {(one.pid, one.start_ns) for its in found.values() for one in its}
        if len(self._maps) > REMEMBERED:
            self._maps = {key: value for key, value in self._maps.items() if key in alive}
        for its in found.values():
            members = []
            for one in its if len(its) > 1 else ():
                one.party = procfs.party_of(one.pid)
                if self._costs.is_over(one.party):
                    self.left_out += 1
                    continue
                with self._costs.of(one.party):
                    if self._has_library(one):
                        members.append(one)
            for part in _connected(members, self._costs):
                jobs.append(_job(part, owner_of(part[0].pid)))
        return jobs

    def _has_library(self, one: _Process) -> bool:
        key = (one.pid, one.start_ns)
        known, shares, times, next_s = self._maps.get(key, (False, set[bytes](), 0, 0.0))
        # Shared memory comes with the first collective, long after the library.
        if (not known or times < LOOKS) and (now_s := time.monotonic()) >= next_s:
            raw = procfs.read_maps(one.pid) or b""
            lines = [line.rstrip() for line in raw.split(b"\n")]
            known = any(_LIBRARY.search(line) for line in lines)
            its = (_FILE.match(line) for line in lines if b" /dev/shm/" in line)
            shares = set(islice((it[1] for it in its if it is not None), SHARES))
            next_s = now_s + AGAIN_S * 2 ** min(times, 6)
            self._maps[key] = (known, shares, times + 1, next_s)
        one.shares = shares
        return known


def _chosen(pids: Sequence[int], known: Container[int]) -> Sequence[int]:
    """As many as are looked into: known ranks and others, of each user in turn."""
    if len(pids) <= CANDIDATES:
        return pids
    ranks = _in_turn([pid for pid in pids if pid in known])
    others = [pid for pid in pids if pid not in known]
    # By chance: who has many processes with low numbers must not keep others from being looked at.
    others = _in_turn(random.sample(others, min(len(others), OWNERS_READ)))
    most = max(CANDIDATES - len(others), CANDIDATES - NEWCOMERS)
    return (ranks[:most] + others)[:CANDIDATES]


def _in_turn(pids: Sequence[int]) -> list[int]:
    """Of each user in turn. Those that are gone are left out."""
    by_user: dict[int, list[int]] = defaultdict(list)
    for pid in pids:
        if (credentials := procfs.read_credentials(pid)) is not None:
            by_user[credentials.uids[0]].append(pid)
    in_turn = sorted((turn, pid) for its in by_user.values() for turn, pid in enumerate(its))
    return [pid for _, pid in in_turn]


def _look(pid: int) -> _Process | None:
    stat = procfs.read_stat(pid)
    if stat is None or not stat.goes_on:
        return None
    exe, credentials = procfs.read_exe(pid), procfs.read_credentials(pid)
    if not exe or credentials is None:
        return None
    return _Process(pid, stat.ppid, stat.start_ns, (credentials.uids[0], exe))


def _connected(members: Sequence[_Process], costs: _Costs) -> list[list[_Process]]:
    """The ranks among them, in parts that are connected, of two at least."""
    if len(members) < 2:
        return []
    links = _links(members, costs)
    by_pid = {one.pid: one for one in members}
    siblings = {
        one.pid for one in members
        if any(by_pid[other].parent == one.parent for other in links[one.pid])
    }  # fmt: skip
    launchers = {by_pid[pid].parent for pid in siblings}
    # A child of a rank is its loader; children that are connected to each other are ranks.
    ranks = {
        one.pid: one for one in members
        if one.pid not in launchers
        and (one.pid in siblings or not procfs.descends(one.parent, by_pid.keys()))
    }  # fmt: skip
    parts = []
    while ranks:
        part: list[_Process] = []
        ahead = [next(iter(ranks))]
        while ahead:
            if (it := ranks.pop(ahead.pop(), None)) is not None:
                part.append(it)
                ahead += links[it.pid]
        if len(part) > 1:
            parts.append(part[:RANKS])
    return parts


def _links(members: Sequence[_Process], costs: _Costs) -> dict[int, set[int]]:
    """Who is connected to whom. What a process has from its parent connects nobody. Of whom there
    is no time left only shared memory is looked at."""
    for one in members:
        if not costs.is_over(one.party):
            with costs.of(one.party):
                one.inodes = sockets_of(one.pid)
    whole = {one.pid: (one.inodes, one.shares) for one in members}
    ends: dict[int, list[tuple[int, str, str]]] = {}
    by_end: dict[tuple[int, str, str], int] = {}
    tables: Tables = {}
    for one in members:
        inodes, shares = whole.get(one.parent, (set[str](), set[bytes]()))
        one.inodes, one.shares = one.inodes - inodes, one.shares - shares
        ends[one.pid] = []
        if not one.inodes or costs.is_over(one.party):
            continue
        with costs.of(one.party):
            space, table = _table(one.pid, tables)
            ends[one.pid] = [
                (space, local, peer) for local, peer, state, inode in table
                if state == _ESTABLISHED and inode in one.inodes
            ]  # fmt: skip
        for end in ends[one.pid]:
            by_end.setdefault(end, one.pid)
    links: dict[int, set[int]] = defaultdict(set)
    pairs = [
        (pid, by_end[space, peer, local]) for pid, its in ends.items()
        for space, local, peer in its if (space, peer, local) in by_end
    ]  # fmt: skip
    first: dict[bytes, int] = {}
    for one in members:
        pairs += [(first.setdefault(share, one.pid), one.pid) for share in one.shares]
    for pid, other in pairs:
        if pid != other:
            links[pid].add(other)
            links[other].add(pid)
    return links


def _table(
    pid: int, tables: Tables, most: int = CANDIDATES
) -> tuple[int, list[tuple[str, str, str, str]]]:
    """Its network namespace, and the connections there, read once for all processes in it. `most`:
    tables; of a namespace beyond that nothing is known."""
    try:
        inode = procfs.read_inode(f"/proc/{pid}/ns/net")
    except OSError:  # it ended, or may not be looked at
        return 0, []
    if inode not in tables:
        if len(tables) >= most:
            return inode, []
        tables[inode] = connections(pid)
    return inode, tables[inode]


def _job(part: Sequence[_Process], owner: str) -> Job:
    numbers = {one.pid: number_of(one.pid) for one in part}
    values = [number for number, _ in numbers.values()]
    party = procfs.party_of(part[0].pid)
    source = next((name for _, name in numbers.values()), "")
    in_order = sorted(part, key=lambda it: (it.start_ns, it.pid))
    if None in values or len(set(values)) != len(values):
        ranks = [Rank(one.pid, one.start_ns, at) for at, one in enumerate(in_order)]
        return Job(owner, tuple(ranks), BY_START, party)
    known = [Rank(one.pid, one.start_ns, numbers[one.pid][0] or 0) for one in part]
    return Job(owner, tuple(sorted(known, key=lambda it: it.number)), source, party)


def number_of(pid: int) -> tuple[int | None, str]:
    """The number of a rank by its environment, and the variable; nothing else of it is kept."""
    raw = procfs.read_file(f"/proc/{pid}/environ", ENVIRON_BYTES) or b""
    found: dict[bytes, int] = {}
    for entry in raw.split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name in _NUMBERS and value.isdigit() and len(value) < 8:
            found[name] = int(value)
    name = next((name for name in _NUMBERS if name in found), b"")
    return (found[name], name.decode()) if name else (None, "")


def sockets_of(pid: int) -> set[str]:
    """Inodes of the sockets that a process has open."""
    try:
        return procfs.sockets_of(pid, DESCRIPTORS)
    except OSError:
        return set()


def connections(pid: int) -> list[tuple[str, str, str, str]]:
    """(local end, other end, state, inode) of TCP in the network namespace of a process, as the
    kernel writes them; an IPv4 address in IPv6 is written as IPv4."""
    found = []
    for name in ("tcp", "tcp6"):
        raw = procfs.read_file(f"/proc/{pid}/net/{name}", NET_BYTES) or b""
        for line in raw.decode("ascii", "replace").split("\n")[1:CONNECTIONS]:
            words = line.split()
            if len(words) >= 10:
                found.append((_plain(words[1]), _plain(words[2]), words[3], words[9]))
    return found


def _plain(end: str) -> str:
    mapped = "0000000000000000FFFF0000"
    return end[len(mapped) :] if end.startswith(mapped) else end


def listens_at(pid: int, port: int, tables: Tables | None = None) -> str:
    """The loopback address at which a process itself listens at a TCP port; '': it does not.
    `tables`: what was read for other processes, and is read for this one."""
    wanted = f":{port:04X}"
    mine = sockets_of(pid)
    for local, _, state, inode in _table(pid, {} if tables is None else tables, NAMESPACES)[1]:
        if state == _LISTENING and inode in mine and local.endswith(wanted):
            address = local.rpartition(":")[0]
            if address in ("0100007F", "00000000", "0" * 32):
                return "127.0.0.1"
            if address == "00000000000000000000000001000000":
                return "::1"
    return ""


def listening(pids: Iterable[int]) -> set[int]:
    """Those of some processes that take TCP connections. The table of a namespace is read once:
    how long it is, its processes decide."""
    tables: Tables = {}
    found = set()
    for pid in pids:
        mine = sockets_of(pid)
        if any(it[2] == _LISTENING and it[3] in mine for it in _table(pid, tables, NAMESPACES)[1]):
            found.add(pid)
    return found
