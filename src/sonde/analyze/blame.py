# SPDX-License-Identifier: Apache-2.0
"""Attributes each stall of a device to one cause, so that blame sums to the stalls exactly.

A stall [a, b) ends with an operation whose launch call ran [ls, le) on thread T:

- If only copies or collectives ran in it, they are the cause.
- If le <= a, the work had been launched and the device did not start it. A short stall is latency
  between kernels. In a long one the operation waited for an event of another device's stream, or
  another process had the device: that is reported only if the driver shows that another one used
  it meanwhile. Else it is not known.
- Otherwise T launched late. The causes of `sonde.analyze.causes` claim the time of T up to the end
  of the launch or the start of the operation. Of the rest, the launch [ls, b) and T's time in a
  framework's dispatch (`sonde.analyze.launch_path`) are launch overhead; other time is code of T.
  The cause with the largest part gets the stall.
- A wait of T while the device still had work causes stalls later, up to the length of the wait
  (`sonde.analyze.deferred_waits`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from sonde.analyze import deferred_waits
from sonde.analyze import intervals as sets
from sonde.analyze.blamed_stalls import BlamedStalls
from sonde.analyze.causes import CLAIMS, CODE
from sonde.analyze.contention import without_hidden_gaps
from sonde.analyze.device_waits import RESULT_BYTES, device_waits, rows_with
from sonde.analyze.intervals import Coverage, Intervals
from sonde.analyze.launch_path import ENQUEUES, launch_path
from sonde.analyze.offenders import LEAST_USE, processes_on, reports_on_others, waits_for_device
from sonde.analyze.on_cpu import on_cpu
from sonde.analyze.stalls import DeviceState, Stalls, devices_of, stalls_of
from sonde.analyze.stream_dependencies import awaited_by
from sonde.model.causes import Cause
from sonde.model.name_parts import matching
from sonde.model.timeline import (
    F64,
    I32,
    I64,
    U8,
    CopyDirection,
    DeviceKind,
    Mask,
    Timeline,
    is_one_of,
)

SHORT_NS = 20_000
"""A shorter stall before an operation that was already launched is the device's own latency."""
LATENCY_NS = 30_000
"""Longest time from the end of a launch call to the kernel's start on a device that is free."""
PRIOR_NS = 100_000_000
"""Weight of the overall share of page faults (the prior) in the share of one interval: about ten
samples at 99 Hz."""
REPORTED_NS = 1_500_000_000
"""A report of the driver on how processes used a device covers the time since the one before it, at
most this long: reports come once a second."""
_DEFERRABLE = (Cause.LAUNCH, Cause.HOST, Cause.SYNCHRONIZATION, Cause.COPY)
"""Stalls of these causes may be caused by an earlier wait."""
_OF_COPIES = (Cause.LAUNCH, Cause.SYNCHRONIZATION, Cause.COPY)
"""Stalls of these causes that end with a copy to the device are the copy's."""
_WAITING = re.compile(r"^(cu|cuda|hip)\w*(Synchronize|Query)$")
"""Functions that wait for the device. Samples in them do not show why the thread launched late."""
MAX_THREADS, LEAST_THREADS = 256, 2
"""Threads analysed for all devices together, and at least for each; programs have about ten."""
CODE_IS_LONGER = 0.95
"""Waits that would take less than this part of the code's stalls are shorter than the code. Above
it the difference may be rounding, as each stall has one cause."""
SHARED = 0.02
"""If other processes had the device for this share of the time, they also interrupted kernels."""


def blame_device(
    timeline: Timeline, device: int, start_ns: int | None = None, end_ns: int | None = None
) -> BlamedStalls:
    """The stalls of a device and their causes, between two times if given."""
    found = blame_stalls(timeline, stalls_of(timeline, device, start_ns, end_ns))
    if found.total_ns(Cause.GPU_CONTENTION) < SHARED * found.stalls.window_ns:
        return found
    shared = blame_stalls(timeline, stalls_of(timeline, device, start_ns, end_ns, shared=True))
    return without_hidden_gaps(timeline, shared)


