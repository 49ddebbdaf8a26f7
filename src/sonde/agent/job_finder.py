# SPDX-License-Identifier: Apache-2.0
"""Which processes of this node are ranks of one job, by what the kernel shows of them.

Ranks run the same program for the same user, have a library of collectives mapped (NCCL, MPI,
gloo, …), are no descendants of one another (data loaders are), and are connected: by TCP in one
network namespace, or by a file of shared memory of such a library. In its own network namespace a
process may have any address, so connections are matched within one namespace only, and between
processes of one owner only (`rank_owners`): anybody can connect to a port. The environment
is read for the number of a rank, and only that number and the variable's name are kept.
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
from sonde.agent.rank_owners import STRANGER, NamespaceLookup, no_namespace, owner_of_rank
from sonde.resolve.allowance import Allowance

MAX_CANDIDATES: Final = 128
"""Processes that one call of `find` examines."""
MIN_NEWCOMERS: Final = MAX_CANDIDATES // 2
"""Of these, places for processes that are no known ranks, so that ranks of known jobs do not keep
other jobs from being found."""
USERS_READ: Final = 1_024
"""Where there are more candidates than `MAX_CANDIDATES`: of how many that are no known ranks the
user is read."""
AGAIN_S: Final = 4.0
"""From the first reading of a process's mappings to the next; doubled each time, up to 64-fold."""
MAX_READINGS: Final = 8
"""Of the mappings of a process that has a library of collectives."""
MAX_REMEMBERED: Final = 1_024
"""Processes whose mappings are remembered; beyond that those that are no candidates are dropped."""
MAX_SHM_FILES: Final = 64
"""Files of shared memory of one process that are compared."""
MAX_OWNERS: Final = 16
"""With whose processes one of another owner is compared."""
MAX_RANKS: Final = 64
"""Of one job on this node."""
MAX_DESCRIPTORS: Final = 1_024
"""Of one process, that are searched for sockets."""
MAX_CONNECTIONS: Final = 8_192
"""Lines of /proc/PID/net/tcp, and of tcp6."""
MAX_NET_BYTES: Final = 1 << 21
MAX_ENVIRON_BYTES: Final = 1 << 17
MAX_NAMESPACES: Final = 8
"""Network namespaces that are searched for sockets that listen."""
BURST_S: Final = 1.0
"""CPU time that examining the processes of one party may take at once (its token bucket)."""
SHARE: Final = 0.02
"""Share of a CPU at which the token bucket fills again."""
_COST_FACTOR: Final = 5
"""The cost is taken as this many times the CPU time of this thread, an estimate: the broker, a
child that reads files for it, takes the larger part."""
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
"""Matches device and inode, as names differ by mount namespace and others may choose the same one.
From the begin of a line on, as a path may contain anything."""
_RANK_VARIABLES: Final = (
    b"RANK", b"OMPI_COMM_WORLD_RANK", b"PMIX_RANK", b"PMI_RANK", b"SLURM_PROCID", b"LOCAL_RANK",
)  # fmt: skip
Tables = dict[int, list[tuple[str, str, str, str]]]
"""What `connections` returns, by the inode of the network namespace."""
BY_START: Final = "the order in which they began"
"""`Job.numbered_by` where the environment has no numbers: ranks are numbered by their start."""


class CutLooks:
    """Looks at sockets or connections of processes that have more than is read."""

    count = 0


@dataclass(frozen=True, slots=True)
class Rank:
    """A process of a job."""

    pid: int
    start_ns: int
    number: int
    owner: str = ""
    """Whose it is, as the kernel or the kubelet shows it (`rank_owners`)."""


@dataclass(frozen=True, slots=True)
class Job:
    """The ranks of one job on this node."""

    name: str
    """Its owner (`Owner.label`)."""
    ranks: tuple[Rank, ...]
    """By number."""
    numbered_by: str
    """Variable of the environment that has the numbers of the ranks, or `BY_START`. Where ranks
    have different ones, that of the first."""
    party: int = procfs.NOBODY
    """The party of its ranks (`procfs.party_of`)."""


@dataclass(slots=True)
class _Process:
    pid: int
    parent: int
    start_ns: int
    key: tuple[int, str]
    """User and program."""
    inodes: set[str] = field(default_factory=set)
    """Of its sockets."""
    shm_files: set[bytes] = field(default_factory=set)
    """Device and inode of its files of shared memory."""
    seen: dict[bytes, tuple[float, float]] = field(default_factory=dict)
    """When (CLOCK_MONOTONIC, s) each of these was read first, and last."""
    party: int = procfs.UNKNOWN_PARTY
    owner: str = ""
    """See `Rank.owner`."""

    def saw(self, shm_files: set[bytes]) -> None:
        """Take in which files of shared memory it maps now."""
        now_s = time.monotonic()
        its = {file: (self.seen.get(file, (now_s,))[0], now_s) for file in shm_files}
        self.seen.clear()
        self.seen.update(its)
        self.shm_files = shm_files


