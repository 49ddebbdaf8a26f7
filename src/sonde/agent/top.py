# SPDX-License-Identifier: Apache-2.0
"""Which processes use the CPUs and the devices now, between one look and the next.

CPU time and memory come from /proc; device time from processes that have the injected library, by
the device runs that were timed since the last look, each counted by its weight.
"""

from __future__ import annotations

import pwd
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Final

from sonde import procfs
from sonde.collect.collector import Batch
from sonde.collect.device_time import DeviceTime
from sonde.model.process import KTHREADD_PID
from sonde.model.rows import DeviceRunRow

LAUNCHES: Final = ("kernel", "replay")
"""Kinds of device runs that count as launches."""


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """What a process asked of devices between two looks."""

    busy: float
    """Device time of its runs divided by the time passed; above 1 where several streams or devices
    run at once."""
    launches_per_s: float
    copied_bytes_per_s: float
    timed: int
    """Runs that were timed, from which the other numbers are estimated."""


@dataclass(frozen=True, slots=True)
class Usage:
    """One process between two looks."""

    pid: int
    user: str
    name: str
    cpu: float
    """CPU time divided by the time passed: 1 is one CPU."""
    resident_bytes: int
    device: DeviceShare | None
    """None: it has no injected library, or another instance of Sonde reads that."""
    is_kernel: bool = False
    """It is a thread of the kernel."""

    @property
    def is_idle(self) -> bool:
        """Whether it used neither CPUs nor devices."""
        return not self.cpu and (self.device is None or not self.device.timed)


@dataclass(slots=True)
class _Seen:
    stat: procfs.Stat
    user: str


@dataclass(slots=True)
class _Sums:
    """Of one process's runs, each times its weight; `timed` without."""

    ns: float = 0.0
    launches: float = 0.0
    bytes: float = 0.0
    timed: int = 0


@dataclass(slots=True)
class Top:
    """Takes a look at all processes each time it is asked to."""

    pids: Collection[int] | None
    """The processes of interest, for device time with their descendants; None: all."""
    budget: float
    """Of each program's time, the share that timing its launches may take."""
    _device: DeviceTime = field(init=False)
    _before: dict[int, _Seen] = field(init=False)
    _at_ns: int = field(init=False)

    def __post_init__(self) -> None:
        self._device = DeviceTime(self.pids, self.budget)
        self._device.start()
        self._device.drain(0, True)  # what was timed before is of no interest
        self._before = _processes(self.pids)
        self._at_ns = time.monotonic_ns()

    def look(self) -> list[Usage]:
        """What processes used since the last look: the busiest on a device first, then the busiest
        on the CPUs. A process that is new has used no CPU time yet."""
        batch = self._device.drain(self._at_ns, True)
        now, now_ns = _processes(self.pids), time.monotonic_ns()
        passed_ns = max(1, now_ns - self._at_ns)
        sums = _by_process(batch)
        found = []
        for pid, seen in now.items():
            before = self._before.get(pid)
            used_ns = 0
            if before is not None and before.stat.start_ns == seen.stat.start_ns:
                used_ns = seen.stat.cpu_ns - before.stat.cpu_ns
            device = None
            if pid in self._device.pids:
                device = _share(sums.get(pid, _Sums()), passed_ns)
            cpu = max(0, used_ns) / passed_ns
            stat = seen.stat
            is_kernel = KTHREADD_PID in (pid, stat.ppid)
            found.append(
                Usage(pid, seen.user, stat.comm, cpu, stat.resident_bytes, device, is_kernel)
            )
        self._before, self._at_ns = now, now_ns
        return sorted(
            found, key=lambda one: (-(one.device.busy if one.device else 0.0), -one.cpu, one.pid)
        )

    @property
    def processes(self) -> int:
        """How many there were at the last look."""
        return len(self._before)

    def close(self) -> None:
        """Detach from the injected libraries, which stop timing."""
        self._device.stop()


def _share(sums: _Sums, passed_ns: int) -> DeviceShare:
    second = 1e9 / passed_ns
    return DeviceShare(sums.ns / passed_ns, sums.launches * second, sums.bytes * second, sums.timed)


def _by_process(batch: Batch) -> Mapping[int, _Sums]:
    sums: dict[int, _Sums] = {}
    for run in batch.records(DeviceRunRow):
        if run.kind == "sync":
            continue
        of = sums.setdefault(run.pid, _Sums())
        of.timed += 1
        of.ns += run.weight * (run.end_time_ns - run.start_time_ns)
        of.launches += run.weight if run.kind in LAUNCHES else 0.0
        of.bytes += run.weight * run.bytes if run.kind == "copy" else 0.0
    return sums


def _processes(pids: Collection[int] | None) -> dict[int, _Seen]:
    wanted = procfs.pids() if pids is None else pids
    stats = zip(wanted, procfs.read_stats(list(wanted), is_patient=True), strict=True)
    return {pid: seen for pid, stat in stats if (seen := _process(pid, stat)) is not None}


def _process(pid: int, stat: procfs.Stat | None) -> _Seen | None:
    try:
        user = procfs.owner_of(pid)
    except OSError:
        return None
    return None if stat is None else _Seen(stat, _user(user))


@cache
def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
