# SPDX-License-Identifier: Apache-2.0
"""Control groups that have a limit: how often they reached it (cgroup-v1, cgroup-v2).

Groups without a quota or a limit are not read: there may be thousands. Any user may make groups by
the thousand, too: what is looked at, what is read, and what is kept open is shared between parties
(`procfs.party_of_group`).

Who can list a group's folder can lock it, so a child looks at folders, and opens their files
(`procfs.GROUPS`). A folder that does not answer counts as one that was not looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from sonde import procfs
from sonde.collect.host.files import Counters, labels, table
from sonde.collect.host.group_files import GroupFiles, WantedGroup
from sonde.collect.host.pressure import waiting_times
from sonde.collect.host.shares import share_out
from sonde.collect.polling import NORMAL_S, SLOW_S, Points, Poll, SourceUnavailable
from sonde.procfs.group_folders import MAX_ASKED, MAX_BELOW

MAX_GROUPS = 256
"""Limited groups that are read; how many more there are is reported."""
MAX_KEPT_OF_PARTY = 16
"""Groups of one party whose files stay open, one to seven each; others are opened each time."""
MAX_VISITED = 8_192
"""Groups of a hierarchy that are looked at; how many more are known is reported."""
SHARE_OF_TURN = 16
"""A party has this part at most, of what is left of MAX_VISITED for each, looked at in one turn."""
NO_LIMIT_BYTES = 1 << 60
"""Version 1 writes a number near 2^63 where there is no limit."""


class Groups:
    """Throttling by a CPU quota, hits of the memory limit, pressure within the group."""

    name = "cgroups"

    def __init__(self, mountinfo: Path = Path("/proc/self/mountinfo")) -> None:
        self._mountinfo = mountinfo
        self._files = GroupFiles(MAX_KEPT_OF_PARTY)
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
        self._files.close()

    def _look(self, points: Points) -> None:
        limited: dict[str, list[WantedGroup]] = {}
        unvisited = 0
        for mount, controllers in _mounts(self._mountinfo):
            tree = GroupTree(mount, limiting_files(controllers))
            for it in tree.groups():
                if files := limited_files(it.contents, controllers):
                    wanted = WantedGroup(it.path, it.folder, it.party, files)
                    limited.setdefault(it.path, []).append(wanted)
            unvisited += tree.unvisited
        there = [(of_path[0].party, path) for path, of_path in limited.items()]
        chosen = share_out(there, MAX_GROUPS, self._files.__contains__)
        self._files.put(it for path in chosen for it in limited[path])
        points.add("sonde.cgroup.left_out", len(limited) - len(chosen))
        points.add("sonde.cgroup.unvisited", unvisited)

    def _read(self, points: Points) -> None:
        for group, what, raw in self._files.read():
            # `what` is a key of `limited_files`: cpu, memory_events, …
            getattr(self, f"_report_{what}")(points, labels(sonde__cgroup=group.path), raw)

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


class FoundGroup(NamedTuple):
    """A group that was looked at."""

    folder: str
    """As the kernel has it."""
    path: str
    """Printable."""
    party: str
    contents: Mapping[str, bytes]
    """Of the files that were asked for, by name."""


class GroupTree:
    """The groups of one hierarchy below its root: of each party in turn, parents before
    children."""

    def __init__(
        self, mount: str, names: Sequence[str] = (), folders: procfs.GroupFolders = procfs.GROUPS
    ) -> None:
        """`names`: of the files that are read of each group."""
        self._mount = mount
        self._names = names
        self._folders = folders
        self._waiting: dict[str, deque[tuple[str, str, bool]]] = {}
        """Groups to be looked at, by party: folder, path, whether all below is of the same
        party."""
        self._uids: dict[str, int] = {}
        """Owners of folders, by path."""
        self.unvisited = 0
        """Groups that are known and were not looked at, or did not answer."""

    def groups(self) -> Iterator[FoundGroup]:
        """Each group, the root among them, at most MAX_VISITED."""
        visited = 0
        self._put(self._mount, "", procfs.GroupParty(procfs.MACHINE, False))
        while self._waiting:
            turn = self._turn(MAX_VISITED - visited)
            if not turn:
                self.unvisited += sum(map(len, self._waiting.values()))
                return
            visited += len(turn)
            parties = {folder: party for party, (folder, _, _) in turn}
            read, unread = self._folders.look(
                [*parties],
                parties.__getitem__,
                [self._names] * len(turn),
                most_below=MAX_BELOW,
            )
            self.unvisited += unread
            for (party, (folder, path, has_all_below)), there in zip(turn, read, strict=True):
                if there is not None:
                    yield FoundGroup(folder, path, party, there.contents)
                    self._add_below(folder, path, procfs.GroupParty(party, has_all_below), there)

    def _turn(self, left: int) -> list[tuple[str, tuple[str, str, bool]]]:
        """(party, group) of those that are looked at next."""
        turn: list[tuple[str, tuple[str, str, bool]]] = []
        each = max(1, left // (SHARE_OF_TURN * len(self._waiting)))
        for party, waiting in list(self._waiting.items()):
            for _ in range(min(each, len(waiting), left - len(turn), MAX_ASKED - len(turn))):
                turn.append((party, waiting.popleft()))
            if not waiting:
                del self._waiting[party]
        return turn

    def _add_below(
        self, folder: str, path: str, owner: procfs.GroupParty, there: procfs.GroupFolder
    ) -> None:
        self.unvisited += there.more
        for it in there.below:
            below = f"{path}/{procfs.printable(it.name)}"
            of_below = procfs.GroupParty(owner.name, True)
            if not owner.has_all_below:
                self._uids[below] = it.uid
                of_below = procfs.party_of_group(below, self._uids.__getitem__)
            self._put(f"{folder}/{it.name}", below, of_below)

    def _put(self, folder: str, path: str, party: procfs.GroupParty) -> None:
        waiting = self._waiting.setdefault(party.name, deque())
        if len(waiting) < MAX_VISITED:
            waiting.append((folder, path, party.has_all_below))
        else:
            self.unvisited += 1


def limiting_files(controllers: frozenset[str]) -> list[str]:
    """The files that hold a group's limits. `controllers`: those of its hierarchy, as in
    `procfs.GroupMount` ("v2": all of version 2)."""
    return [
        name
        for controller, names in (
            ("v2", ("cpu.max", "memory.max", "io.max")),
            ("cpu", ("cpu.cfs_quota_us",)),
            ("memory", ("memory.limit_in_bytes",)),
        )
        if controller in controllers
        for name in names
    ]


def limited_files(contents: Mapping[str, bytes], controllers: frozenset[str]) -> dict[str, str]:
    """The names of the files to read of a group that has a limit, by what they hold; {} for one
    without a limit. `contents`: of `limiting_files`."""
    files: dict[str, str] = {}
    if "v2" in controllers:
        if _word(contents, "cpu.max") not in ("", "max"):
            files |= {"cpu": "cpu.stat", "pressure_cpu": "cpu.pressure"}
        if _word(contents, "memory.max") not in ("", "max"):
            files |= {
                "memory_events": "memory.events",
                "memory_usage": "memory.current",
                "memory_stat": "memory.stat",
                "pressure_memory": "memory.pressure",
            }
        if _word(contents, "io.max"):
            files["pressure_io"] = "io.pressure"
    if "cpu" in controllers and _number(contents, "cpu.cfs_quota_us") > 0:
        files["cpu"] = "cpu.stat"
    limit = _number(contents, "memory.limit_in_bytes")
    if "memory" in controllers and 0 <= limit < NO_LIMIT_BYTES:
        files |= {
            "memory_failcnt": "memory.failcnt",
            "memory_usage": "memory.usage_in_bytes",
            "memory_oom_control": "memory.oom_control",
            "memory_stat": "memory.stat",
        }
    return files


def _word(contents: Mapping[str, bytes], name: str) -> str:
    """The first word of a file, '' without one."""
    raw = contents.get(name, b"")
    return raw.partition(b"\n")[0].partition(b" ")[0].decode().strip()


def _number(contents: Mapping[str, bytes], name: str) -> int:
    """The number in a file; -1 without one."""
    try:
        return int(_word(contents, name))
    except ValueError:
        return -1
