# SPDX-License-Identifier: Apache-2.0
"""Which variety of a cause it is (`CauseDetail`), and the figures that support it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from sonde.analyze.blamed_stalls import BlamedStalls
from sonde.analyze.causes import CODE
from sonde.analyze.launch_path import ENQUEUES
from sonde.analyze.offenders import others_on_device, processes_on
from sonde.model.causes import Cause, CauseDetail
from sonde.model.name_parts import named
from sonde.model.timeline import (
    CallKind,
    CopyDirection,
    DeviceKind,
    Memory,
    StateKind,
    Timeline,
    is_one_of,
)

SMALL_BYTES = 65_536
"""A smaller copy is mostly the cost of its call."""
MAX_TOGETHER = 64
"""Devices that are compared to find the last one in each collective; of more, none is named."""
QUOTA_WAIT_NS = 12_000_000
"""Longer waits are for a quota: time slices last milliseconds, a spent quota to its period end."""

Detail = tuple[CauseDetail, list[str]]
"""The variety of the cause, and facts for people."""


def copy(timeline: Timeline, blame: BlamedStalls) -> Detail:
    """Small, pageable or bandwidth, by the copies that the device ran."""
    events = blame.stalls.events
    rows = (events.kind == DeviceKind.COPY) & is_one_of(
        events.direction, CopyDirection.H2D, CopyDirection.D2H, CopyDirection.UNKNOWN
    )
    if not rows.any():
        return CauseDetail.NONE, []
    size, ns = events.bytes[rows], np.maximum(events.duration_ns[rows], 1)
    pageable = float(ns[events.memory[rows] == Memory.PAGEABLE].sum() / ns.sum())
    large = size >= SMALL_BYTES
    facts = [f"{len(size):,} copies, {float(np.median(size)):,.0f} bytes in the median"]
    in_large = float(ns[large].sum()) if large.any() else 0.0
    # Large copies make up less than half of the stalls and of all copying, or a quarter of stalls.
    if in_large < 0.5 * blame.total_ns(Cause.COPY) and in_large < 0.5 * ns.sum() + 1:
        return CauseDetail.SMALL, facts
    if in_large < 0.25 * blame.total_ns(Cause.COPY):
        return CauseDetail.SMALL, facts
    rate = float(size[large].sum() / ns[large].sum())
    facts.append(f"{rate:.1f} GB/s achieved")
    if pageable > 0.5:
        fact = f"{100 * pageable:.0f} % of their time from pageable memory"
        return CauseDetail.PAGEABLE, [*facts, fact]
    return CauseDetail.BANDWIDTH, facts


def run_queue(timeline: Timeline, blame: BlamedStalls) -> Detail:
    """A spent quota or preemption, by the lengths of the waits for a CPU."""
    states = timeline.states
    tracks = np.unique(blame.track[blame.cause == CODE[Cause.RUN_QUEUE]])
    rows = (states.kind == StateKind.RUNQUEUE) & np.isin(states.track, tracks)
    length = states.duration_ns[rows]
    length = length[length >= 100_000]  # shorter ones are ordinary scheduling
    if not len(length):
        return CauseDetail.NONE, []
    long_ns = float(length[length >= QUOTA_WAIT_NS].sum())
    waits = f"{len(length):,} waits" if len(length) > 1 else "one wait"
    facts = [f"{waits}, {float(np.median(length)) / 1e6:.1f} ms in the median"]
    by_quota = long_ns > 0.6 * length.sum()  # most of the waiting time
    return (CauseDetail.QUOTA if by_quota else CauseDetail.PREEMPTED), facts


def launch(timeline: Timeline, blame: BlamedStalls) -> Detail:
    """Kernels per second and their mean length."""
    events = blame.stalls.events
    rows = events.kind == DeviceKind.KERNEL
    seconds = max(blame.stalls.window_ns, 1) / 1e9
    mean = float(events.duration_ns[rows].mean()) / 1e3 if rows.any() else 0.0
    return CauseDetail.NONE, [f"{rows.sum() / seconds:,.0f} kernels/s, {mean:.1f} µs each"]


def synchronization(timeline: Timeline, blame: BlamedStalls) -> Detail:
    """How often the device had no work while a thread waited for it."""
    count = int((blame.cause == CODE[Cause.SYNCHRONIZATION]).sum())
    return CauseDetail.NONE, [
        f"{count:,} times the device had no work queued while a thread waited for it"
    ]


def collective(timeline: Timeline, blame: BlamedStalls) -> Detail:
    """Their number and lengths; of several devices, the one that most often begins last."""
    events = blame.stalls.events
    mine = events.take(events.kind == DeviceKind.COLLECTIVE)
    if not len(mine):
        return CauseDetail.NONE, []
    low, high = np.percentile(mine.duration_ns, (10, 90)) / 1e3
    facts = [f"{len(mine):,} collectives, p10 {low:,.0f} µs, p90 {high:,.0f} µs"]
    whole = timeline.device.take(timeline.device.kind == DeviceKind.COLLECTIVE)
    device_of = timeline.device_of_track[whole.track]
    devices = np.unique(device_of)
    if len(devices) > MAX_TOGETHER:
        return CauseDetail.NONE, facts
    begins = [whole.start_ns[device_of == one] for one in devices.tolist()]
    names = [whole.name[device_of == one] for one in devices.tolist()]
    if len(devices) > 1 and all(np.array_equal(names[0], other) for other in names):
        last = np.stack(begins).argmax(axis=0)
        often = np.bincount(last, minlength=len(devices))
        share = 100 * often.max() / len(last)
        facts.append(f"GPU{devices[often.argmax()]} came last to {share:.0f} % of them")
    return CauseDetail.NONE, facts


def contention(timeline: Timeline, blame: BlamedStalls) -> Detail:
    """The processes that used the device meanwhile, by the driver's reports."""
    window = blame.stalls.window
    span = (int(window.start[0]), int(window.end[-1])) if len(window) else (0, 0)
    device = blame.stalls.device
    uses = others_on_device(timeline, [device], processes_on(timeline, device), span)
    return CauseDetail.NONE, [one.text for one in uses[:2]]


