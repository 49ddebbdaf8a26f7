# SPDX-License-Identifier: Apache-2.0
"""Control groups that have a limit: how often they reached it (cgroup-v1, cgroup-v2).

Groups without a quota or a limit are not read: there may be thousands. Any user may make groups by
the thousand, too: what is looked at, what is read, and what is kept open is shared between parties
(`procfs.party_of_group`).
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sonde import procfs
from sonde.collect.host.files import Counters, KernelFile, labels, table
from sonde.collect.host.pressure import waiting_times
from sonde.collect.host.shares import share_out
from sonde.collect.polling import NORMAL_S, SLOW_S, Points, Poll, SourceUnavailable

MAX_GROUPS = 256
"""Limited groups that are read; how many more there are is reported."""
MAX_KEPT_OF_PARTY = 16
"""Groups of one party whose files stay open, one to seven each; others are opened each time."""
MAX_VISITED = 8_192
"""Groups of a hierarchy that are looked at; how many more are known is reported."""
LINE_BYTES = 256
"""Read of a file whose first word is wanted."""
LINKS_OF_EMPTY = 2
"""st_nlink of a folder without folders in it: kernfs, the file system of control groups, adds one
for each."""
NO_LIMIT_BYTES = 1 << 60
"""Version 1 writes a number near 2^63 where there is no limit."""


@dataclass(slots=True)
class _Group:
    """A limited group and its files, by what they hold."""

    label: str
    files: dict[str, KernelFile] = field(default_factory=dict)


class Groups:
    """Throttling by a CPU quota, hits of the memory limit, pressure within the group."""

    name = "cgroups"

    def __init__(self, mountinfo: Path = Path("/proc/self/mountinfo")) -> None:
        self._mountinfo = mountinfo
        self._groups: dict[str, _Group] = {}
        self._counters = Counters()

    def open(self) -> None:
        """Find the limited groups. Raises SourceUnavailable."""
        if not _mounts(self._mountinfo):
            raise SourceUnavailable("no control groups are mounted", whole=True)
        self._look(Points())

    def polls(self) -> Sequence[Poll]:
        """Counters every second; groups are looked for less often."""
        return [Poll("limits", NORMAL_S, self._read), Poll("groups", SLOW_S, self._look)]

    def close(self) -> None:
        """Close every file."""
        for group in self._groups.values():
            for file in group.files.values():
                file.close()
        self._groups = {}

    def _look(self, points: Points) -> None:
        limited: dict[str, tuple[str, dict[str, str]]] = {}
        unvisited = 0
        for mount, controllers in _mounts(self._mountinfo):
            tree = GroupTree(mount)
            for folder, path, party in tree.groups():
                if files := limited_files(folder, controllers):
                    limited.setdefault(path, (party, {}))[1].update(files)
            unvisited += tree.unvisited
        there = [(party, path) for path, (party, _) in limited.items()]
        chosen = share_out(there, MAX_GROUPS, self._groups.__contains__)
        held: Counter[str] = Counter()
        found = {}
        for path in chosen:
            party, files = limited[path]
            held[party] += 1
            found[path] = self._group(path, files, held[party] <= MAX_KEPT_OF_PARTY)
        self.close()  # groups that are not read any more: `_group` has taken out the others
        self._groups = found
        points.add("sonde.cgroup.left_out", len(limited) - len(found))
        points.add("sonde.cgroup.unvisited", unvisited)

    def _group(self, path: str, files: dict[str, str], is_kept: bool) -> _Group:
        """A group, with the files that are open already; it is taken out of `self._groups`."""
        known = self._groups.get(path)
        group = known or _Group(labels(sonde__cgroup=path))
        before, group.files = group.files, {}
        for name, file in files.items():
            group.files[name] = before.pop(name) if name in before else KernelFile(file)
            group.files[name].is_kept = is_kept
        for gone in before.values():
            gone.close()
        self._groups.pop(path, None)
        return group

    def _read(self, points: Points) -> None:
        for group in self._groups.values():
            for what, file in group.files.items():
                try:
                    raw = file.read()
                except SourceUnavailable:
                    continue  # removed; the next look sees it
                # `what` is a key of `limited_files`: cpu, memory_events, …
                getattr(self, f"_report_{what}")(points, group.label, raw)

    def _report_cpu(self, points: Points, label: str, raw: bytes) -> None:
        """cpu.stat: version 1 has ns, version 2 µs."""
        found = table(raw)
        report = self._counters.report
        throttled_s = found.get("throttled_time", 0) / 1e9 + found.get("throttled_usec", 0) / 1e6
        report(points, "sonde.cgroup.cpu.periods", found.get("nr_periods", 0), label)
        report(points, "sonde.cgroup.cpu.throttled", found.get("nr_throttled", 0), label)
        report(points, "sonde.cgroup.cpu.throttled_time", throttled_s, label)

    def _report_memory_events(self, points: Points, label: str, raw: bytes) -> None:
        found = table(raw)
        report = self._counters.report
        report(points, "sonde.cgroup.memory.limit_hits", found.get("max", 0), label)
        report(points, "sonde.cgroup.memory.oom_kills", found.get("oom_kill", 0), label)

    def _report_memory_failcnt(self, points: Points, label: str, raw: bytes) -> None:
        self._counters.report(points, "sonde.cgroup.memory.limit_hits", int(raw), label)

    def _report_memory_oom_control(self, points: Points, label: str, raw: bytes) -> None:
        kills = table(raw).get("oom_kill", 0)
        self._counters.report(points, "sonde.cgroup.memory.oom_kills", kills, label)

    def _report_memory_usage(self, points: Points, label: str, raw: bytes) -> None:
        self._counters.report(points, "sonde.cgroup.memory.usage", int(raw), label)

    def _report_memory_stat(self, points: Points, label: str, raw: bytes) -> None:
        found = table(raw)
        report = self._counters.report
        major = found.get("total_pgmajfault", found.get("pgmajfault", 0))
        report(points, "sonde.cgroup.memory.major_faults", major, label)
        freed = found.get("pgsteal")
        if freed is not None:
            report(points, "sonde.cgroup.memory.reclaimed", freed, label)

    def _report_pressure(self, points: Points, label: str, raw: bytes, resource: str) -> None:
        opened = label.removesuffix("}")  # labels are a JSON object: two members are added to it
        for kind, seconds in waiting_times(raw):
            both = f'{opened},"sonde.pressure":"{kind.decode()}","sonde.resource":"{resource}"}}'
            self._counters.report(points, "sonde.cgroup.pressure", seconds, both)

    def _report_pressure_cpu(self, points: Points, label: str, raw: bytes) -> None:
        self._report_pressure(points, label, raw, "cpu")

    def _report_pressure_memory(self, points: Points, label: str, raw: bytes) -> None:
        self._report_pressure(points, label, raw, "memory")

    def _report_pressure_io(self, points: Points, label: str, raw: bytes) -> None:
        self._report_pressure(points, label, raw, "io")


def _mounts(mountinfo: Path) -> list[procfs.GroupMount]:
    """The hierarchies that are read here, each once, with the controllers that matter here."""
    found: dict[frozenset[str], str] = {}
    for point, controllers in procfs.group_mounts(mountinfo):
        if read_here := controllers & {"v2", "cpu", "memory"}:
            found.setdefault(read_here, point)
    return [procfs.GroupMount(point, controllers) for controllers, point in found.items()]


class GroupTree:
    """The groups of one hierarchy below its root: one of each party in turn, parents before
    children."""

    def __init__(self, mount: str) -> None:
        self._mount = mount
        self._waiting: dict[str, deque[tuple[str, str, bool]]] = {}
        """Groups to be looked at, by party: folder, path, whether all below is of the same
        party."""
        self._uids: dict[str, int] = {}
        """Owners of folders, by path."""
        self.unvisited = 0
        """Groups that are known and were not looked at."""

    def groups(self) -> Iterator[tuple[str, str, str]]:
        """(folder, path, party) of each group, at most MAX_VISITED."""
        visited = 0
        self._add_below(self._mount, "", procfs.MACHINE, False)
        while self._waiting:
            for party, waiting in list(self._waiting.items()):
                if visited >= MAX_VISITED:
                    self.unvisited += sum(map(len, self._waiting.values()))
                    return
                visited += 1
                folder, path, has_all_below = waiting.popleft()
                if not waiting:
                    del self._waiting[party]
                yield folder, path, party
                self._add_below(folder, path, party, has_all_below)

    def _add_below(self, folder: str, path: str, party: str, has_all_below: bool) -> None:
        try:
            if os.stat(folder).st_nlink == LINKS_OF_EMPTY:  # noqa: PTH116
                return  # it has only files, some fifty
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        below = f"{path}/{procfs.printable(entry.name)}"
                        owner = procfs.GroupParty(party, True)
                        if not has_all_below:
                            self._uids[below] = entry.stat(follow_symlinks=False).st_uid
                            owner = procfs.party_of_group(below, self._uids.__getitem__)
                        self._put(entry.path, below, owner)
        except OSError:
            return

    def _put(self, folder: str, path: str, party: procfs.GroupParty) -> None:
        waiting = self._waiting.setdefault(party.name, deque())
        if len(waiting) < MAX_VISITED:
            waiting.append((folder, path, party.has_all_below))
        else:
            self.unvisited += 1


def limited_files(folder: str, controllers: frozenset[str]) -> dict[str, str]:
    """The files to read of a group that has a limit, by what they hold; {} for one without a limit.

    `controllers`: those of its hierarchy, as in `procfs.GroupMount` ("v2": all of version 2).
    """
    files: dict[str, str] = {}
    if "v2" in controllers:
        if _word(f"{folder}/cpu.max") not in ("", "max"):
            files |= {"cpu": "cpu.stat", "pressure_cpu": "cpu.pressure"}
        if _word(f"{folder}/memory.max") not in ("", "max"):
            files |= {
                "memory_events": "memory.events",
                "memory_usage": "memory.current",
                "memory_stat": "memory.stat",
                "pressure_memory": "memory.pressure",
            }
        if _word(f"{folder}/io.max"):
            files["pressure_io"] = "io.pressure"
    if "cpu" in controllers and _number(f"{folder}/cpu.cfs_quota_us") > 0:
        files["cpu"] = "cpu.stat"
    if "memory" in controllers and 0 <= _number(f"{folder}/memory.limit_in_bytes") < NO_LIMIT_BYTES:
        files |= {
            "memory_failcnt": "memory.failcnt",
            "memory_usage": "memory.usage_in_bytes",
            "memory_oom_control": "memory.oom_control",
            "memory_stat": "memory.stat",
        }
    return {what: f"{folder}/{name}" for what, name in files.items()}


def _word(path: str) -> str:
    """The first word of a file, '' without one, by plain system calls: there are thousands of
    files.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, LINE_BYTES).partition(b"\n")[0].partition(b" ")[0].decode().strip()
    except OSError:
        return ""
    finally:
        os.close(fd)


def _number(path: str) -> int:
    """The number in a file; -1 without one."""
    try:
        return int(_word(path))
    except ValueError:
        return -1