def blame_stalls(timeline: Timeline, stalls: Stalls) -> BlamedStalls:
    """Finds the cause of each stall.

    Columns of stalls: `op` is the operation that ends one, `call` the call that launched that
    (`exact`: by its correlation id), `begin` and `done` are when that call began and returned.
    """
    count = len(stalls)
    start, end = stalls.start, stalls.end
    events, calls = stalls.events, timeline.calls
    op = np.searchsorted(events.start_ns, end, "left")
    op = np.where(op < len(events), op, -1).astype(np.int64)
    call, exact = _calls_of(timeline, stalls, op)
    known = call >= 0
    at = np.maximum(call, 0)
    track = np.where(known, calls.track[at], -1) if len(calls) else np.full(count, -1)
    track = track.astype(np.int32)
    begin = np.where(exact, calls.start_ns[at], end) if len(calls) else end
    done = np.where(exact, calls.end_ns[at], end) if len(calls) else end
    begin, done = begin + timeline.clock_error_ns, done + timeline.clock_error_ns
    duration = end - start

    cause = np.full(count, CODE[Cause.UNKNOWN], np.uint8)
    idle = stalls.state == DeviceState.IDLE
    cause[stalls.state == DeviceState.COPYING] = CODE[Cause.COPY]
    cause[stalls.state == DeviceState.COLLECTIVE] = CODE[Cause.COLLECTIVE]
    used_by_others = _used_by_others(timeline, stalls)
    not_taken = np.where(used_by_others, CODE[Cause.GPU_CONTENTION], CODE[Cause.NOT_TAKEN])
    preempted = stalls.state == DeviceState.PREEMPTED
    cause[preempted] = not_taken[preempted]
    queued = idle & known & (done <= start)
    cause[queued & (duration < SHORT_NS)] = CODE[Cause.KERNEL_GAP]
    late_start = queued & (duration >= SHORT_NS)
    cause[late_start & (end - done <= LATENCY_NS)] = CODE[Cause.LAUNCH]
    not_started = late_start & (end - done > LATENCY_NS)
    cause[not_started] = not_taken[not_started]
    depends = not_started & _depends(timeline, stalls, op)
    cause[depends] = CODE[Cause.DEPENDENCY]
    cause[idle & ~known & (duration < SHORT_NS)] = CODE[Cause.KERNEL_GAP]

    # A small copy to the host reads a result: the copy, and a gap before it, belong to that wait.
    reading = _reads_back(stalls, op)
    cause[(reading & queued & (duration < SHORT_NS)) | _copies_back(stalls)] = CODE[
        Cause.SYNCHRONIZATION
    ]

    earlier_wait = np.full(count, -1, np.int64)
    late = np.flatnonzero(idle & known & ~queued)
    del (
        call,
        exact,
        known,
        at,
        duration,
        idle,
        queued,
        late_start,
        reading,
    )  # each has millions of rows
    tracks, threads_left = _latest(timeline, track[late], (end - start)[late])
    for one in tracks:
        rows = late[track[late] == one]
        cause[rows], earlier_wait[rows] = _of_thread(timeline, stalls, one, rows, begin, done, op)
    unproved = (cause == CODE[Cause.GPU_CONTENTION]) & ~used_by_others
    cause[unproved] = CODE[Cause.NOT_TAKEN]
    launched = np.minimum(np.maximum(begin, start), end)
    return BlamedStalls(stalls, cause, track, launched, op, earlier_wait, threads_left)


