# SPDX-License-Identifier: Apache-2.0
"""Reads from /proc and /sys what may explain a slowdown of a process: limits, state, peers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from sonde import procfs
from sonde.diagnose.moments import Facts
from sonde.procfs.group_folders import FILE_BYTES

MAX_DESCRIPTORS = 1_024
"""Of a process that are read at once; it may have any number."""
MAX_CONNECTIONS = 4_096
"""Lines of /proc/PID/net/tcp, and of tcp6."""
MAX_NET_BYTES = 1 << 20
"""Of each of the two."""
MAX_HERE = 8
"""Peers on this node whose process is looked for."""
HOLDERS_S = 0.05
"""How long is looked for them."""
DISK_LIMITS = ("read_bps", "write_bps", "read_iops", "write_iops")
GROUP_FILES = (
    *procfs.MEMORY_FILES,
    *("cpuset.cpus", "cpu.stat", "cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.max"),
    *("memory.failcnt", "memory.events", "io.max", "freezer.state", "cgroup.events"),
    *(f"blkio.throttle.{name}_device" for name in DISK_LIMITS),
)
"""Of a control group, of either version, that are read."""
_FUSE = "/dev/fuse"
_LISTENING = "0A"
_STATES = {"01": "established", "02": "connecting", "08": "close-wait"}
"""States of TCP, as /proc/PID/net/tcp has them."""


class FactReader:
    """Reads facts; the load of CPUs is that since the last time."""

    def __init__(self) -> None:
        self._cpu_times: dict[int, tuple[int, int]] = {}
        """By CPU: clock ticks that it was idle, and all."""
        self.cut = 0
        """Looks at the descriptors of a process that has more than MAX_DESCRIPTORS."""
        self.connections_cut = 0
        """Looks at the connections of a process in whose network namespace there are more than
        MAX_CONNECTIONS."""
        self.groups_left_out = 0
        """Control groups that were not read: nested too deeply, or they did not answer."""

    def read(
        self,
        pid: int,
        wakers: Iterable[int] = (),
        asks_peers: bool = True,
        may_answer: Iterable[int] = (),
    ) -> Facts:
        """Facts of a process; `wakers`: processes that are checked for whether they serve files
        (FUSE); `asks_peers`: read its connections, too, which costs most; `may_answer`: processes
        that are looked at first for who answers it on this node. Raises nothing."""
        facts = Facts(time_ns=time.monotonic_ns())
        stat = procfs.read_stat(pid)
        if stat is None:
            return facts
        facts.state = stat.state
        with suppress(OSError):
            facts.allowed = sorted(os.sched_getaffinity(pid))
        facts.cpus = os.cpu_count() or 0
        facts.cpu_busy = self.cpu_busy()
        groups = self._groups_of(pid)
        cpuset = next((it for folder, it in groups.items() if "cpuset" in folder), {})
        if cpus := _cpus(_text(cpuset, "cpuset.cpus")):
            facts.allowed = [cpu for cpu in facts.allowed if cpu in cpus]
        facts.cpus_allowed = len(facts.allowed)
        for folder, files in groups.items():
            _add_cpu(facts, files)
            _add_memory(facts, files)
            _add_disk(facts, files)
            if "self" not in folder and _is_frozen(files):
                facts.is_frozen = True
        facts.file_servers = [waker for waker in wakers if self._serves_files(waker)]
        if asks_peers:
            links = self._links(pid, "socket:[")
            found = _peers(pid, links)
            facts.peers, facts.listens = found.states, found.listens
            self.connections_cut += found.is_cut
            facts.holders = self._holders(found.here, may_answer)
        return facts

    def _groups_of(self, pid: int) -> dict[str, Mapping[str, bytes]]:
        """What the files of its control groups hold, by folder and name; innermost first."""
        mounts = procfs.mounts_by_controller()
        folders, left_out = procfs.counted_groups_of(pid, mounts)
        found, unread = procfs.GROUPS.look(
            folders,
            lambda folder: procfs.payer_of_folder(folder, set(mounts.values())),
            [GROUP_FILES] * len(folders),
            limit=FILE_BYTES,
        )
        self.groups_left_out += left_out + unread
        pairs = zip(folders, found, strict=True)
        return {folder: it.contents for folder, it in pairs if it is not None}

    def cpu_busy(self) -> dict[int, float]:
        """Share of time in which each CPU was not idle, since the last call."""
        found = {}
        for line in _read("/proc/stat").split("\n"):
            name, _, rest = line.partition(" ")
            if not name.startswith("cpu") or not name[3:].isdigit():
                continue
            ticks = [int(word) for word in rest.split()[:8]]
            idle, total = ticks[3] + ticks[4], sum(ticks)
            before = self._cpu_times.get(int(name[3:]), (idle, total))
            self._cpu_times[int(name[3:])] = idle, total
            if total > before[1]:
                found[int(name[3:])] = 1 - (idle - before[0]) / (total - before[1])
        return found

    def _holders(
        self, here: Mapping[str, tuple[int, int]], may_answer: Iterable[int]
    ) -> dict[str, int]:
        """By address: the process that has the socket at the other end open, 0 not found in time.
        `here`: by address, inode and user of that socket."""
        until_s = time.monotonic() + HOLDERS_S
        found = dict.fromkeys(here, 0)
        for address, (inode, user) in here.items():
            first = [*(pid for pid in found.values() if pid), *may_answer]
            for pid in dict.fromkeys([*first, *procfs.may_hold(user)]):
                if time.monotonic() > until_s:
                    return found
                if self._links(pid, f"socket:[{inode}]"):
                    found[address] = pid
                    break
        return found

    def _serves_files(self, pid: int) -> bool:
        """Whether it has /dev/fuse open."""
        return _FUSE in self._links(pid, _FUSE)

    def _links(self, pid: int, prefix: str) -> set[str]:
        """Where its descriptors lead to, as far as it begins with `prefix`."""
        try:
            found, is_cut = procfs.links_of(pid, MAX_DESCRIPTORS, prefix)
        except OSError:
            return set()
        self.cut += is_cut
        return found


def _add_cpu(facts: Facts, files: Mapping[str, bytes]) -> None:
    """CPU limits of a control group, of either version; so below of memory and disks."""
    stat = _table(_text(files, "cpu.stat"))
    facts.throttled_s += stat.get("throttled_time", 0) / 1e9 + stat.get("throttled_usec", 0) / 1e6
    facts.throttled_periods += stat.get("nr_throttled", 0)
    quota = procfs.number_of(files.get("cpu.cfs_quota_us"))
    period = procfs.number_of(files.get("cpu.cfs_period_us"))
    words = _text(files, "cpu.max").split()
    if len(words) == 2 and all(word.isdigit() for word in words):
        quota, period = int(words[0]), int(words[1])
    if quota > 0 and period > 0:
        cpus = quota / period
        facts.quota = min(facts.quota or cpus, cpus)


def _add_memory(facts: Facts, files: Mapping[str, bytes]) -> None:
    usage, most = procfs.memory_in(files)
    if not most:
        return
    if not facts.memory_limit or most <= facts.memory_limit:
        facts.memory_limit, facts.memory_usage = most, usage
    hits = procfs.number_of(files.get("memory.failcnt"))  # version 1
    facts.memory_limit_hits += (
        hits if hits >= 0 else _table(_text(files, "memory.events")).get("max", 0)
    )


def _add_disk(facts: Facts, files: Mapping[str, bytes]) -> None:
    for name in DISK_LIMITS:
        for line in _text(files, f"blkio.throttle.{name}_device").split("\n"):
            if line.strip():
                facts.disk_limits.append(f"{name} {line.strip()}")
    facts.disk_limits += [line for line in _text(files, "io.max").split("\n") if line.strip()]


def _is_frozen(files: Mapping[str, bytes]) -> bool:
    return (
        _text(files, "freezer.state").strip() in ("FROZEN", "FREEZING")
        or _table(_text(files, "cgroup.events")).get("frozen", 0) == 1
    )


@dataclass(slots=True)
class _Peers:
    """The other ends of a process's connections."""

    states: dict[str, str] = field(default_factory=dict)
    """By address of those to which it connected: connections whose local port is no listening one.
    """
    here: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By address of those of them that are in the same network namespace: inode of the socket
    there, and its user."""
    listens: bool = False
    is_cut: bool = False
    """There are more connections than were read."""


def _peers(pid: int, links: set[str]) -> _Peers:
    """`links`: the process's sockets."""
    found = _Peers()
    sockets = {link[8:-1] for link in links}
    if not sockets:
        return found
    listening: set[str] = set()
    mine: list[tuple[str, str, str]] = []
    every: dict[tuple[str, str], tuple[int, int]] = {}
    for name in ("tcp", "tcp6"):
        raw = procfs.read_file(f"/proc/{pid}/net/{name}", MAX_NET_BYTES) or b""
        lines = raw.decode("ascii", "replace").split("\n")[1:]
        found.is_cut |= len(lines) > MAX_CONNECTIONS + 1 or len(raw) >= MAX_NET_BYTES
        for line in lines[:MAX_CONNECTIONS]:
            words = line.split()
            if len(words) < 10:
                continue
            local, peer, state, inode = words[1], words[2], words[3], words[9]
            if state == _LISTENING:
                listening.add(local.rpartition(":")[2])
                found.listens |= inode in sockets
                continue
            every[_without_prefix(local), _without_prefix(peer)] = int(inode), int(words[7])
            if inode in sockets:
                mine.append((local, peer, state))
    for local, peer, state in mine:
        if local.rpartition(":")[2] in listening:
            continue
        address = procfs.address_of(peer)
        found.states[address] = _STATES.get(state, state)
        other = every.get((_without_prefix(peer), _without_prefix(local)))
        if other is not None and len(found.here) < MAX_HERE:
            found.here[address] = other
    return found


def _without_prefix(address: str) -> str:
    """An address of /proc/net/tcp6 that is an IPv4 one as tcp has it."""
    return address.removeprefix("0000000000000000FFFF0000")


def _cpus(text: str) -> set[int]:
    """The CPUs of a list such as '0-3,7'."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found |= set(range(int(first), int(last or first) + 1))
    return found


def _table(text: str) -> dict[str, int]:
    """The lines `NAME NUMBER` of a file."""
    found = {}
    for line in text.split("\n"):
        name, _, value = line.partition(" ")
        if value.lstrip("-").isdigit():
            found[name] = int(value)
    return found


def _text(files: Mapping[str, bytes], name: str) -> str:
    """The content of a file; '' where it was not read."""
    return files.get(name, b"").decode("utf-8", "replace")


def _read(path: str) -> str:
    raw = procfs.read_file(path)
    return (raw or b"").decode("utf-8", "replace")