class _Costs:
    """CPU time that examining the processes of each party takes."""

    def __init__(self) -> None:
        self._time = Allowance(BURST_S, SHARE)

    def is_over(self, party: int) -> bool:
        """Whether the party has used up its time."""
        return self._time.left(party) <= 0

    @contextmanager
    def of(self, party: int) -> Iterator[None]:
        """Charge what is done within to a party."""
        began_s = time.thread_time()
        try:
            yield
        finally:
            self._time.take(party, _COST_FACTOR * (time.thread_time() - began_s))


class JobFinder:
    """Remembers which processes have a library of collectives: they map it when they begin."""

    def __init__(self, namespace_of: NamespaceLookup = no_namespace) -> None:
        """`namespace_of`: see `rank_owners`."""
        self._maps: dict[
            tuple[int, int], tuple[bool, dict[bytes, tuple[float, float]], int, float]
        ] = {}
        """By (pid, start): whether it has such a library, its files of shared memory (as of
        `_Process.seen`), how often its mappings were read, when to read them next (CLOCK_MONOTONIC,
        s)."""
        self._namespace_of = namespace_of
        self._costs = _Costs()
        self.left_out = 0
        """Candidates that were not examined, and ranks of a job beyond `MAX_RANKS`, summed over all
        calls."""

    def find(
        self, pids: Iterable[int], owner_of: Callable[[int], str], known: Container[int] = (),
    ) -> list[Job]:  # fmt: skip
        """Jobs among these processes. `owner_of`: the name of a process's owner; `known`: ranks of
        known jobs, which are examined first where there are too many. Raises nothing."""
        found: dict[tuple[int, str], list[_Process]] = defaultdict(list)
        candidates = sorted(set(pids))
        examined = _to_examine(candidates, known)
        self.left_out += len(candidates) - len(examined)
        for pid in examined:
            if (one := _read(pid)) is not None:
                found[one.key].append(one)
        jobs = []
        alive = {(one.pid, one.start_ns) for its in found.values() for one in its}
        if len(self._maps) > MAX_REMEMBERED:
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
                        one.owner = owner_of_rank(one.pid, one.party, self._namespace_of)
                        members.append(one)
            for part in _connected(members, self._costs):
                self.left_out += max(0, len(part) - MAX_RANKS)
                jobs.append(_job(part[:MAX_RANKS], owner_of(part[0].pid)))
        return jobs

    def _has_library(self, one: _Process) -> bool:
        key = (one.pid, one.start_ns)
        known, one.seen, readings, next_s = self._maps.get(key, (False, one.seen, 0, 0.0))
        one.shm_files = set(one.seen)
        # Shared memory is mapped with the first collective, long after the library.
        if (not known or readings < MAX_READINGS) and (now_s := time.monotonic()) >= next_s:
            lines = _lines_of_maps(one.pid)
            known = any(_LIBRARY.search(line) for line in lines)
            one.saw(_shm_files(lines))
            next_s = now_s + AGAIN_S * 2 ** min(readings, 6)
            self._maps[key] = (known, one.seen, readings + 1, next_s)
        return known


def _to_examine(pids: Sequence[int], known: Container[int]) -> Sequence[int]:
    """`MAX_CANDIDATES` of them at most: known ranks and others, of each user in turn."""
    if len(pids) <= MAX_CANDIDATES:
        return pids
    ranks = _in_turn([pid for pid in pids if pid in known])
    others = [pid for pid in pids if pid not in known]
    # A random sample: a user with many low pids must not keep others from being examined.
    others = _in_turn(random.sample(others, min(len(others), USERS_READ)))
    max_ranks = max(MAX_CANDIDATES - len(others), MAX_CANDIDATES - MIN_NEWCOMERS)
    return (ranks[:max_ranks] + others)[:MAX_CANDIDATES]


def _in_turn(pids: Sequence[int]) -> list[int]:
    """In the order: the first process of each user, the second of each, and so on. Processes that
    have ended are dropped."""
    by_user: dict[int, list[int]] = defaultdict(list)
    for pid in pids:
        if (credentials := procfs.read_credentials(pid)) is not None:
            by_user[credentials.uids[0]].append(pid)
    in_turn = sorted((turn, pid) for its in by_user.values() for turn, pid in enumerate(its))
    return [pid for _, pid in in_turn]