def _used_by_others(timeline: Timeline, stalls: Stalls) -> Mask:
    """Whether the driver reports that another process used the device during each stall.

    Reports come once a second, and the last ones of a record are missing. A process that is
    recorded itself, and waits for its device in a good part of the record, goes on between them.
    """
    if not timeline.busy_of:
        return np.zeros(len(stalls), bool)
    starts, ends = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for use in reports_on_others(timeline, [stalls.device], processes_on(timeline, stalls.device)):
        if (use.share >= LEAST_USE).any() and waits_for_device(timeline, use.pid):
            return np.ones(len(stalls), bool)
        before = np.concatenate([use.time_ns[:1] - REPORTED_NS, use.time_ns[:-1]])
        busy = use.share >= LEAST_USE
        starts.append(np.maximum(before, use.time_ns - REPORTED_NS)[busy])
        ends.append(use.time_ns[busy])
    start = np.concatenate(starts)
    order = np.argsort(start, kind="stable")
    used = sets.union(start[order], np.concatenate(ends)[order])
    return Coverage(used).within(stalls.start, stalls.end) > 0


def _depends(timeline: Timeline, stalls: Stalls, op: I64) -> Mask:
    """Whether each stall ends with an operation that waited for another device's operation."""
    found = np.zeros(len(stalls), bool)
    if not len(timeline.stream_waits):
        return found
    awaited = awaited_by(timeline)
    device_of = timeline.device_of_track[timeline.device.track]
    mine = np.flatnonzero(device_of == stalls.device)
    rows = np.flatnonzero(op >= 0)
    other = awaited[mine[op[rows]]]
    ended = timeline.device.end_ns[np.maximum(other, 0)]
    during = (ended > stalls.start[rows]) & (ended <= stalls.end[rows] + LATENCY_NS)
    found[rows] = (other >= 0) & during & (device_of[np.maximum(other, 0)] != stalls.device)
    return found


