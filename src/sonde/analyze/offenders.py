# SPDX-License-Identifier: Apache-2.0
"""Evidence of other processes on a device. Without it, no other process is blamed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from sonde.analyze.ranking import LEAST_SHARE
from sonde.model.timeline import Activity, DeviceUse, Mask, Timeline, TotalKind, WaitDetail

LEAST_USE = 0.01
"""NVML reports whole percents: one percent is the least that it can show."""
LEAST_REPORTS = 3
"""Fewer reports do not show how much a process used the device: one comes a second."""
WAITS_IN_CALLS = (WaitDetail.DEVICE, WaitDetail.IN_CALL)
"""Waits within calls of a device."""


@dataclass(frozen=True, slots=True)
class OtherUse:
    """Another process that ran work on a device in a span of time."""

    pid: int
    name: str
    share: float
    """Share of the time in which any of its kernels ran: the mean of the driver's reports."""
    reports: int
    """The driver's reports in the span in which the process ran work."""
    of: int
    """All reports of the driver on the device in the span."""
    location: str = ""
    """The code that asked for most of its kernels, if it is in the record, too."""

    @property
    def text(self) -> str:
        """For people."""
        who = f"{self.name} ({self.pid})" if self.name else f"process {self.pid}"
        asking = f", for kernels of {self.location}" if self.location else ""
        return (
            f"{who} used the device for {100 * self.share:.0f} % of the time by the driver's "
            f"reports, in {self.reports} of {self.of}{asking}"
        )


def processes_of(timeline: Timeline) -> set[int]:
    """The processes that asked a device for work in this record."""
    used = np.zeros(len(timeline.pid_of_track), bool)
    used[timeline.calls.track] = True
    used[timeline.device.track] = True
    return set(np.unique(timeline.pid_of_track[used]).tolist())


def processes_on(timeline: Timeline, device: int) -> set[int]:
    """The processes whose operations make up the streams of a device in this record; all that asked
    a device for work, where the streams do not show whose they are.

    Another one may be recorded, too: a child that computes on the same device takes turns with it.
    """
    tracks = timeline.device.track[timeline.device_of_track[timeline.device.track] == device]
    callers = set(np.unique(timeline.pid_of_track[timeline.calls.track]).tolist())
    mine = callers.intersection(np.unique(timeline.pid_of_track[tracks]).tolist())
    return mine or processes_of(timeline)


def reports_on_others(
    timeline: Timeline, devices: Collection[int], pids: Collection[int]
) -> list[DeviceUse]:
    """The driver's reports on processes other than `pids`.

    Empty if the driver does not list any of `pids` by the same numbers: then one of the others may
    be the program itself, as seen from another PID namespace.
    """
    listed = {*timeline.gpus_of, *(one.pid for one in timeline.busy_of)}
    if not listed.intersection(pids):
        return []
    return [
        one
        for one in timeline.busy_of
        if one.device in devices and one.pid not in pids and len(one.time_ns)
    ]


def _asking(timeline: Timeline, pid: int) -> str:
    """The place in a process that asked for most of its kernels' time, or that launches most where
    no run of it was timed; '' not known."""
    places: dict[str, int] = defaultdict(int)
    launching: dict[str, int] = defaultdict(int)
    for one in timeline.totals:
        if not one.location or timeline.tracks[one.track].pid != pid:
            continue
        if one.kind == TotalKind.STREAM:
            places[one.location] += one.ns
        elif one.kind == TotalKind.SAMPLED and one.name == Activity.LAUNCH_PATH:
            launching[one.location] += one.ns
    places = places or launching
    return max(places, key=lambda place: places[place], default="")


def waits_for_device(timeline: Timeline, pid: int) -> bool:
    """Whether threads of a process wait in calls of a device for `LEAST_SHARE` of the record, by
    the totals of a capture that was made beside the trace."""
    if timeline.beside is None:
        return False
    tracks, ns = timeline.beside.tracks, 0
    for one in timeline.beside.totals:
        if tracks[one.track].pid != pid:
            continue
        polls = one.kind == TotalKind.SAMPLED and one.name == Activity.DEVICE_WAIT
        blocked = one.kind == TotalKind.BLOCKED and one.wait_detail in WAITS_IN_CALLS
        ns += one.ns if polls or blocked else 0
    return ns >= LEAST_SHARE * (timeline.beside.end_ns - timeline.beside.start_ns)


def _inside(use: DeviceUse, span: tuple[int, int]) -> Mask:
    return (use.time_ns >= span[0]) & (use.time_ns <= span[1])


def _reports_on(timeline: Timeline, device: int, span: tuple[int, int]) -> int:
    """How many reports on a device lie in a span (ns): those with any process. What shares are
    divided by, as the driver leaves processes out of reports in which they did nothing."""
    times = [one.time_ns[_inside(one, span)] for one in timeline.busy_of if one.device == device]
    return len(np.unique(np.concatenate(times))) if times else 0


def own_use(
    timeline: Timeline, devices: Collection[int], pid: int, span: tuple[int, int]
) -> float | None:
    """Share of a span (ns) in which kernels of one process ran: the mean of the driver's reports,
    summed over `devices`. A span with few reports begins with the latest ones before it, but not
    with the first, which is of a time before the record. None where fewer than `LEAST_REPORTS` list
    the process."""
    mine = [one for one in timeline.busy_of if one.device in devices and one.pid == pid]
    times = [one.time_ns for one in timeline.busy_of if one.device in devices]
    before_end = np.unique(np.concatenate(times or [np.zeros(0, np.int64)]))
    latest = before_end[1:][before_end[1:] <= span[1]][-LEAST_REPORTS:]
    span = (min(span[0], *latest.tolist()) if len(latest) else span[0], span[1])
    inside = [one.share[_inside(one, span)] for one in mine]
    if max(map(len, inside), default=0) < LEAST_REPORTS:
        return None
    return sum(
        float(share.sum()) / _reports_on(timeline, one.device, span)
        for one, share in zip(mine, inside, strict=True)
        if len(share)
    )


def others_on_device(
    timeline: Timeline, devices: Collection[int], pids: Collection[int], span: tuple[int, int]
) -> list[OtherUse]:
    """Processes other than `pids` that used one of the devices in a span (ns), the busiest first.

    `devices`: indices; empty: unknown, then nothing is known of others.
    """
    if not (others := reports_on_others(timeline, devices, pids)):
        return []
    names = {track.pid: track.process or track.name for track in timeline.tracks}
    found = []
    for one in others:
        share = one.share[_inside(one, span)]
        busy = share >= LEAST_USE
        if busy.any():
            whole = _reports_on(timeline, one.device, span)
            mean = float(share.sum()) / whole
            name, place = names.get(one.pid, ""), _asking(timeline, one.pid)
            found.append(OtherUse(one.pid, name, mean, int(busy.sum()), whole, place))
    return sorted(found, key=lambda use: -use.share)
