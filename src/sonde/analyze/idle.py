# SPDX-License-Identifier: Apache-2.0
"""What a device was in at each moment of its traced windows.

Exactly one of: a kernel ran; only a collective did; only a copy or a set did; nothing did. The
last three are what a program waits for its device's work.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from sonde.analyze import intervals as sets
from sonde.analyze.intervals import Intervals
from sonde.model.timeline import I64, U8, DeviceKind, Events, Timeline


class State(IntEnum):
    """Of a device."""

    IDLE = 0
    COPYING = 1
    COLLECTIVE = 2
    TAKEN = 3
    """A kernel was on the device and did not advance: another process had its turn."""


@dataclass(frozen=True, slots=True)
class Stalls:
    """The intervals of a device without a kernel, sorted; the rest of `window` is kernels."""

    device: int
    window: Intervals
    start: I64
    end: I64
    state: U8
    events: Events
    """The device's own, sorted by start."""
    computing: Intervals

    def __len__(self) -> int:
        return len(self.start)

    @property
    def duration_ns(self) -> I64:
        """Length of each."""
        return self.end - self.start

    @property
    def window_ns(self) -> int:
        """Length of what was traced."""
        return self.window.total


def devices_of(timeline: Timeline) -> list[int]:
    """The devices that ran something."""
    lanes = np.flatnonzero(np.bincount(timeline.device.lane, minlength=1))
    devices: list[int] = np.unique(timeline.device_of_lane[lanes]).tolist()
    return devices


STRETCHED = 4
"""A kernel that takes this many times its usual time, and a turn of a rival longer, was held up."""
TURN_NS = 1_000_000
_USUAL_OF = 20
_RARE = 0.2


def stalls_of(
    timeline: Timeline,
    device: int,
    start_ns: int | None = None,
    end_ns: int | None = None,
    *,
    shared: bool = False,
) -> Stalls:
    """The stalls of one device, between two instants if given.

    `shared`: other processes are known to take turns on it, so that a kernel that takes far longer
    than it usually does was interrupted; what it took beyond is a stall.
    """
    events = timeline.device
    if len(devices_of(timeline)) > 1:
        events = events.take(timeline.device_of_lane[events.lane] == device)
    window = _window(timeline, events)
    if start_ns is not None and end_ns is not None:
        chosen = Intervals(np.array([start_ns], np.int64), np.array([end_ns], np.int64))
        window = sets.intersect(window, chosen)

    def of(*kinds: DeviceKind) -> Intervals:
        rows = events.kind == kinds[0]
        for kind in kinds[1:]:
            rows |= events.kind == kind
        return sets.intersect(sets.union(events.start_ns[rows], events.end_ns[rows]), window)

    computing = of(DeviceKind.KERNEL)
    taken = sets.intersect(_stretches(events), computing) if shared else sets.none()
    computing = sets.subtract(computing, taken)
    rest = sets.subtract(sets.subtract(window, computing), taken)
    collective = sets.intersect(of(DeviceKind.COLLECTIVE), rest)
    rest = sets.subtract(rest, collective)
    copying = sets.intersect(of(DeviceKind.COPY, DeviceKind.SET), rest)
    idle = sets.subtract(rest, copying)
    parts = (
        (idle, State.IDLE),
        (copying, State.COPYING),
        (collective, State.COLLECTIVE),
        (taken, State.TAKEN),
    )
    start = np.concatenate([part.start for part, _ in parts])
    end = np.concatenate([part.end for part, _ in parts])
    state = np.concatenate([np.full(len(part), state, np.uint8) for part, state in parts])
    order = np.argsort(start, kind="stable")
    return Stalls(device, window, start[order], end[order], state[order], events, computing)


def _stretches(events: Events) -> Intervals:
    """Where kernels took longer than kernels of their name and size do."""
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
    long = (duration > STRETCHED * usual_of) & (duration > usual_of + TURN_NS)
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
