# SPDX-License-Identifier: Apache-2.0
"""The critical path of a step: the chain of work that its length comes from.

The path is walked back from the last operation of the step. The predecessor of an operation that
started right behind another one (in its stream, or in a stream that it waited for by an event) is
that operation.
An operation that started later waited for its launch; the launch waited for what its thread did
before, back to the thread's last wait for the device, and that wait for the operation before. While
the thread was blocked, the path goes through the thread that woke it.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from sonde.analyze.blame import LATENCY_NS
from sonde.analyze.stalls import Stalls
from sonde.analyze.stream_dependencies import awaited_by
from sonde.model.causes import PathKind
from sonde.model.timeline import CallKind, DeviceKind, StateKind, Timeline, is_one_of
from sonde.model.verdict import PathPart, StepTable

_LIMIT = 20_000
"""Operations on the path; of a longer step, only its last ones are analysed."""
_AHEAD_NS = 2_000_000_000
"""How far back launches, waits and thread states are searched: the longest time from a launch to
its kernel."""
_WAKERS = 8
"""Longest chain of threads of which each waited for the next."""
_WAITS = (CallKind.SYNC, CallKind.COPY, CallKind.FREE)
"""Calls that may wait for the device."""
_PARTS = 12
"""Parts that are reported, the largest."""


def critical_path(timeline: Timeline, stalls: Stalls, steps: StepTable | None) -> list[PathPart]:
    """The parts of the path of the step nearest to the median, largest first."""
    if steps is None or not steps.count:
        return []
    near = int(np.argmin(np.abs(np.array(steps.duration_ns) - steps.median_ns)))
    begin = steps.start_ns[near]
    return walk(timeline, stalls, begin, begin + steps.duration_ns[near])


def walk(timeline: Timeline, stalls: Stalls, begin_ns: int, end_ns: int) -> list[PathPart]:
    """The `_PARTS` largest parts of the path from `end_ns` back to `begin_ns`, or as far back as
    `_LIMIT` operations reach. All parts sum to the time that it covers."""
    events, calls = stalls.events, timeline.calls
    by_end = np.argsort(events.end_ns, kind="stable")
    ends = events.end_ns[by_end]
    call_of = _call_rows(timeline, begin_ns, end_ns)
    awaited = _awaited(timeline, stalls)
    awaited_row = -1  # what the operation before waited for, by an event
    parts: dict[tuple[str, PathKind], int] = defaultdict(int)
    now = end_ns
    for _ in range(_LIMIT):
        if now <= begin_ns:
            break
        at = int(np.searchsorted(ends, now, "right")) - 1
        if at < 0:
            break
        row = int(by_end[at]) if awaited_row < 0 else awaited_row
        ended = int(events.end_ns[row])
        if ended < now:  # nothing ended at `now`: the host is on the path
            following = int(np.searchsorted(events.start_ns, now, "left"))
            begins = following < len(events) and int(events.start_ns[following]) == now
            call = call_of.get(int(events.correlation[following]), -1) if begins else -1
            launch = int(calls.start_ns[call]) if call >= 0 else ended
            since = max(ended, begin_ns)
            if launch > since:
                parts["launch", PathKind.HOST] += now - launch
                now = _host_before(timeline, call, launch, since, parts)
            else:
                parts["launch and host code", PathKind.HOST] += now - since
                now = ended
            continue
        start = int(events.start_ns[row])
        is_kernel = events.kind[row] <= DeviceKind.COLLECTIVE
        kind = PathKind.KERNEL if is_kernel else PathKind.COPY
        name = timeline.names[int(events.name[row])]
        parts[name, kind] += now - max(start, begin_ns)
        now = start
        before = int(np.searchsorted(ends, start, "right")) - 1
        previous = int(ends[before]) if before >= 0 else begin_ns
        awaited_row = awaited.get(row, -1)
        waited = int(events.end_ns[awaited_row]) if awaited_row >= 0 else start + 1
        if not start - LATENCY_NS <= waited <= start:
            awaited_row = -1
        else:
            previous = waited
        call = call_of.get(int(events.correlation[row]), -1)
        launch = int(calls.start_ns[call]) if call >= 0 else -1
        if launch >= previous:
            awaited_row = -1
            parts["launch", PathKind.HOST] += start - max(launch, begin_ns)
            now = _host_before(timeline, call, launch, max(previous, begin_ns), parts)
        elif call >= 0 and int(calls.end_ns[call]) > previous:  # it was being launched
            parts["launch", PathKind.HOST] += max(0, start - max(previous, begin_ns))
            now = previous
        elif start - previous <= LATENCY_NS:
            parts["between operations", PathKind.WAIT] += max(0, start - max(previous, begin_ns))
            now = previous
        else:
            parts["the device was not free", PathKind.WAIT] += start - max(previous, begin_ns)
            now = previous
    whole = max(1, end_ns - begin_ns)
    ranked = sorted(parts.items(), key=lambda item: -item[1])
    return [PathPart(name, kind, ns, ns / whole) for (name, kind), ns in ranked if ns > 0][:_PARTS]


def _awaited(timeline: Timeline, stalls: Stalls) -> dict[int, int]:
    """By row of `stalls.events`: the row that it waited for by an event."""
    if not len(timeline.stream_waits):
        return {}
    found = awaited_by(timeline)
    mine = np.flatnonzero(timeline.device_of_track[timeline.device.track] == stalls.device)
    back = np.full(len(found) + 1, -1, np.int64)
    back[mine] = np.arange(len(mine))
    rows = np.flatnonzero(found[mine] >= 0)
    return dict(zip(rows.tolist(), back[found[mine[rows]]].tolist(), strict=True))


def _call_rows(timeline: Timeline, begin_ns: int, end_ns: int) -> dict[int, int]:
    """By correlation id: the row of each call in the time range, or at most `_AHEAD_NS` before."""
    calls = timeline.calls
    first = int(np.searchsorted(calls.start_ns, begin_ns - _AHEAD_NS, "left"))
    last = int(np.searchsorted(calls.start_ns, end_ns, "right"))
    ids = calls.correlation[first:last]
    rows = np.flatnonzero(ids)
    return dict(zip(ids[rows].tolist(), (rows + first).tolist(), strict=True))


def _host_before(
    timeline: Timeline, call: int, launch: int, since: int, parts: dict[tuple[str, PathKind], int]
) -> int:
    """Adds the thread's time before a launch, back to its last wait or to `since`; returns `since`.

    `call`: the row of the launch; `launch`: when it began.
    """
    calls = timeline.calls
    track = calls.track[call]
    first = int(np.searchsorted(calls.start_ns, since - _AHEAD_NS, "left"))
    last = int(np.searchsorted(calls.start_ns, launch, "left"))
    rows = first + np.flatnonzero(
        (calls.track[first:last] == track) & is_one_of(calls.kind[first:last], *_WAITS)
    )
    end = int(calls.end_ns[rows[-1]]) if len(rows) else since
    free = max(min(end, launch), since)
    _of_thread(timeline, int(track), free, launch, parts)
    if free > since:
        parts[timeline.names[int(calls.name[rows[-1]])], PathKind.WAIT] += free - since
    return since


def _of_thread(
    timeline: Timeline,
    track: int,
    since: int,
    until: int,
    parts: dict[tuple[str, PathKind], int],
    depth: int = 0,
) -> None:
    """Adds what a thread did in [since, until); while it was blocked, what its waker did.

    The parts sum to the length of the range. A wait counts for this thread if the waker is unknown
    or is the thread itself (a timer).
    """
    states, thread = timeline.states, timeline.tracks[track].label
    first = int(np.searchsorted(states.start_ns, since - _AHEAD_NS, "left"))
    last = int(np.searchsorted(states.start_ns, until, "left"))
    here = slice(first, last)
    rows = first + np.flatnonzero((states.track[here] == track) & (states.end_ns[here] > since))
    now = since
    for row in rows.tolist():
        begin = max(int(states.start_ns[row]), now)
        end = min(int(states.end_ns[row]), until)
        if end <= begin:
            continue
        parts[f"code of {thread}", PathKind.HOST] += begin - now
        now = end
        waker = int(states.waker[row]) - 1
        if states.kind[row] == StateKind.RUNQUEUE:
            parts[f"{thread} waited for a CPU", PathKind.WAIT] += end - begin
        elif waker >= 0 and waker != track and depth < _WAKERS:
            _of_thread(timeline, waker, begin, end, parts, depth + 1)
        else:
            reason = timeline.names[int(states.name[row])]
            parts[f"{thread} blocked: {reason}", PathKind.WAIT] += end - begin
    parts[f"code of {thread}", PathKind.HOST] += max(0, until - now)
