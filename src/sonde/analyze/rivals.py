# SPDX-License-Identifier: Apache-2.0
"""What a rival's turns cost, less what the device would have waited for anyway.

While a rival has the device, the host goes on launching; what is launched meanwhile runs without
gaps afterwards. In a program that its host holds up, part of such a turn only hides those gaps.
So the work between two waits for the device is laid out anew without the turns: each operation
begins when it has been launched and the one before has ended, for as long as it usually takes. What
that does not shorten is launch overhead, and not the rival's. Where the host never waits, its pace
may be the device's (a full queue), and nothing is told apart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from sonde.analyze.causes import NUMBER
from sonde.analyze.intervals import Coverage, Intervals
from sonde.model.timeline import F64, I64, CallKind, Timeline

if TYPE_CHECKING:
    from sonde.analyze.blame import Blame

_LEAST = 0.02
"""A smaller part of a turn is not worth telling apart."""


def without_gaps_hidden(timeline: Timeline, blamed: Blame) -> Blame:
    """The blame with each rival's turn cut into its cost, and the launch overhead that it hid."""
    stalls = blamed.stalls
    turns = np.flatnonzero(blamed.cause == NUMBER["rival"])
    hidden = _hidden(timeline, blamed, turns)
    part = (hidden * stalls.duration_ns[turns]).astype(np.int64)
    least = _LEAST * stalls.duration_ns[turns]
    whole = stalls.duration_ns[turns] - part < least
    cause = blamed.cause.copy()
    cause[turns[whole]] = NUMBER["launch"]
    cut = (part > least) & ~whole
    rows, part = turns[cut], part[cut]
    border = stalls.end[rows] - part
    at = rows + 1
    end = stalls.end.copy()
    end[rows] = border
    start = np.insert(stalls.start, at, border)
    split = replace(
        stalls,
        start=start,
        end=np.insert(end, at, stalls.end[rows]),
        state=np.insert(stalls.state, at, stalls.state[rows]),
    )
    return replace(
        blamed,
        stalls=split,
        cause=np.insert(cause, at, NUMBER["launch"]),
        lane=np.insert(blamed.lane, at, blamed.lane[rows]),
        launch_ns=np.insert(blamed.launch_ns, at, blamed.launch_ns[rows]),
        op=np.insert(blamed.op, at, blamed.op[rows]),
        delayed_ns=np.insert(blamed.delayed_ns, at, -1),
    )


def _hidden(timeline: Timeline, blamed: Blame, turns: I64) -> F64:
    """For each turn, the share of it that the device would have waited for anyway."""
    stalls, calls = blamed.stalls, timeline.calls
    events = stalls.events
    share = np.zeros(len(turns))
    launched = _launched(timeline, blamed)
    known = np.flatnonzero(launched >= 0)
    if not len(known):
        return share
    lane = np.bincount(blamed.lane[turns][blamed.lane[turns] >= 0], minlength=1).argmax()
    waits = calls.end_ns[(calls.lane == lane) & (calls.kind == CallKind.SYNC)]
    if not len(waits):
        return share
    edges = np.unique(waits)
    taken = Coverage(Intervals(stalls.start[turns], stalls.end[turns]))
    reach = np.maximum.accumulate(events.end_ns)
    before = np.concatenate([[0], reach[:-1]])
    start, end = np.maximum(events.start_ns, before), np.maximum(events.end_ns, before)
    busy = end - start - taken.within(start, end)
    segment = np.searchsorted(edges, launched[known], "right") - 1
    first = np.flatnonzero(np.diff(segment, prepend=-1))
    last = np.append(first[1:], len(known))
    of_turn = np.searchsorted(edges, stalls.start[turns], "right") - 1
    for low, high in zip(first.tolist(), last.tolist(), strict=True):
        rows = known[low:high]
        if segment[low] < 0:
            continue
        # Turns come in the order of time.
        mine = slice(*np.searchsorted(of_turn, [segment[low], segment[low] + 1]).tolist())
        whole = int((stalls.end[turns[mine]] - stalls.start[turns[mine]]).sum())
        if not whole:
            continue
        done = np.cumsum(busy[rows])
        ends = done + np.maximum.accumulate(launched[rows] - done + busy[rows])
        saved = int(reach[rows[-1]]) - int(ends[-1])
        share[mine] = 1 - np.clip(saved / whole, 0, 1)
    return share


def _launched(timeline: Timeline, blamed: Blame) -> I64:
    """When the launch of each operation ended, -1 unknown."""
    calls, events = timeline.calls, blamed.stalls.events
    rows = np.flatnonzero(calls.correlation)
    order = rows[np.argsort(calls.correlation[rows], kind="stable")]
    if not len(order):
        return np.full(len(events), -1, np.int64)
    ids = calls.correlation[order]
    at = np.minimum(np.searchsorted(ids, events.correlation), len(ids) - 1)
    found = (ids[at] == events.correlation) & (events.correlation != 0)
    return np.where(found, calls.end_ns[order[at]] + timeline.clock_error_ns, -1)
