# SPDX-License-Identifier: Apache-2.0
"""When a thread waited for a device: in calls that wait, and in launches into a full queue."""

from __future__ import annotations

import re

import numpy as np

from sonde.analyze import intervals as sets
from sonde.analyze.causes import WAITS
from sonde.analyze.deferred_waits import STAGED_NS, DeviceWaits
from sonde.analyze.intervals import Coverage, Intervals
from sonde.analyze.launch_path import ENQUEUES
from sonde.analyze.stalls import DeviceState, Stalls
from sonde.model.name_parts import matching
from sonde.model.timeline import I64, CallKind, Events, Mask, Memory, Timeline, is_one_of, rows_on

RESULT_BYTES = 4096
"""A copy to the host up to this size reads a result: a loss, a flag."""
WAITED_NS = 2_000
"""A call in which the device was busy for less did not wait for it."""
FULL_QUEUE = 500
"""Launches ahead of the device from which on a slow launch waits for it. A CUDA queue holds about
twice as many (1,020 on an H200); a launch into a full queue waits in the call."""
BLOCKED_NS = 10_000
"""A launch call with `FULL_QUEUE` launches ahead that takes longer than this waited for them."""
_NO_WAIT = re.compile(r"Async|^clEnqueue|^urEnqueue")
"""Names of asynchronous calls that copy or free memory."""


def device_waits(timeline: Timeline, stalls: Stalls, track: int) -> DeviceWaits:
    """The waits of one thread for the device, within the traced windows."""
    idle = stalls.state == DeviceState.IDLE
    busy = sets.subtract(stalls.window, sets.union(stalls.start[idle], stalls.end[idle]))
    calls, host = timeline.calls, timeline.host
    kinds = (CallKind.SYNC, CallKind.COPY, CallKind.FREE)
    rows = rows_on(calls, track, *kinds)
    waits, moves = _waits(timeline, stalls.events, rows)
    named = np.flatnonzero(host.track == track)
    named = named[matching(timeline.names, host.name[named], WAITS)]
    begin = np.concatenate([calls.start_ns[rows[waits]], host.start_ns[named]])
    end = np.concatenate([calls.end_ns[rows[waits]], host.end_ns[named]])
    order = np.argsort(begin, kind="stable")
    waited = sets.intersect(sets.union(begin[order], end[order]), stalls.window)
    long = Coverage(busy).within(waited.start, waited.end) >= WAITED_NS
    waited = Intervals(waited.start[long], waited.end[long])
    full = _full_queue(timeline, stalls, track)
    # Waits with no launch between them are one wait.
    asks = (calls.track == track) & is_one_of(calls.kind, *ENQUEUES)
    asks[rows[waits]] = False
    asked = calls.start_ns[asks]
    since = np.searchsorted(asked, np.append(0, waited.end[:-1])) if len(waited) else 0
    new_wait = np.searchsorted(asked, waited.start) > since
    copying = sets.union(calls.start_ns[rows[moves]], calls.end_ns[rows[moves]])
    return DeviceWaits(
        waits=waited,
        cleared=np.concatenate([waited.start[new_wait], full.start]),
        copying=sets.intersect(copying, stalls.window),
        full=full,
        busy=busy,
        computing=stalls.computing,
    )


def waited_for_kernels(timeline: Timeline, stalls: Stalls) -> int:
    """How long the thread that launched most on the device waited for it while it computed, in
    ns."""
    calls = timeline.calls
    rows = np.flatnonzero(is_one_of(calls.kind, *ENQUEUES))
    mine = rows_with(stalls.events.correlation, calls.correlation[rows]) >= 0
    launched = np.bincount(calls.track[rows[mine]])
    if not len(launched):
        return 0
    device = device_waits(timeline, stalls, int(launched.argmax()))
    return sets.intersect(device.waits, stalls.computing).total


def _waits(timeline: Timeline, events: Events, rows: I64) -> tuple[Mask, Mask]:
    """(which of these calls wait for the device; which of those copy more than a result).

    A call that is asynchronous by its name waits if it copies memory that is not pinned, and the
    copy was done before the call returned, or was running and the call took long: such copies go
    through staging buffers. If its copy is unknown, it waits if it took long.
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
    op = rows_with(events.correlation, calls.correlation[rows[at]])
    long, at, asks, op = long[op >= 0], at[op >= 0], asks[op >= 0], op[op >= 0]
    returned = calls.end_ns[rows[at]] + timeline.clock_error_ns
    begun, done = events.start_ns[op] <= returned, events.end_ns[op] <= returned
    staged = (done | (begun & long)) & (events.memory[op] != Memory.PINNED)
    waits[at[asks]] = staged[asks]
    moves[at] = waits[at] & (events.bytes[op] > RESULT_BYTES)
    return waits, moves


def rows_with(correlation: I64, wanted: I64) -> I64:
    """The first row with each wanted correlation id; -1 for none."""
    found = np.full(len(wanted), -1, np.int64)
    highest = int(correlation.max(initial=0))
    if not len(wanted) or not highest:
        return found
    # Ids mostly count up: then a table by id is small, and faster than a search.
    if highest <= 8 * len(correlation) + 1_000_000 and correlation.min() >= 0:
        table = np.full(highest + 1, -1, np.int32)
        table[correlation[::-1]] = np.arange(len(correlation) - 1, -1, -1, dtype=np.int32)
        table[0] = -1
        for part in sets.in_parts(len(wanted)):
            some = wanted[part]
            found[part] = table[np.where((some > 0) & (some <= highest), some, 0)]
        return found
    order = np.argsort(correlation, kind="stable")
    at = np.minimum(np.searchsorted(correlation, wanted, sorter=order), len(correlation) - 1)
    known = (wanted > 0) & (correlation[order[at]] == wanted)
    found[known] = order[at[known]]
    return found


def _full_queue(timeline: Timeline, stalls: Stalls, track: int) -> Intervals:
    """The launches of a thread that waited for room in the device's queue."""
    calls, events = timeline.calls, stalls.events
    slow = (calls.track == track) & (calls.duration_ns >= BLOCKED_NS)
    rows = np.flatnonzero(slow & is_one_of(calls.kind, *ENQUEUES))
    op = rows_with(events.correlation, calls.correlation[rows])
    rows, op = rows[op >= 0], op[op >= 0]
    if not len(rows):
        return sets.none()
    # Operations that begin between the call's end and its own operation were ahead; a graph is one.
    another = np.cumsum(np.diff(events.correlation, prepend=-1) != 0, dtype=np.int32)
    now = np.maximum(np.searchsorted(events.start_ns, calls.end_ns[rows]) - 1, 0)
    rows = rows[another[op] - another[now] >= FULL_QUEUE]
    return sets.intersect(sets.union(calls.start_ns[rows], calls.end_ns[rows]), stalls.window)
