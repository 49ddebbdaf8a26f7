# SPDX-License-Identifier: Apache-2.0
"""The stalls of a device: the parts of its traced windows without a running kernel.

At each moment a device is in exactly one state: a kernel runs, or a copy within its memory; only a
collective runs; only another copy or a memory set runs; nothing runs; or a kernel is preempted by
another process. All but the first are stalls.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from sonde.analyze import intervals as sets
from sonde.analyze.intervals import Intervals
from sonde.model.timeline import I64, U8, CopyDirection, DeviceKind, Events, Timeline


class DeviceState(IntEnum):
    """The state of a device in a stall."""

    IDLE = 0
    """Nothing ran."""
    COPYING = 1
    """Copies or memory sets ran, no kernel."""
    COLLECTIVE = 2
    """Collectives ran, no other kernel."""
    PREEMPTED = 3
    """A kernel was on the device and made no progress: another process had its time slice."""


@dataclass(frozen=True, slots=True)
class Stalls:
    """The stalls of one device, sorted; in the rest of `window`, kernels ran."""

    device: int
    window: Intervals
    """The traced time."""
    start: I64
    end: I64
    state: U8
    """`DeviceState` of each stall."""
    events: Events
    """What the device ran, sorted by start."""
    computing: Intervals
    """When kernels ran, or copies within the device's memory."""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def duration_ns(self) -> I64:
        """The length of each stall."""
        return self.end - self.start

    @property
    def window_ns(self) -> int:
        """The length of the traced time."""
        return self.window.total


def devices_of(timeline: Timeline) -> list[int]:
    """Numbers of the devices that ran anything, ascending."""
    tracks = np.flatnonzero(np.bincount(timeline.device.track, minlength=1))
    devices: list[int] = np.unique(timeline.device_of_track[tracks]).tolist()
    return devices


STRETCHED = 4
"""A kernel that takes more than this many times its usual time, and `TIME_SLICE_NS` more, was
preempted."""
TIME_SLICE_NS = 1_000_000
"""A time slice of another process is taken to be longer than this."""
_USUAL_OF = 20
"""Fewer runs of a kernel do not show its usual time."""
_RARE = 0.2
"""If a larger share of all runs is long, their length varies for another reason."""


def stalls_of(
    timeline: Timeline,
    device: int,
    start_ns: int | None = None,
    end_ns: int | None = None,
    *,
    shared: bool = False,
) -> Stalls:
    """The stalls of one device, between two times if given.

    `shared`: other processes are known to use the device in time slices. Then a kernel that takes
    far longer than usual was preempted, and the time beyond the usual one is a stall.
    """
    events = timeline.device
    if len(devices_of(timeline)) > 1:
        events = events.take(timeline.device_of_track[events.track] == device)
    window = _window(timeline, events)
    if start_ns is not None and end_ns is not None:
        chosen = Intervals(np.array([start_ns], np.int64), np.array([end_ns], np.int64))
        window = sets.intersect(window, chosen)

    def of(*kinds: DeviceKind) -> Intervals:
        rows = events.kind == kinds[0]
        for kind in kinds[1:]:
            rows |= events.kind == kind
        return sets.intersect(sets.union(events.start_ns[rows], events.end_ns[rows]), window)

    computing = sets.joined(of(DeviceKind.KERNEL), sets.intersect(_within_device(events), window))
    preempted = sets.intersect(_stretches(events), computing) if shared else sets.none()
    computing = sets.subtract(computing, preempted)
    rest = sets.subtract(sets.subtract(window, computing), preempted)
    collective = sets.intersect(of(DeviceKind.COLLECTIVE), rest)
    rest = sets.subtract(rest, collective)
    copying = sets.intersect(of(DeviceKind.COPY, DeviceKind.SET), rest)
    idle = sets.subtract(rest, copying)
    parts = (
        (idle, DeviceState.IDLE),
        (copying, DeviceState.COPYING),
        (collective, DeviceState.COLLECTIVE),
        (preempted, DeviceState.PREEMPTED),
    )
    start = np.concatenate([part.start for part, _ in parts])
    end = np.concatenate([part.end for part, _ in parts])
    state = np.concatenate([np.full(len(part), state, np.uint8) for part, state in parts])
    order = np.argsort(start, kind="stable")
    return Stalls(device, window, start[order], end[order], state[order], events, computing)


def _within_device(events: Events) -> Intervals:
    """When copies within the device's memory ran: its own work, as a kernel that copies is."""
    rows = (events.kind == DeviceKind.COPY) & (events.direction == CopyDirection.D2D)
    return sets.union(events.start_ns[rows], events.end_ns[rows])


def _stretches(events: Events) -> Intervals:
    """The time of kernels beyond the median of those with their name and number of thread blocks,
    where it is far beyond."""
    rows = np.flatnonzero(events.kind == DeviceKind.KERNEL)
    if not len(rows):
        return sets.none()
    duration = events.duration_ns[rows]
    key = events.name[rows].astype(np.int64) << 32 | events.blocks[rows]
    order = np.lexsort((duration, key))
    _, first, often = np.unique(key[order], return_index=True, return_counts=True)
    usual = duration[order][first + often // 2]
    usual_of = np.empty(len(rows), np.int64)
    often_of = np.empty(len(rows), np.int64)
    usual_of[order] = np.repeat(usual, often)
    often_of[order] = np.repeat(often, often)
    long = (duration > STRETCHED * usual_of) & (duration > usual_of + TIME_SLICE_NS)
    long &= often_of >= _USUAL_OF
    if long.mean() > _RARE:
        return sets.none()
    start = events.start_ns[rows][long] + usual_of[long]
    end = events.end_ns[rows][long]
    by_start = np.argsort(start, kind="stable")
    return sets.union(start[by_start], end[by_start])


def _window(timeline: Timeline, events: Events) -> Intervals:
    if not len(events):
        return sets.none()
    if timeline.windows_ns:
        start = np.array([begin for begin, _ in timeline.windows_ns], np.int64)
        end = np.array([end for _, end in timeline.windows_ns], np.int64)
        return sets.union(start, end)
    whole = (int(events.start_ns[0]), int(events.end_ns.max()))
    return Intervals(np.array([whole[0]], np.int64), np.array([whole[1]], np.int64))
