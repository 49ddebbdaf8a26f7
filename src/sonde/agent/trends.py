# SPDX-License-Identifier: Apache-2.0
"""Reads the levels that early warnings follow: memory of control groups, disks, the run queue,
temperatures.

A few files every `EVERY_NS`: only the control groups of chosen processes, and only local file
systems, as statvfs() waits for a remote one that does not answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Final

from sonde import procfs
from sonde.collect.host.shares import share_out
from sonde.diagnose.early import EarlyWarning, EarlyWarnings, Sign
from sonde.procfs.group_folders import FILE_BYTES

EVERY_NS: Final = 5_000_000_000
"""Between two readings."""
MAX_RUNNABLE: Final = 8.0
"""Load average for each CPU, from which on threads wait most of the time; limit of this level."""
MAX_PROCESSES: Final = 32
"""Whose control groups are read; each party (`procfs.party_of`) has as many as the others."""
MAX_GROUPS: Final = 64
"""The nearest ones of these processes first."""
MAX_MOUNTS: Final = 16
MAX_SENSORS: Final = 32
LOCAL: Final = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs", "vfat"))
"""File systems of which the kernel knows the free space without asking anybody."""
MIN_BYTES: Final = 64 << 20
"""Size of a file system; smaller ones are often full on purpose."""


class Trends:
    """Levels of one node, and the early warnings that follow from them."""

    def __init__(self, thermal: Path = Path("/sys/class/thermal")) -> None:
        """`thermal`: the folder of thermal zones."""
        self._early = EarlyWarnings()
        self._thermal = thermal
        self._due_ns = 0
        self._not_read = 0
        """Processes, control groups, file systems and sensors beyond the bounds, and groups that
        did not answer, over all readings."""

    def look(
        self, now_ns: int, pids: Iterable[int], party_of: Callable[[int], int] = procfs.party_of
    ) -> list[EarlyWarning]:
        """New warnings; none where the last reading was less than `EVERY_NS` ago. `pids`: processes
        whose control groups are read."""
        if now_ns < self._due_ns:
            return []
        self._due_ns = now_ns + EVERY_NS
        levels = (
            *self._groups(pids, party_of),
            *self._disks(),
            *_run_queue(),
            *self._temperatures(),
        )
        found = (self._early.take(*level, now_ns) for level in levels)
        return [it for it in found if it is not None]

    @property
    def left_out(self) -> int:
        """Levels for which there was no room, each time that they would have been read."""
        return self._early.left_out + self._not_read

    def _groups(
        self, pids: Iterable[int], party_of: Callable[[int], int]
    ) -> Iterator[tuple[Sign, str, float, float]]:
        there = [(party_of(pid), pid) for pid in sorted(pids)]
        self._not_read += max(0, len(there) - MAX_PROCESSES)
        read = share_out(there, MAX_PROCESSES, lambda _: False)
        mounts = procfs.mounts_by_controller() if read else {}
        of_memory = {name: point for name, point in mounts.items() if name in ("memory", "v2")}
        # In turn: a user may nest a control group as deeply as the kernel allows.
        each = zip_longest(*(procfs.groups_of(pid, of_memory) for pid in read))
        folders = dict.fromkeys(folder for turn in each for folder in turn if folder)
        self._not_read += max(0, len(folders) - MAX_GROUPS)
        asked = list(folders)[:MAX_GROUPS]
        points = set(of_memory.values())
        found, unread = procfs.GROUPS.look(
            asked,
            lambda folder: procfs.payer_of_folder(folder, points),
            [procfs.MEMORY_FILES] * len(asked),
            limit=FILE_BYTES,
        )
        self._not_read += unread
        for folder, it in zip(asked, found, strict=True):
            usage, limit = procfs.working_set_in(it.contents if it is not None else {})
            if limit:
                yield Sign.MEMORY, folder, float(usage), float(limit)

    def _disks(self) -> Iterator[tuple[Sign, str, float, float]]:
        by_device: dict[str, tuple[bool, str]] = {}
        for line in _text(Path("/proc/self/mountinfo")).split("\n"):
            # proc_pid_mountinfo(5): id parent dev root point options … - type source options
            before, _, after = line.partition(" - ")
            words, kind = before.split(" "), after.split(" ")[0]
            # By the device's number: file systems in memory all have the source 'tmpfs'.
            if len(words) >= 5 and kind in LOCAL:
                by_device.setdefault(words[2], (kind == "tmpfs", words[4]))
        self._not_read += max(0, len(by_device) - MAX_MOUNTS)
        # Disks first: each pod of a node has file systems in memory.
        for _, escaped in sorted(by_device.values(), key=itemgetter(0))[:MAX_MOUNTS]:
            with suppress(OSError, UnicodeError):
                point = escaped.encode().decode("unicode_escape").encode("latin-1").decode()
                found = os.statvfs(point)
                size = found.f_blocks * found.f_frsize
                if size >= MIN_BYTES:
                    free = found.f_bavail * found.f_frsize
                    yield Sign.DISK, point, float(size - free), float(size)

    def _temperatures(self) -> Iterator[tuple[Sign, str, float, float]]:
        with suppress(OSError):
            zones = sorted(self._thermal.glob("thermal_zone*"))
            self._not_read += max(0, len(zones) - MAX_SENSORS)
            for zone in zones[:MAX_SENSORS]:
                now = _number(zone / "temp")
                limit = _passive(zone)
                if now > 0 and limit > 0:
                    yield Sign.TEMPERATURE, zone.name, now / 1000, limit / 1000


def _passive(zone: Path) -> int:
    """The temperature (0.001 degree Celsius) from which on a thermal zone lowers clocks or acts
    otherwise: the lowest of its trip points; 0: unknown."""
    found = [
        _number(kind.with_name(kind.name.replace("_type", "_temp")))
        for kind in zone.glob("trip_point_*_type")
        if _text(kind) in ("passive", "hot", "critical")
    ]
    return min((it for it in found if it > 0), default=0)


def _run_queue() -> Iterator[tuple[Sign, str, float, float]]:
    """The load average over one minute for each CPU: short peaks hardly change it."""
    words = _text(Path("/proc/loadavg")).split()
    with suppress(ValueError, IndexError):
        cpus = os.cpu_count() or 1
        yield Sign.RUN_QUEUE, "all CPUs", float(words[0]) / cpus, MAX_RUNNABLE


def _text(path: Path) -> str:
    return (procfs.read_file(str(path)) or b"").decode("utf-8", "replace").strip()


def _number(path: Path) -> int:
    """The number in a file; -1 without one."""
    text = _text(path)
    return int(text) if text.lstrip("-").isdigit() and len(text) < 19 else -1