def _latest(timeline: Timeline, track: I32, late_ns: I64) -> tuple[list[int], int]:
    """(tracks of the threads to analyse, those late for longest; how many others there are).

    Each thread costs a pass over the whole timeline, so the number is bounded.
    """
    tracks, inverse = np.unique(track, return_inverse=True)
    most = max(LEAST_THREADS, MAX_THREADS // max(1, len(devices_of(timeline))))
    if len(tracks) <= most:
        return tracks.tolist(), 0
    whole = np.bincount(inverse.reshape(-1), late_ns)
    chosen: list[int] = np.sort(tracks[np.argsort(-whole, kind="stable")[:most]]).tolist()
    return chosen, len(tracks) - most


def _small_d2h(stalls: Stalls) -> Mask:
    events = stalls.events
    small: Mask = (
        (events.kind == DeviceKind.COPY)
        & (events.direction == CopyDirection.D2H)
        & (events.bytes <= RESULT_BYTES)
    )
    return small


def _reads_back(stalls: Stalls, op: I64) -> Mask:
    """Whether each stall ends with a copy that reads a result."""
    small = _small_d2h(stalls)
    found: Mask = op >= 0
    if len(small):
        found &= small[np.maximum(op, 0)]
    return found


def _copies_back(stalls: Stalls) -> Mask:
    """Whether only such a copy runs in each stall."""
    events = stalls.events
    if not len(events):
        return np.zeros(len(stalls), bool)
    found: Mask = stalls.state == DeviceState.COPYING
    rows = np.flatnonzero(found)
    at = np.searchsorted(events.start_ns, stalls.start[rows], "right") - 1
    small = _small_d2h(stalls)[np.maximum(at, 0)]
    found[rows] = small & (at >= 0) & (events.end_ns[np.maximum(at, 0)] >= stalls.end[rows])
    return found


def _calls_of(timeline: Timeline, stalls: Stalls, op: I64) -> tuple[I64, Mask]:
    """(row of the call that launched each operation, -1 unknown; whether the row is exact).

    Without a correlation id it is the last launch before the operation, which gives the thread but
    not the time.
    """
    calls = timeline.calls
    found = np.full(len(op), -1, np.int64)
    if not len(calls):
        return found, found >= 0
    if len(stalls.events):
        ended = op >= 0
        wanted = stalls.events.correlation[op[ended]]
        found[ended] = rows_with(calls.correlation, wanted)
    exact = found >= 0
    launches = np.flatnonzero(is_one_of(calls.kind, *ENQUEUES))
    missing = np.flatnonzero(found < 0)
    if len(launches) and len(missing):
        before = np.searchsorted(calls.start_ns[launches], stalls.end[missing], "right") - 1
        found[missing] = np.where(before >= 0, launches[np.maximum(before, 0)], -1)
    return found, exact


def _of_thread(
    timeline: Timeline, stalls: Stalls, track: int, rows: I64, begin: I64, done: I64, op: I64
) -> tuple[U8, I64]:
    """Causes of the stalls (rows) of one late thread, and their `BlamedStalls.earlier_wait_ns`.

    `begin`, `done`, `op`: columns of all stalls, as in `blame_stalls`.
    """
    start, end = stalls.start[rows], stalls.end[rows]
    launch_end = np.minimum(np.maximum(done[rows], start), end)
    launch = np.minimum(np.maximum(begin[rows], start), end)
    cause, claimed = _claimed(timeline, track, start, end, launch, launch_end)
    del launch
    deferrable = is_one_of(cause, *(CODE[one] for one in _DEFERRABLE))
    device = device_waits(timeline, stalls, track)
    calls = timeline.calls
    others = is_one_of(calls.kind, *ENQUEUES) & (calls.track != track)
    traced = [(one, sets.intersect(mine, stalls.window)) for one, mine in claimed]
    del claimed
    waits = deferred_waits.deferred(traced, device, calls.start_ns[others])
    del traced, others
    attributed = deferred_waits.attribute(waits, device.cleared, launch_end, end - start)
    del waits, device, launch_end
    earlier_wait = np.full(len(rows), -1, np.int64)
    if attributed is not None:
        at = np.flatnonzero(deferrable)
        deferred_cause, wait_ns = deferred_waits.assign_causes(attributed, at, end - start)
        _keep_code(cause[at], deferred_cause, (end - start)[at])
        found = deferred_cause != CODE[Cause.UNKNOWN]
        cause[at[found]] = deferred_cause[found]
        earlier_wait[at[found]] = wait_ns[found]
    next_op = np.maximum(op[rows], 0)
    to_device = (stalls.events.kind[next_op] == DeviceKind.COPY) & (
        stalls.events.direction[next_op] == CopyDirection.H2D
    )
    replaced = is_one_of(cause, *(CODE[one] for one in _OF_COPIES))
    copied = replaced & to_device & (op[rows] >= 0)
    cause[copied] = CODE[Cause.COPY]
    earlier_wait[copied] = -1
    return cause, earlier_wait


def _keep_code(cause: U8, deferred: U8, length: I64) -> None:
    """Keeps code its stalls where waits for the device, shorter than it, would outrank it.

    Both the wait and the code between launches have to end before the device gets work. Without
    the code, the time would shrink by its length; without the waits by theirs. So the longer one
    is the first cause of the stalls that both may have.
    """
    code = cause == CODE[Cause.HOST]
    taken = code & (deferred == CODE[Cause.SYNCHRONIZATION])
    whole, part = int(length[code].sum()), int(length[taken].sum())
    # Below one half the code keeps most of its stalls anyway.
    if 0.5 * whole < part < CODE_IS_LONGER * whole:
        deferred[taken] = CODE[Cause.UNKNOWN]


def _claimed(
    timeline: Timeline, track: int, start: I64, end: I64, launch: I64, launch_end: I64
) -> tuple[U8, list[tuple[Cause, Intervals]]]:
    """(the cause with the largest part of each stall; the thread's time by cause, disjoint).

    `launch`, `launch_end`: begin and end of the call that launched the operation after the stall,
    clipped to the stall.
    """
    claimed: list[tuple[Cause, Intervals]] = []
    taken = sets.none()
    path, compiling = launch_path(timeline, track)
    for one, claim in CLAIMS:
        mine = claim(timeline, track)
        if one == Cause.BUILD:
            mine = sets.joined(mine, compiling)
        mine = sets.subtract(mine, taken)
        if len(mine):
            claimed.append((one, mine))
            taken = sets.joined(taken, mine)
    coverages = [(one, Coverage(mine)) for one, mine in claimed]
    dispatch = Coverage(sets.subtract(path, taken))
    del path, compiling, taken
    code: dict[Cause, F64] = {
        one: np.broadcast_to(share, len(start)) for one, share in on_cpu(timeline, track).items()
    }
    if not code and (faults := _fault_share(timeline, track, start, launch)) is not None:
        code = {Cause.PAGE_FAULT: faults}
    cause = np.empty(len(start), np.uint8)
    for part in sets.in_parts(len(start)):  # there are millions of stalls
        columns = (start[part], end[part], launch[part], launch_end[part])
        some = {one: share[part] for one, share in code.items()}
        cause[part] = _largest(coverages, dispatch, *columns, some)
    return cause, claimed


def _largest(
    claimed: list[tuple[Cause, Coverage]],
    path: Coverage,
    start: I64,
    end: I64,
    launch: I64,
    launch_end: I64,
    code: Mapping[Cause, F64],
) -> U8:
    """The cause with the largest part of each stall. `path`: the thread's time on the launch path
    that no cause claims; `code`: by cause, its part of the thread's other time on a CPU."""
    best = np.zeros(len(start), np.int64)
    cause = np.full(len(start), CODE[Cause.LAUNCH], np.uint8)

    def claim_for(claiming: Cause, amount: I64) -> None:
        better = amount > best
        np.copyto(best, amount, where=better)
        cause[better] = CODE[claiming]

    # A thread may lose its CPU, or fault, also within the launch call.
    rest, calling = launch - start, end - launch
    blocked = {one: np.zeros(len(start), np.int64) for one in code}
    for one, coverage in claimed:
        amount = coverage.within(start, launch)
        rest -= amount
        if one != Cause.COPY:  # a copy is the launch call itself
            inside = coverage.within(launch, launch_end)
            calling -= inside
            amount += inside
        if one in blocked:
            blocked[one] = amount
        else:
            claim_for(one, amount)
    dispatch = np.minimum(path.within(start, launch), rest)
    host = rest - dispatch
    on_a_cpu = {one: (host * share).astype(np.int64) for one, share in code.items()}
    for one, amount in on_a_cpu.items():
        claim_for(one, blocked[one] + amount)
        host = host - amount
    claim_for(Cause.HOST, host)
    # Launched work starts within LATENCY_NS on a free device; else the device is not free.
    not_free = np.minimum(np.maximum(end - launch_end - LATENCY_NS, 0), calling)
    claim_for(Cause.GPU_CONTENTION, not_free)
    claim_for(Cause.LAUNCH, calling - not_free + dispatch)
    return cause


def _fault_share(timeline: Timeline, track: int, start: I64, end: I64) -> F64 | None:
    """The share of the thread's on-CPU samples in each interval that served page faults.

    None without samples. Statistical: samples sum up intervals of `Timeline.tick_ns`, so those that
    overlap the interval count. They are few, so the share is shrunk towards that of all intervals
    together, which has the weight `PRIOR_NS`.
    """
    samples = timeline.samples
    rows = np.flatnonzero(samples.track == track)
    rows = rows[~matching(timeline.names, samples.name[rows], _WAITING)]
    if not len(rows):
        return None
    order = np.argsort(samples.time_ns[rows], kind="stable")
    time = samples.time_ns[rows][order]
    weight = samples.weight_ns[rows][order]
    fault = np.where(samples.fault[rows][order], weight, 0)
    weights = np.concatenate([[0], np.cumsum(weight)])
    faults = np.concatenate([[0], np.cumsum(fault)])
    low = np.searchsorted(time, start - timeline.tick_ns, "left")
    high = np.searchsorted(time, end, "right")
    near = np.zeros(len(time) + 1, np.int64)
    np.add.at(near, low, 1)
    np.add.at(near, high, -1)
    around = np.cumsum(near)[:-1] > 0
    usual = float(fault[around].sum() / max(1, weight[around].sum()))
    whole = weights[high] - weights[low] + PRIOR_NS
    share: F64 = (faults[high] - faults[low] + usual * PRIOR_NS) / whole
    return share
