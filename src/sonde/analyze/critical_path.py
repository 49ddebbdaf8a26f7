# SPDX-License-Identifier: Apache-2.0
"""The critical path of a step: the chain of work that its length comes from.

Walked back from the step's last operation. What an operation started right behind on the device
(its own stream, or one that it waited for) is its predecessor; an operation that the device was
free for waited for its launch, and the launch for what its thread did before, back to the end of
the thread's last wait for the device, whose own predecessor is the operation that it waited for.
While that thread was blocked, the path goes through the thread that woke it.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from sonde.analyze.blame import LATENCY_NS
from sonde.analyze.idle import Stalls
from sonde.model.timeline import CallKind, DeviceKind, StateKind, Timeline, is_one_of
from sonde.model.verdict import PathPart, StepTable

_LIMIT = 20_000
"""Hops; a step with more operations than that is told from its end."""
_AHEAD_NS = 2_000_000_000
"""How long before its kernel a launch is looked for."""
_WAKERS = 8
"""Threads in a chain of which each waited for the next."""
_WAITS = (CallKind.SYNC, CallKind.COPY, CallKind.FREE)


def critical_path(timeline: Timeline, stalls: Stalls, steps: StepTable | None) -> list[PathPart]:
    """The parts of the path of the step nearest to the median, largest first."""
    if steps is None or not steps.count:
        return []
    near = int(np.argmin(np.abs(np.array(steps.duration_ns) - steps.median_ns)))
    begin = steps.start_ns[near]
    return walk(timeline, stalls, begin, begin + steps.duration_ns[near])


def walk(timeline: Timeline, stalls: Stalls, begin_ns: int, end_ns: int) -> list[PathPart]:
    """The path from `end_ns` back to `begin_ns`; its parts sum to the time between."""
    events, calls = stalls.events, timeline.calls
    by_end = np.argsort(events.end_ns, kind="stable")
    ends = events.end_ns[by_end]
    call_of = _call_rows(timeline, begin_ns, end_ns)
    parts: dict[tuple[str, str], int] = defaultdict(int)
    now = end_ns
    for _ in range(_LIMIT):
        if now <= begin_ns:
            break
        at = int(np.searchsorted(ends, now, "right")) - 1
        if at < 0:
            break
        row = int(by_end[at])
        ended = int(events.end_ns[row])
        if ended < now:  # nothing ended just then: the host was on the path to what began there
            following = int(np.searchsorted(events.start_ns, now, "left"))
            begins = following < len(events) and int(events.start_ns[following]) == now
            call = call_of.get(int(events.correlation[following]), -1) if begins else -1
            launch = int(calls.start_ns[call]) if call >= 0 else ended
            since = max(ended, begin_ns)
            if launch > since:
                parts["launch", "host"] += now - launch
                now = _host_before(timeline, call, launch, since, parts)
            else:
                parts["launch and host code", "host"] += now - since
                now = ended
            continue
        start = int(events.start_ns[row])
        kind = "kernel" if events.kind[row] <= DeviceKind.COLLECTIVE else "copy"
        name = timeline.names[int(events.name[row])]
        parts[name, kind] += now - max(start, begin_ns)
        now = start
        before = int(np.searchsorted(ends, start, "right")) - 1
        previous = int(ends[before]) if before >= 0 else begin_ns
        call = call_of.get(int(events.correlation[row]), -1)
        launch = int(calls.start_ns[call]) if call >= 0 else -1
        if launch >= previous:
            parts["launch", "host"] += start - max(launch, begin_ns)
            now = _host_before(timeline, call, launch, max(previous, begin_ns), parts)
        elif call >= 0 and int(calls.end_ns[call]) > previous:  # it was being launched
            parts["launch", "host"] += max(0, start - max(previous, begin_ns))
            now = previous
        elif start - previous <= LATENCY_NS:
            parts["between operations", "wait"] += max(0, start - max(previous, begin_ns))
            now = previous
        else:
            parts["the device was not free", "wait"] += start - max(previous, begin_ns)
            now = previous
    whole = max(1, end_ns - begin_ns)
    ranked = sorted(parts.items(), key=lambda item: -item[1])
    return [PathPart(name, kind, ns, ns / whole) for (name, kind), ns in ranked if ns > 0][:12]


def _call_rows(timeline: Timeline, begin_ns: int, end_ns: int) -> dict[int, int]:
    """The row of each call of the stretch (and of those shortly before it) by correlation id."""
    calls = timeline.calls
    first = int(np.searchsorted(calls.start_ns, begin_ns - _AHEAD_NS, "left"))
    last = int(np.searchsorted(calls.start_ns, end_ns, "right"))
    ids = calls.correlation[first:last]
    rows = np.flatnonzero(ids)
    return dict(zip(ids[rows].tolist(), (rows + first).tolist(), strict=True))


def _host_before(
    timeline: Timeline, call: int, launch: int, since: int, parts: dict[tuple[str, str], int]
) -> int:
    """Lay the thread's time before a launch on the path, back to its last wait or to `since`."""
    calls = timeline.calls
    lane = calls.lane[call]
    first = int(np.searchsorted(calls.start_ns, since - _AHEAD_NS, "left"))
    last = int(np.searchsorted(calls.start_ns, launch, "left"))
    rows = first + np.flatnonzero(
        (calls.lane[first:last] == lane) & is_one_of(calls.kind[first:last], *_WAITS)
    )
    end = int(calls.end_ns[rows[-1]]) if len(rows) else since
    free = max(min(end, launch), since)
    _of_thread(timeline, int(lane), free, launch, parts)
    if free > since:
        parts[timeline.names[int(calls.name[rows[-1]])], "wait"] += free - since
    return since


def _of_thread(
    timeline: Timeline,
    lane: int,
    since: int,
    until: int,
    parts: dict[tuple[str, str], int],
    depth: int = 0,
) -> None:
    """Lay what a thread did in a stretch on the path; while it was blocked, what its waker did.

    Parts sum to the stretch. A wait whose waker is not known, or is this thread's own doing (a
    timer), is the thread's.
    """
    states, thread = timeline.states, timeline.lanes[lane].label
    first = int(np.searchsorted(states.start_ns, since - _AHEAD_NS, "left"))
    last = int(np.searchsorted(states.start_ns, until, "left"))
    here = slice(first, last)
    rows = first + np.flatnonzero((states.lane[here] == lane) & (states.end_ns[here] > since))
    now = since
    for row in rows.tolist():
        begin = max(int(states.start_ns[row]), now)
        end = min(int(states.end_ns[row]), until)
        if end <= begin:
            continue
        parts[f"code of {thread}", "host"] += begin - now
        now = end
        waker = int(states.correlation[row]) - 1
        if states.kind[row] == StateKind.RUNQUEUE:
            parts[f"{thread} waited for a CPU", "wait"] += end - begin
        elif waker >= 0 and waker != lane and depth < _WAKERS:
            _of_thread(timeline, waker, begin, end, parts, depth + 1)
        else:
            reason = timeline.names[int(states.name[row])]
            parts[f"{thread} blocked: {reason}", "wait"] += end - begin
    parts[f"code of {thread}", "host"] += max(0, until - now)
