# SPDX-License-Identifier: Apache-2.0
"""Pressure of control groups, with and without limits: time in which tasks waited (PSI, cgroup-v2).

Those are the groups of the recorded processes, or all groups of the node that have processes.
Parties share what is read, as in `groups`. The root group is not among them: its pressure is the
machine's, which `pressure` reads.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from sonde import procfs
from sonde.collect.host.files import Counters, KernelFile, labels
from sonde.collect.host.groups import GroupTree, limited_files
from sonde.collect.host.pressure import waiting_times
from sonde.collect.host.shares import share_out
from sonde.collect.polling import NORMAL_S, SLOW_S, Points, Poll, SourceUnavailable

MAX_GROUPS = 256
"""Groups that are read; how many more there are is reported."""
MAX_KEPT_OF_PARTY = 16
"""Groups of one party whose files stay open, three each; others are opened each time."""
RESOURCES = ("cpu", "memory", "io")
EVENTS_BYTES = 256
"""Read of cgroup.events, which is shorter."""


class _Found(NamedTuple):
    """A group that could be read; `path` is printable, `folder` as the kernel has it."""

    folder: str
    path: str
    party: str


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
        self._groups: dict[str, dict[str, KernelFile]] = {}
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
        for files in self._groups.values():
            for file in files.values():
                file.close()
        self._groups = {}

    def _look(self, points: Points) -> None:
        tree = GroupTree(self._mount)
        there = list(self._of_node(tree) if self._pids is None else self._of_processes(self._pids))
        readable = [one for one in there if os.path.exists(f"{one.folder}/cpu.pressure")]  # noqa: PTH110
        if there and not readable:
            reason = "control groups have no PSI (CONFIG_PSI; where it is off: boot with psi=1)"
            raise SourceUnavailable(reason, whole=True)
        chosen = share_out(
            ((one.party, one) for one in readable),
            MAX_GROUPS,
            lambda one: one.path in self._groups,
        )
        held: Counter[str] = Counter()
        found = {}
        for one in chosen:
            held[one.party] += 1
            found[one.path] = self._files(one, held[one.party] <= MAX_KEPT_OF_PARTY)
        self.close()  # groups that are not read any more: `_files` has taken out the others
        self._groups = found
        left_out = len(readable) - len(found) + tree.unvisited
        points.add("sonde.cgroup.pressure_left_out", left_out)

    def _of_node(self, tree: GroupTree) -> Iterator[_Found]:
        for folder, path, party in tree.groups():
            if path and _is_populated(folder):
                yield _Found(folder, path, party)

    def _of_processes(self, pids: frozenset[int]) -> Iterator[_Found]:
        raws = {self._raw_path(pid) for pid in procfs.family(pids)}
        for raw in sorted(raws):
            folder = self._mount + os.fsdecode(raw)
            is_outside = raw.startswith(b"/..")  # of the part of the hierarchy that is mounted here
            if raw.strip(b"/") and not is_outside and os.path.isdir(folder):  # noqa: PTH112
                path = procfs.text(raw)
                yield _Found(folder, path, self._parties.of(path))

    def _raw_path(self, pid: int) -> bytes:
        """The group of a process; b'' where that is not known."""
        for line in (procfs.read_file(f"{self._processes}/{pid}/cgroup") or b"").split(b"\n"):
            if line.startswith(b"0::"):
                return line[3:]
        return b""

    def _files(self, one: _Found, is_kept: bool) -> dict[str, KernelFile]:
        """The files of a group by resource; those that are open already are taken out of
        `self._groups`."""
        before = self._groups.pop(one.path, {})
        limited = limited_files(one.folder, frozenset({"v2"})) if self._are_limited_read else {}
        files = {}
        for resource in RESOURCES:
            if f"pressure_{resource}" not in limited:
                known = before.pop(resource, None)
                files[resource] = known or KernelFile(f"{one.folder}/{resource}.pressure")
                files[resource].is_kept = is_kept
        for gone in before.values():
            gone.close()
        return files

    def _read(self, points: Points) -> None:
        for path, files in self._groups.items():
            for resource, file in files.items():
                try:
                    raw = file.read()
                except SourceUnavailable:
                    continue  # removed; the next look sees it
                for kind, seconds in waiting_times(raw):
                    label = labels(
                        sonde__cgroup=path,
                        sonde__resource=resource,
                        sonde__pressure=kind.decode("ascii", "replace"),
                    )
                    self._counters.report(points, "sonde.cgroup.pressure", seconds, label)


def _is_populated(folder: str) -> bool:
    """Whether a process is in the group or below it."""
    try:
        fd = os.open(f"{folder}/cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return b"populated 1" in os.read(fd, EVENTS_BYTES)
    except OSError:
        return False
    finally:
        os.close(fd)
