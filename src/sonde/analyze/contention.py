# SPDX-License-Identifier: Apache-2.0
"""The cost of GPU contention: time slices of other processes, less the stalls that they hide.

While another process has the device, the host continues to launch, and what it launched runs
without gaps afterwards. In a host-bound program a part of such a time slice only hides these gaps.
So the work between two waits for the device is laid out again without the time slices: each
operation begins when it was launched and the one before has ended, and lasts as long as it usually
does. What this does not shorten is launch overhead. If the host never waits, its pace may be the
device's (a full queue), and the time slices keep all of their cost.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sonde.analyze.blamed_stalls import BlamedStalls
from sonde.analyze.causes import CODE
from sonde.analyze.intervals import Coverage, Intervals
from sonde.analyze.offenders import others_on_device, processes_on
from sonde.analyze.ranking import LEAST_SHARE
from sonde.analyze.stalls import Stalls
from sonde.model.causes import Cause
from sonde.model.timeline import F64, I64, CallKind, Timeline

_LEAST = 0.02
"""Smaller parts of a time slice are not split off."""


def without_hidden_gaps(timeline: Timeline, blamed: BlamedStalls) -> BlamedStalls:
    """Splits each time slice of another process into its cost and the launch overhead it hides."""
    stalls = blamed.stalls
    kinds = (CODE[Cause.GPU_CONTENTION], CODE[Cause.NOT_TAKEN])
    slices = np.flatnonzero(np.isin(blamed.cause, kinds))
    hidden = _hidden(timeline, blamed, slices)
    part = (hidden * stalls.duration_ns[slices]).astype(np.int64)
    least = _LEAST * stalls.duration_ns[slices]
    whole = stalls.duration_ns[slices] - part < least
    cause = blamed.cause.copy()
    cause[slices[whole]] = CODE[Cause.LAUNCH]
    cut = (part > least) & ~whole
    rows, part = slices[cut], part[cut]
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
        cause=np.insert(cause, at, CODE[Cause.LAUNCH]),
        track=np.insert(blamed.track, at, blamed.track[rows]),
        launch_ns=np.insert(blamed.launch_ns, at, blamed.launch_ns[rows]),
        op=np.insert(blamed.op, at, blamed.op[rows]),
        earlier_wait_ns=np.insert(blamed.earlier_wait_ns, at, -1),
    )


def taken_from_kernels(timeline: Timeline, stalls: Stalls) -> tuple[float, list[str]]:
    """(share of the traced time that other processes took out of the kernels, who they are).

    A kernel that is interrupted seems to run all the time. If all of a kind are, none stands out by
    its length. But kernels and the use by others, which the driver reports, cannot be more than all
    of the time: what is beyond belongs to the others. It is a lower limit: 0 below `LEAST_SHARE`.
    """
    if not timeline.busy_of or not len(stalls.window):
        return 0.0, []
    span = (int(stalls.window.start[0]), int(stalls.window.end[-1]))
    device = stalls.device
    uses = others_on_device(timeline, [device], processes_on(timeline, device), span)
    computing = stalls.computing.total / max(1, stalls.window_ns)
    beyond = min(computing, computing + sum(one.share for one in uses) - 1)
    return (beyond, [one.text for one in uses[:2]]) if beyond >= LEAST_SHARE else (0.0, [])


def _hidden(timeline: Timeline, blamed: BlamedStalls, slices: I64) -> F64:
    """For each time slice, the share in which the device would have waited anyway."""
    stalls, calls = blamed.stalls, timeline.calls
    events = stalls.events
    share = np.zeros(len(slices))
    launched = _launched(timeline, blamed)
    known = np.flatnonzero(launched >= 0)
    if not len(known):
        return share
    track = np.bincount(blamed.track[slices][blamed.track[slices] >= 0], minlength=1).argmax()
    waits = calls.end_ns[(calls.track == track) & (calls.kind == CallKind.SYNC)]
    if not len(waits):
        return share
    edges = np.unique(waits)
    taken = Coverage(Intervals(stalls.start[slices], stalls.end[slices]))
    reach = np.maximum.accumulate(events.end_ns)
    before = np.concatenate([[0], reach[:-1]])
    start, end = np.maximum(events.start_ns, before), np.maximum(events.end_ns, before)
    busy = end - start - taken.within(start, end)
    segment = np.searchsorted(edges, launched[known], "right") - 1
    first = np.flatnonzero(np.diff(segment, prepend=-1))
    last = np.append(first[1:], len(known))
    slice_segment = np.searchsorted(edges, stalls.start[slices], "right") - 1
    for low, high in zip(first.tolist(), last.tolist(), strict=True):
        rows = known[low:high]
        if segment[low] < 0:
            continue
        # Time slices are sorted by start.
        mine = slice(*np.searchsorted(slice_segment, [segment[low], segment[low] + 1]).tolist())
        whole = int((stalls.end[slices[mine]] - stalls.start[slices[mine]]).sum())
        if not whole:
            continue
        done = np.cumsum(busy[rows])
        ends = done + np.maximum.accumulate(launched[rows] - done + busy[rows])
        saved = int(reach[rows[-1]]) - int(ends[-1])
        share[mine] = 1 - np.clip(saved / whole, 0, 1)
    return share


def _launched(timeline: Timeline, blamed: BlamedStalls) -> I64:
    """When the launch call of each operation ended, -1 unknown."""
    calls, events = timeline.calls, blamed.stalls.events
    rows = np.flatnonzero(calls.correlation)
    order = rows[np.argsort(calls.correlation[rows], kind="stable")]
    if not len(order):
        return np.full(len(events), -1, np.int64)
    ids = calls.correlation[order]
    at = np.minimum(np.searchsorted(ids, events.correlation), len(ids) - 1)
    found = (ids[at] == events.correlation) & (events.correlation != 0)
    return np.where(found, calls.end_ns[order[at]] + timeline.clock_error_ns, -1)