def _read(pid: int) -> _Process | None:
    stat = procfs.read_stat(pid)
    if stat is None or not stat.goes_on:
        return None
    exe, credentials = procfs.read_exe(pid), procfs.read_credentials(pid)
    if not exe or credentials is None:
        return None
    return _Process(pid, stat.ppid, stat.start_ns, (credentials.uids[0], exe))


def _connected(members: Sequence[_Process], costs: _Costs) -> list[list[_Process]]:
    """The connected components of the ranks among `members`, of two ranks at least."""
    if len(members) < 2:
        return []
    links = _links(members, costs)
    by_pid = {one.pid: one for one in members}
    siblings = {
        one.pid for one in members
        if any(by_pid[other].parent == one.parent for other in links[one.pid])
    }  # fmt: skip
    launchers = {by_pid[pid].parent for pid in siblings}
    # A child of a rank is its data loader; children that are connected to each other are ranks.
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
            parts.append(part)
    return parts


def _links(members: Sequence[_Process], costs: _Costs) -> dict[int, set[int]]:
    """By pid: the members it is connected to. What a process inherited from its parent connects
    nothing. Those of another owner are connected by shared memory alone, which both map. Of parties
    whose time is used up only shared memory is compared, as it was read last."""
    for one in members:
        if not costs.is_over(one.party):
            with costs.of(one.party):
                one.inodes = sockets_of(one.pid)
    with_inherited = {one.pid: (one.inodes, one.shm_files) for one in members}
    ends: dict[int, list[tuple[int, str, str]]] = {}
    by_end: dict[tuple[int, str, str], int] = {}
    tables: Tables = {}
    for one in members:
        inodes, shm_files = with_inherited.get(one.parent, (set[str](), set[bytes]()))
        one.inodes, one.shm_files = one.inodes - inodes, one.shm_files - shm_files
        ends[one.pid] = []
        if not one.inodes or costs.is_over(one.party):
            continue
        with costs.of(one.party):
            namespace, table = _table(one.pid, tables)
            ends[one.pid] = [
                (namespace, local, peer) for local, peer, state, inode in table
                if state == _ESTABLISHED and inode in one.inodes
            ]  # fmt: skip
        for end in ends[one.pid]:
            by_end.setdefault(end, one.pid)
    links: dict[int, set[int]] = defaultdict(set)
    by_pid = {one.pid: one for one in members}
    pairs = [
        (pid, by_end[namespace, peer, local]) for pid, its in ends.items()
        for namespace, local, peer in its if (namespace, peer, local) in by_end
    ]  # fmt: skip
    pairs = [(pid, other) for pid, other in pairs if _is_of_one_owner(by_pid[pid], by_pid[other])]
    pairs += _by_shared_memory(members, costs)
    for pid, other in pairs:
        if pid != other:
            links[pid].add(other)
            links[other].add(pid)
    return links


def _is_of_one_owner(one: _Process, other: _Process) -> bool:
    return one.owner == other.owner != STRANGER


def _by_shared_memory(members: Sequence[_Process], costs: _Costs) -> list[tuple[int, int]]:
    """Pids of pairs of members that map a file of shared memory: those of one owner, and each with
    the first one of another owner."""
    pairs = []
    first: dict[bytes, dict[str, _Process]] = defaultdict(dict)
    for one in members:
        for file in sorted(one.shm_files):
            known = first[file].get(one.owner)
            if known is not None and one.owner != STRANGER:
                pairs.append((known.pid, one.pid))
                continue
            for other in islice(first[file].values(), MAX_OWNERS):
                if _map_at_once(one, other, file, costs):
                    pairs.append((other.pid, one.pid))
            first[file].setdefault(one.owner, one)
    return pairs


def _map_at_once(one: _Process, other: _Process, file: bytes, costs: _Costs) -> bool:
    """Whether two processes of different owners map a file of shared memory at one time. A reading
    from before the other one's proves nothing: the number of its device may have gone to another
    file system since. So that one is read again, which its own party pays for."""
    for it, than in ((one, other), (other, one)):
        if file not in it.seen or file not in than.seen:
            return False
        if it.seen[file][1] >= than.seen[file][0]:
            continue
        if costs.is_over(it.party):
            return False
        with costs.of(it.party):
            it.saw(_shm_files(_lines_of_maps(it.pid)))
        if file not in it.seen:
            return False
    return True