def not_taken(timeline: Timeline, blame: BlamedStalls) -> Detail:
    """How often a stream had to wait for an event before the late operation."""
    rows = np.flatnonzero(blame.cause == CODE[Cause.NOT_TAKEN])
    calls = timeline.calls
    waits = calls.kind == CallKind.EVENT
    waits &= named(timeline.names, calls.name, lambda name: "WaitEvent" in name)
    if not waits.any() or not len(rows):
        return CauseDetail.NONE, []
    launches = np.sort(calls.start_ns[is_one_of(calls.kind, *ENQUEUES)])
    before = np.searchsorted(launches, blame.launch_ns[rows], "left") - 1
    ordered = np.sort(calls.start_ns[waits])
    since = np.where(before >= 0, np.append(launches, 0)[before], 0)
    some = np.searchsorted(ordered, blame.launch_ns[rows]) > np.searchsorted(ordered, since)
    count = int(some.sum())
    return CauseDetail.NONE, [
        f"{count:,} of {len(rows):,} launches came right behind a wait of a stream for an event"
    ] * (count > 0)


DETAILS: Mapping[Cause, Callable[[Timeline, BlamedStalls], Detail]] = {
    Cause.COPY: copy,
    Cause.RUN_QUEUE: run_queue,
    Cause.COLLECTIVE: collective,
    Cause.LAUNCH: launch,
    Cause.SYNCHRONIZATION: synchronization,
    Cause.GPU_CONTENTION: contention,
    Cause.NOT_TAKEN: not_taken,
}


def detail_of(cause: Cause, timeline: Timeline, blame: BlamedStalls) -> Detail:
    """The variety of a cause and its facts; (NONE, []) where it has one variety and no facts."""
    found = DETAILS.get(cause)
    return found(timeline, blame) if found else (CauseDetail.NONE, [])
