# SPDX-License-Identifier: Apache-2.0
"""Pressure of control groups, with and without limits: time in which tasks waited (PSI, cgroup-v2).

Those are the groups of the recorded processes, or all groups of the node that have processes.
Parties share what is read, as in `groups`. The root group is not among them: its pressure is the
machine's, which `pressure` reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from sonde import procfs
from sonde.collect.host.files import Counters, labels
from sonde.collect.host.group_files import GroupFiles, WantedGroup
from sonde.collect.host.groups import FoundGroup, GroupTree, limited_files, limiting_files
from sonde.collect.host.pressure import waiting_times
from sonde.collect.host.shares import share_out
from sonde.collect.polling import NORMAL_S, SLOW_S, Points, Poll, SourceUnavailable

MAX_GROUPS = 256
"""Groups that are read; how many more there are is reported."""
MAX_KEPT_OF_PARTY = 16
"""Groups of one party whose files stay open, three each; others are opened each time."""
RESOURCES = ("cpu", "memory", "io")
VERSION_2 = frozenset({"v2"})
LOOKED_AT = (*limiting_files(VERSION_2), "cgroup.events", "cpu.pressure")
"""Files of a group that show what is to be read of it."""


class GroupPressure:
    """Stalls of control groups; a kernel without PSI or cgroup-v2 is a gap with that reason."""

    name = "psi"

    def __init__(
        self,
        pids: frozenset[int] | None,
        *,
        are_limited_read: bool,
        mountinfo: Path = Path("/proc/self/mountinfo"),
        processes: Path = Path("/proc"),
    ) -> None:
        """`pids`: only groups of these processes and their descendants. `are_limited_read`: the
        source `cgroups` reports the pressure of groups with a limit, so it is left out here."""
        self._pids = pids
        self._are_limited_read = are_limited_read
        self._mountinfo = mountinfo
        self._processes = processes
        self._parties = procfs.GroupParties(mountinfo)
        self._mount = ""
        self._files = GroupFiles(MAX_KEPT_OF_PARTY)
        self._counters = Counters()

    def open(self) -> None:
        """Find the groups. Raises SourceUnavailable."""
        mounts = [it.point for it in procfs.group_mounts(self._mountinfo) if "v2" in it.controllers]
        if not mounts:
            raise SourceUnavailable("no control groups of version 2 are mounted", whole=True)
        self._mount = mounts[0]
        self._look(Points())

    def polls(self) -> Sequence[Poll]:
        """Counters every second; groups are looked for less often."""
        return [Poll("pressure", NORMAL_S, self._read), Poll("groups", SLOW_S, self._look)]

    def close(self) -> None:
        """Close every file."""
        self._files.close()

    def _look(self, points: Points) -> None:
        tree = GroupTree(self._mount, LOOKED_AT)
        there = list(
            self._of_node(tree) if self._pids is None else self._of_processes(self._pids, tree)
        )
        readable = [one for one in there if "cpu.pressure" in one.contents]
        if there and not readable:
            reason = "control groups have no PSI (CONFIG_PSI; where it is off: boot with psi=1)"
            raise SourceUnavailable(reason, whole=True)
        by_path = {one.path: one for one in readable}
        parties = ((one.party, one.path) for one in readable)
        chosen = share_out(parties, MAX_GROUPS, self._files.__contains__)
        self._files.put(self._wanted(by_path[path]) for path in chosen)
        left_out = len(readable) - len(chosen) + tree.unvisited
        points.add("sonde.cgroup.pressure_left_out", left_out)

    def _of_node(self, tree: GroupTree) -> Iterator[FoundGroup]:
        for one in tree.groups():
            if one.path and b"populated 1" in one.contents.get("cgroup.events", b""):
                yield one

    def _of_processes(self, pids: frozenset[int], tree: GroupTree) -> Iterator[FoundGroup]:
        raws = {self._raw_path(pid) for pid in procfs.family(pids)}
        # Without those outside of the part of the hierarchy that is mounted here.
        inside = sorted(it for it in raws if it.strip(b"/") and not it.startswith(b"/.."))
        paths = {self._mount + os.fsdecode(raw): procfs.text(raw) for raw in inside}
        parties = {folder: self._parties.of(path) for folder, path in paths.items()}
        read, tree.unvisited = procfs.GROUPS.look(
            [*paths], parties.__getitem__, [LOOKED_AT] * len(paths)
        )
        for (folder, path), found in zip(paths.items(), read, strict=True):
            if found is not None:
                yield FoundGroup(folder, path, parties[folder], found.contents)

    def _raw_path(self, pid: int) -> bytes:
        """The group of a process; b'' where that is not known."""
        for line in (procfs.read_file(f"{self._processes}/{pid}/cgroup") or b"").split(b"\n"):
            if line.startswith(b"0::"):
                return line[3:]
        return b""

    def _wanted(self, one: FoundGroup) -> WantedGroup:
        limited = limited_files(one.contents, VERSION_2) if self._are_limited_read else {}
        names = {it: f"{it}.pressure" for it in RESOURCES if f"pressure_{it}" not in limited}
        return WantedGroup(one.path, one.folder, one.party, names)

    def _read(self, points: Points) -> None:
        for group, resource, raw in self._files.read():
            for kind, seconds in waiting_times(raw):
                label = labels(
                    sonde__cgroup=group.path,
                    sonde__resource=resource,
                    sonde__pressure=kind.decode("ascii", "replace"),
                )
                self._counters.report(points, "sonde.cgroup.pressure", seconds, label)
