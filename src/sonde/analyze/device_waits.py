# SPDX-License-Identifier: Apache-2.0
"""Where a thread waited for a device: in calls that do, and where it had launched too far ahead."""

from __future__ import annotations

import re

import numpy as np

from sonde.analyze import intervals as sets
from sonde.analyze.causes import WAITS
from sonde.analyze.delays import STAGED_NS, DeviceWaits
from sonde.analyze.idle import Stalls, State
from sonde.analyze.intervals import Coverage, Intervals
from sonde.model.name_parts import matching
from sonde.model.timeline import I64, CallKind, Events, Mask, Memory, Timeline, is_one_of

RESULT_BYTES = 4096
"""A copy to the host up to this size is a result that a program looks at: a loss, a flag."""
ENQUEUES = (CallKind.LAUNCH, CallKind.GRAPH_LAUNCH, CallKind.COPY, CallKind.SET)
WAITED_NS = 2_000
"""A call that saw the device busy for less did not wait for it."""
FULL_QUEUE = 500
"""Launches that the device has yet to begin; a queue of CUDA's holds about twice as many (1,020 on
an H200), and who finds it full waits for the device in the call that launches."""
BLOCKED_NS = 10_000
"""A launch call that takes longer, with so many ahead of it, was held up by them."""
_NO_WAIT = re.compile(r"Async|^clEnqueue|^urEnqueue")
"""Calls that only ask for a copy, or to free memory, by their names."""


def device_waits(timeline: Timeline, stalls: Stalls, lane: int) -> DeviceWaits:
    """Of one thread, within the traced windows."""
    idle = stalls.state == State.IDLE
    busy = sets.subtract(stalls.window, sets.union(stalls.start[idle], stalls.end[idle]))
    calls, host = timeline.calls, timeline.host
    kinds = (CallKind.SYNC, CallKind.COPY, CallKind.FREE)
    rows = np.flatnonzero((calls.lane == lane) & is_one_of(calls.kind, *kinds))
    waits, moves = _waits(timeline, stalls.events, rows)
    named = np.flatnonzero(host.lane == lane)
    named = named[matching(timeline.names, host.name[named], WAITS)]
    begin = np.concatenate([calls.start_ns[rows[waits]], host.start_ns[named]])
    end = np.concatenate([calls.end_ns[rows[waits]], host.end_ns[named]])
    order = np.argsort(begin, kind="stable")
    waited = sets.intersect(sets.union(begin[order], end[order]), stalls.window)
    long = Coverage(busy).within(waited.start, waited.end) >= WAITED_NS
    waited = Intervals(waited.start[long], waited.end[long])
    full = _full_queue(timeline, stalls, lane)
    # One behind another with nothing launched between is the same wait, going on.
    asks = (calls.lane == lane) & is_one_of(calls.kind, *ENQUEUES)
    asks[rows[waits]] = False
    asked = calls.start_ns[asks]
    since = np.searchsorted(asked, np.append(0, waited.end[:-1])) if len(waited) else 0
    anew = np.searchsorted(asked, waited.start) > since
    copying = sets.union(calls.start_ns[rows[moves]], calls.end_ns[rows[moves]])
    return DeviceWaits(
        waits=waited,
        settled=np.concatenate([waited.start[anew], full.start]),
        copying=sets.intersect(copying, stalls.window),
        full=full,
        busy=busy,
        computing=stalls.computing,
    )


def _waits(timeline: Timeline, events: Events, rows: I64) -> tuple[Mask, Mask]:
    """Which of these calls wait for the device, as far as can be told; which of those for a copy
    that is no mere result.

    One that is asynchronous by its name does where memory that is not pinned is copied and the copy
    was done before the call returned, or was going on and the call took long: it is passed through
    staging buffers. Where what it asked for is not known, where it took long.
    """
    calls = timeline.calls
    waits = ~matching(timeline.names, calls.name[rows], _NO_WAIT)
    moves = np.zeros(len(rows), bool)
    at = np.flatnonzero((calls.kind[rows] == CallKind.COPY) & (calls.duration_ns[rows] > WAITED_NS))
    if not len(at):
        return waits, moves
    long = calls.duration_ns[rows[at]] >= STAGED_NS
    asks = ~waits[at]
    waits[at[asks]] = long[asks]
    op = asked_for(events.correlation, calls.correlation[rows[at]])
    long, at, asks, op = long[op >= 0], at[op >= 0], asks[op >= 0], op[op >= 0]
    returned = calls.end_ns[rows[at]] + timeline.clock_error_ns
    begun, done = events.start_ns[op] <= returned, events.end_ns[op] <= returned
    staged = (done | (begun & long)) & (events.detail[op] != Memory.PINNED)
    waits[at[asks]] = staged[asks]
    moves[at] = waits[at] & (events.bytes[op] > RESULT_BYTES)
    return waits, moves


def asked_for(numbers: I64, wanted: I64) -> I64:
    """The first row with each of these numbers, which join calls and operations; -1 for none."""
    found = np.full(len(wanted), -1, np.int64)
    highest = int(numbers.max(initial=0))
    if not len(wanted) or not highest:
        return found
    if highest <= 8 * len(numbers) + 1_000_000 and numbers.min() >= 0:  # they count up, mostly
        table = np.full(highest + 1, -1, np.int32)
        table[numbers[::-1]] = np.arange(len(numbers) - 1, -1, -1, dtype=np.int32)
        table[0] = -1
        for part in sets.in_parts(len(wanted)):
            some = wanted[part]
            found[part] = table[np.where((some > 0) & (some <= highest), some, 0)]
        return found
    order = np.argsort(numbers, kind="stable")
    at = np.minimum(np.searchsorted(numbers, wanted, sorter=order), len(numbers) - 1)
    known = (wanted > 0) & (numbers[order[at]] == wanted)
    found[known] = order[at[known]]
    return found


def _full_queue(timeline: Timeline, stalls: Stalls, lane: int) -> Intervals:
    """The launches of a thread that had to wait for room in the device's queue."""
    calls, events = timeline.calls, stalls.events
    slow = (calls.lane == lane) & (calls.duration_ns >= BLOCKED_NS)
    rows = np.flatnonzero(slow & is_one_of(calls.kind, *ENQUEUES))
    op = asked_for(events.correlation, calls.correlation[rows])
    rows, op = rows[op >= 0], op[op >= 0]
    if not len(rows):
        return sets.none()
    # What begins between the call's end and its own operation was ahead of it; a graph counts once.
    another = np.cumsum(np.diff(events.correlation, prepend=-1) != 0, dtype=np.int32)
    now = np.maximum(np.searchsorted(events.start_ns, calls.end_ns[rows]) - 1, 0)
    rows = rows[another[op] - another[now] >= FULL_QUEUE]
    return sets.intersect(sets.union(calls.start_ns[rows], calls.end_ns[rows]), stalls.window)
