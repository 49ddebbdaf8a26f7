# SPDX-License-Identifier: Apache-2.0
"""Control groups that have a limit: how often they ran into it (cgroup-v1, cgroup-v2).

Groups without a quota or a limit are not read: there may be thousands, and nothing holds them back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sonde import procfs
from sonde.collect.host.files import Counters, KernelFile, labels, table
from sonde.collect.host.pressure import stalls
from sonde.collect.polling import DEAR_S, STEADY_S, Points, Poll, SignalLost

MAX_GROUPS = 256
"""Limited groups that are read; how many more there are is told."""
MAX_VISITED = 8_192
LINE_BYTES = 256
NO_FOLDERS = 2
"""Links to a folder that has none below it, which control groups count (kernfs)."""
NO_LIMIT_BYTES = 1 << 60
"""Version 1 writes a number near 2^63 where there is no limit."""


@dataclass(slots=True)
class _Group:
    """A limited group and its files, by what they tell."""

    label: str
    files: dict[str, KernelFile] = field(default_factory=dict)


class Groups:
    """Throttling by quota, running into the memory limit, pressure inside."""

    name = "cgroups"

    def __init__(self, mountinfo: Path = Path("/proc/self/mountinfo")) -> None:
        self._mountinfo = mountinfo
        self._groups: dict[str, _Group] = {}
        self._counters = Counters()
        self._left_out = 0

    def open(self) -> None:
        """Find the limited groups. Raises SignalLost."""
        if not list(_mounts(self._mountinfo)):
            raise SignalLost("no control groups are mounted", whole=True)
        self._look(Points())

    def polls(self) -> Sequence[Poll]:
        """Counters every second; groups are looked for less often."""
        return [Poll("limits", STEADY_S, self._read), Poll("groups", DEAR_S, self._look)]

    def close(self) -> None:
        """Close every file."""
        for group in self._groups.values():
            for file in group.files.values():
                file.close()
        self._groups = {}

    def _look(self, points: Points) -> None:
        found: dict[str, _Group] = {}
        left_out = 0
        for mount, kinds in _mounts(self._mountinfo):
            for folder in _folders(mount):
                files = _limited(folder, kinds)
                if not files:
                    continue
                path = folder[len(mount) :] or "/"
                known = self._groups.get(path)
                group = found.get(path)
                if group is None:
                    if len(found) >= MAX_GROUPS:
                        left_out += 1
                        continue
                    group = found[path] = _Group(labels(sonde__cgroup=path))
                for name, file in files.items():
                    kept = known.files.pop(name, None) if known else None
                    group.files[name] = kept or KernelFile(file)
        self.close()  # those that were not taken over
        self._groups = found
        if left_out != self._left_out:
            self._left_out = left_out
            points.add("sonde.cgroup.left_out", left_out)

    def _read(self, points: Points) -> None:
        for group in self._groups.values():
            for what, file in group.files.items():
                try:
                    raw = file.read()
                except SignalLost:
                    continue  # removed; the next look sees it
                getattr(self, f"_tell_{what}")(points, group.label, raw)

    def _tell_cpu(self, points: Points, label: str, raw: bytes) -> None:
        """cpu.stat: version 1 tells ns, version 2 µs."""
        found = table(raw)
        tell = self._counters.tell
        throttled_s = found.get("throttled_time", 0) / 1e9 + found.get("throttled_usec", 0) / 1e6
        tell(points, "sonde.cgroup.cpu.periods", found.get("nr_periods", 0), label)
        tell(points, "sonde.cgroup.cpu.throttled", found.get("nr_throttled", 0), label)
        tell(points, "sonde.cgroup.cpu.throttled_time", throttled_s, label)

    def _tell_memory_events(self, points: Points, label: str, raw: bytes) -> None:
        found = table(raw)
        tell = self._counters.tell
        tell(points, "sonde.cgroup.memory.limit_hits", found.get("max", 0), label)
        tell(points, "sonde.cgroup.memory.oom_kills", found.get("oom_kill", 0), label)

    def _tell_memory_failcnt(self, points: Points, label: str, raw: bytes) -> None:
        self._counters.tell(points, "sonde.cgroup.memory.limit_hits", int(raw), label)

    def _tell_memory_oom_control(self, points: Points, label: str, raw: bytes) -> None:
        kills = table(raw).get("oom_kill", 0)
        self._counters.tell(points, "sonde.cgroup.memory.oom_kills", kills, label)

    def _tell_memory_usage(self, points: Points, label: str, raw: bytes) -> None:
        self._counters.tell(points, "sonde.cgroup.memory.usage", int(raw), label)

    def _tell_memory_stat(self, points: Points, label: str, raw: bytes) -> None:
        found = table(raw)
        tell = self._counters.tell
        major = found.get("total_pgmajfault", found.get("pgmajfault", 0))
        tell(points, "sonde.cgroup.memory.major_faults", major, label)
        freed = found.get("pgsteal")
        if freed is not None:
            tell(points, "sonde.cgroup.memory.reclaimed", freed, label)

    def _tell_pressure(self, points: Points, label: str, raw: bytes, resource: str) -> None:
        path = label[:-1]
        for kind, seconds in stalls(raw):
            both = f'{path},"sonde.pressure":"{kind.decode()}","sonde.resource":"{resource}"}}'
            self._counters.tell(points, "sonde.cgroup.pressure", seconds, both)

    def _tell_pressure_cpu(self, points: Points, label: str, raw: bytes) -> None:
        self._tell_pressure(points, label, raw, "cpu")

    def _tell_pressure_memory(self, points: Points, label: str, raw: bytes) -> None:
        self._tell_pressure(points, label, raw, "memory")

    def _tell_pressure_io(self, points: Points, label: str, raw: bytes) -> None:
        self._tell_pressure(points, label, raw, "io")


def _mounts(mountinfo: Path) -> Iterator[tuple[str, frozenset[str]]]:
    """(where it is mounted, what it controls: v2, cpu, memory)."""
    seen = set()
    for line in procfs.read_lines(mountinfo):
        before, _, after = line.partition(" - ")
        words, kinds = before.split(" "), after.split(" ")
        if len(words) < 5 or len(kinds) < 3 or words[3] != "/":
            continue
        kind = frozenset({"v2"}) if kinds[0] == "cgroup2" else frozenset(kinds[2].split(","))
        kind &= {"v2", "cpu", "memory"}
        if kinds[0].startswith("cgroup") and kind and kind not in seen:
            seen.add(kind)
            yield words[4], kind


def _folders(mount: str) -> Iterator[str]:
    """Every group below the root, parents first, as many as may be visited."""
    waiting, visited = [mount], 0
    while waiting and visited < MAX_VISITED:
        folder = waiting.pop(0)
        visited += 1
        if folder != mount:
            yield folder
        try:
            if os.stat(folder).st_nlink == NO_FOLDERS:  # noqa: PTH116
                continue  # fifty files, none of them a group
            with os.scandir(folder) as entries:
                waiting += [it.path for it in entries if it.is_dir(follow_symlinks=False)]
        except OSError:
            continue


def _limited(folder: str, kinds: frozenset[str]) -> dict[str, str]:
    """The files to read of a group that has a limit, {} for one that has none."""
    files: dict[str, str] = {}
    if "v2" in kinds:
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
    if "cpu" in kinds and _number(f"{folder}/cpu.cfs_quota_us") > 0:
        files["cpu"] = "cpu.stat"
    if "memory" in kinds and 0 <= _number(f"{folder}/memory.limit_in_bytes") < NO_LIMIT_BYTES:
        files |= {
            "memory_failcnt": "memory.failcnt",
            "memory_usage": "memory.usage_in_bytes",
            "memory_oom_control": "memory.oom_control",
            "memory_stat": "memory.stat",
        }
    return {what: f"{folder}/{name}" for what, name in files.items()}


def _word(path: str) -> str:
    """The first one in a file, by plain system calls: there are thousands of files."""
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
    try:
        return int(_word(path))
    except ValueError:
        return -1