def _lines_of_maps(pid: int) -> list[bytes]:
    return [line.rstrip() for line in (procfs.read_maps(pid) or b"").split(b"\n")]


def _shm_files(lines: Iterable[bytes]) -> set[bytes]:
    """Device and inode of files of shared memory of a library of collectives."""
    its = (_FILE.match(line) for line in lines if b" /dev/shm/" in line)
    return set(islice((it[1] for it in its if it is not None), MAX_SHM_FILES))


def _table(
    pid: int, tables: Tables, max_tables: int = MAX_CANDIDATES
) -> tuple[int, list[tuple[str, str, str, str]]]:
    """The inode of a process's network namespace, and the connections there, read once for all
    processes in it (kept in `tables`). Beyond `max_tables` namespaces: no connections."""
    try:
        inode = procfs.read_inode(f"/proc/{pid}/ns/net")
    except OSError:  # it ended, or may not be looked at
        return 0, []
    if inode not in tables:
        if len(tables) >= max_tables:
            CutLooks.count += 1
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
        ranks = [Rank(one.pid, one.start_ns, at, one.owner) for at, one in enumerate(in_order)]
        return Job(owner, tuple(ranks), BY_START, party)
    known = [Rank(one.pid, one.start_ns, numbers[one.pid][0] or 0, one.owner) for one in part]
    return Job(owner, tuple(sorted(known, key=lambda it: it.number)), source, party)


def number_of(pid: int) -> tuple[int | None, str]:
    """The number of a rank by its environment, and the variable that has it; (None, '') without
    one. Nothing else of the environment is kept."""
    raw = procfs.read_file(f"/proc/{pid}/environ", MAX_ENVIRON_BYTES) or b""
    found: dict[bytes, int] = {}
    for entry in raw.split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name in _RANK_VARIABLES and value.isdigit() and len(value) < 8:
            found[name] = int(value)
    name = next((name for name in _RANK_VARIABLES if name in found), b"")
    return (found[name], name.decode()) if name else (None, "")


def sockets_of(pid: int) -> set[str]:
    """Inodes of the sockets that a process has open."""
    try:
        found, is_cut = procfs.sockets_of(pid, MAX_DESCRIPTORS)
    except OSError:
        return set()
    CutLooks.count += is_cut
    return found


def connections(pid: int) -> list[tuple[str, str, str, str]]:
    """(local end, other end, state, inode) of TCP in the network namespace of a process, as the
    kernel writes them; an IPv4 address in IPv6 is written as IPv4."""
    found = []
    for name in ("tcp", "tcp6"):
        raw = procfs.read_file(f"/proc/{pid}/net/{name}", MAX_NET_BYTES) or b""
        lines = raw.decode("ascii", "replace").split("\n")[1:]
        CutLooks.count += len(lines) > MAX_CONNECTIONS + 1 or len(raw) >= MAX_NET_BYTES
        for line in lines[:MAX_CONNECTIONS]:
            words = line.split()
            if len(words) >= 10:
                found.append((_as_ipv4(words[1]), _as_ipv4(words[2]), words[3], words[9]))
    return found


def _as_ipv4(end: str) -> str:
    """Without the prefix of an IPv4-mapped IPv6 address (::ffff:0:0/96)."""
    mapped = "0000000000000000FFFF0000"
    return end[len(mapped) :] if end.startswith(mapped) else end


def listens_at(pid: int, port: int, tables: Tables | None = None) -> str:
    """The loopback address at which a process itself listens at a TCP port; '': it does not. Of a
    listener at `::`, 127.0.0.1: the kernel's table does not show whether it takes IPv6 alone.
    `tables`: connections by namespace that were read before, to which this adds."""
    wanted = f":{port:04X}"
    mine = sockets_of(pid)
    for local, _, state, inode in _table(pid, {} if tables is None else tables, MAX_NAMESPACES)[1]:
        if state == _LISTENING and inode in mine and local.endswith(wanted):
            address = local.rpartition(":")[0]
            if address in ("0100007F", "00000000", "0" * 32):
                return "127.0.0.1"
            if address == "00000000000000000000000001000000":
                return "::1"
    return ""


def listening(pids: Iterable[int]) -> set[int]:
    """Those of these processes that listen on a TCP socket. The table of a namespace is read only
    once: its processes can make it long."""
    tables: Tables = {}
    found = set()
    for pid in pids:
        mine = sockets_of(pid)
        _, table = _table(pid, tables, MAX_NAMESPACES)
        if any(state == _LISTENING and inode in mine for _, _, state, inode in table):
            found.add(pid)
    return found
