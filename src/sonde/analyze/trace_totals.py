# SPDX-License-Identifier: Apache-2.0
"""Totals of a trace's calls and runs, as a capture has them, for a verdict on its threads.

A trace of a running process has every run of the device and every call, and no function of the
program. The capture beside it has the time of the threads, by cause and place. With the trace's
calls and runs among its totals it is what a recording with timed runs is, and nothing is estimated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from sonde.analyze.blamed_stalls import BlamedStalls
from sonde.analyze.graph_captures import GraphCaptures, captures_of, with_captured_code
from sonde.analyze.kernels import UNDERFILLED
from sonde.analyze.offenders import WAITS_IN_CALLS
from sonde.analyze.stalls import DeviceState, Stalls
from sonde.analyze.thread_time import ACTIVITY_OF_CALL
from sonde.model.causes import Cause
from sonde.model.distinct_rows import distinct_rows
from sonde.model.timeline import (
    I64,
    Activity,
    CallKind,
    CopyDirection,
    DeviceKind,
    Timeline,
    Total,
    TotalKind,
    TrackKind,
)

BEYOND_NS = 1_000_000_000
"""Totals of a capture that is longer than the trace by more are of other work, too."""
FEW_BLOCKS = 16
"""Kernels with at most this many blocks are small, where the multiprocessors are not known."""
_CALL_OF = {
    DeviceKind.KERNEL: CallKind.LAUNCH,
    DeviceKind.COLLECTIVE: CallKind.LAUNCH,
    DeviceKind.COPY: CallKind.COPY,
    DeviceKind.SET: CallKind.SET,
}
"""The call that asks for a run."""


@dataclass(frozen=True, slots=True)
class ExactTime:
    """Shares of the traced time, of which a recording has estimates."""

    computed: float
    """With a kernel running."""
    copying: float
    """With copies or sets, and no kernel."""
    exchanging: float
    """With collectives alone."""


@dataclass(frozen=True, slots=True)
class TracedCapture:
    """A capture with the calls and runs of the trace beside it among its totals."""

    timeline: Timeline
    exact: ExactTime


def traced_capture(timeline: Timeline, blamed: BlamedStalls) -> TracedCapture | None:
    """The capture beside a trace, in its clock, with what the trace has of one device. None
    without a capture of mostly the same time, or where the trace has functions of the program or
    several processes."""
    beside, stalls = timeline.beside, blamed.stalls
    if beside is None or len(timeline.host) or not len(timeline.calls) or not len(stalls.events):
        return None
    there = {
        (one.pid, one.number): track
        for track, one in enumerate(beside.tracks)
        if one.kind == TrackKind.THREAD
    }
    track_of = np.array([there.get((one.pid, one.number), -1) for one in timeline.tracks])
    callers = np.unique(timeline.calls.track)
    if len(np.unique(timeline.pid_of_track[callers])) > 1 or (track_of[callers] < 0).all():
        return None
    start, end = int(stalls.window.start[0]), int(stalls.window.end[-1])
    if beside.end_ns - beside.start_ns - (end - start) > BEYOND_NS:
        return None
    shift = timeline.wall_offset_ns - beside.wall_offset_ns
    kept = [one for one in beside.totals if one.kind != TotalKind.CALL]
    times = (beside.end_ns - beside.start_ns) / (end - start)
    captures = captures_of(timeline)
    captured = {
        int(track_of[track]): round(times * ns)
        for track, ns in captures.lengths_ns().items()
        if track_of[track] >= 0
    }
    kept = list(with_captured_code(kept, captured))
    calls = _calls(timeline, stalls, track_of, captures, times)
    totals = [
        *kept,
        *_with_places(calls, kept),
        *_runs(timeline, stalls, track_of, blamed.total_ns(Cause.GPU_CONTENTION)),
    ]
    joined = replace(
        beside,
        totals=[one for one in totals if one.track >= 0],
        timed_ns=(start + shift, end + shift),
        multiprocessors=timeline.multiprocessors,
    )
    window = max(1, stalls.window_ns)
    exact = ExactTime(
        stalls.computing.total / window,
        _in(stalls, DeviceState.COPYING) / window,
        _in(stalls, DeviceState.COLLECTIVE) / window,
    )
    return TracedCapture(joined, exact)


def _in(stalls: Stalls, state: DeviceState) -> int:
    """How long the device was in a state, in ns."""
    return int(stalls.duration_ns[stalls.state == state].sum())


def _calls(
    timeline: Timeline, stalls: Stalls, track_of: I64, captures: GraphCaptures, times: float
) -> Iterator[Total]:
    """The calls by thread, kind and direction of copies, `times` as many: for the time of the
    whole capture. Those within a capture of a graph build it."""
    calls, events = timeline.calls, stalls.events
    order = np.argsort(events.correlation, kind="stable")
    ids = events.correlation[order]
    at = order[np.minimum(np.searchsorted(ids, calls.correlation), len(ids) - 1)]
    known = (events.correlation[at] == calls.correlation) & (calls.correlation != 0)
    is_copy = known & (calls.kind == CallKind.COPY)
    direction = np.where(is_copy, events.direction[at], CopyDirection.UNKNOWN)
    moved = np.where(is_copy, events.bytes[at], 0)
    builds = captures.holds(calls.track.astype(np.int64), calls.start_ns)
    kind_of = np.where(builds, CallKind.BUILD, calls.kind)
    keys = np.stack([track_of[calls.track], kind_of, direction], axis=1)
    for (track, kind, way), rows in _groups(keys):
        yield Total(
            track,
            TotalKind.CALL,
            "",
            CallKind(kind),
            ns=round(times * int(calls.duration_ns[rows].sum())),
            count=round(times * len(rows)),
            bytes=round(times * int(moved[rows].sum())),
            direction=CopyDirection(way),
        )


def _with_places(calls: Iterable[Total], kept: Iterable[Total]) -> Iterator[Total]:
    """The calls, each split by the places where its thread was in such calls, by stacks: on a CPU
    or blocked. A trace of a running process has calls without stacks."""
    places: dict[tuple[int, Activity], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for one in kept:
        if one.kind == TotalKind.SAMPLED:
            places[one.track, Activity(one.name)][one.location] += one.ns
        elif one.kind == TotalKind.BLOCKED and one.wait_detail in WAITS_IN_CALLS:
            places[one.track, Activity.DEVICE_WAIT][one.location] += one.ns
    for call in calls:
        if call.call == CallKind.EVENT:  # short, and seldom met by a sample
            yield call
            continue
        activity = ACTIVITY_OF_CALL.get(call.call, Activity.LAUNCH_PATH)
        waits = call.call == CallKind.COPY and call.direction == CopyDirection.D2H
        mine = places[call.track, Activity.DEVICE_WAIT] if waits else {}
        mine = mine or places[call.track, activity]
        whole = sum(mine.values())
        left = call
        for place, ns in sorted(mine.items()):
            part = ns / whole
            piece = replace(
                call,
                location=place,
                ns=round(call.ns * part),
                count=round(call.count * part),
                bytes=round(call.bytes * part),
            )
            left = replace(
                left,
                ns=left.ns - piece.ns,
                count=left.count - piece.count,
                bytes=left.bytes - piece.bytes,
            )
            yield piece
        if left.ns or left.count:
            yield left


def _runs(timeline: Timeline, stalls: Stalls, track_of: I64, taken_ns: int) -> Iterator[Total]:
    """The runs by thread and kernel, and the kernels by stream. `taken_ns`: what other processes
    had of the device."""
    calls, events = timeline.calls, stalls.events
    asking = track_of[calls.track[np.argsort(calls.correlation, kind="stable")]]
    ids = np.sort(calls.correlation)
    at = np.minimum(np.searchsorted(ids, events.correlation), len(ids) - 1)
    main = int(np.bincount(track_of[calls.track][track_of[calls.track] >= 0]).argmax())
    track = np.where(ids[at] == events.correlation, asking[at], main)
    keys = np.stack([track, events.kind, events.name, events.direction], axis=1)
    for (mine, kind, name, way), rows in _groups(keys):
        yield Total(
            mine,
            TotalKind.RUN,
            timeline.names[name],
            _CALL_OF[DeviceKind(kind)],
            ns=int(events.duration_ns[rows].sum()),
            count=len(rows),
            bytes=int(events.bytes[rows].sum()),
            direction=CopyDirection(way),
        )
    kernels = np.flatnonzero(events.kind == DeviceKind.KERNEL)
    processors = timeline.multiprocessors.get(stalls.device, 0)
    least = UNDERFILLED * processors if processors else FEW_BLOCKS + 1
    keys = np.stack([track[kernels], events.track[kernels]], axis=1)
    for (mine, stream), of in _groups(keys):
        rows = kernels[of]
        small = rows[(events.blocks[rows] > 0) & (events.blocks[rows] < least)]
        ns = int(events.duration_ns[rows].sum())
        number = timeline.tracks[stream].number
        yield Total(mine, TotalKind.STREAM, "", CallKind.OTHER, ns, len(rows),
                    device=stalls.device, stream=number)  # fmt: skip
        if len(small):
            ns = int(events.duration_ns[small].sum())
            yield Total(mine, TotalKind.UNDERFILLED, "", CallKind.OTHER, ns, 0)
    if taken_ns:
        yield Total(main, TotalKind.INTERRUPTED, "", CallKind.OTHER, taken_ns, 0)


def _groups(keys: I64) -> Iterator[tuple[tuple[int, ...], I64]]:
    """Rows with the same key: (key, their numbers)."""
    different, inverse = distinct_rows(list(keys.T))
    order = np.argsort(inverse, kind="stable")
    borders = np.searchsorted(inverse[order], np.arange(len(different) + 1))
    for number, key in enumerate(different.tolist()):
        yield tuple(key), order[borders[number] : borders[number + 1]]
