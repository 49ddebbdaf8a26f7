# SPDX-License-Identifier: Apache-2.0
"""The wait-state engine: each stall of a device gets one cause, so that blame sums to the stalls.

For a stall [a, b) that ended with an operation whose launch call ran [ls, le) on thread T:

- copies or collectives alone on the device are their own cause;
- le <= a: the work was there and the device did not take it. Short: latency between kernels; long:
  somebody else had the device;
- else the host was late, and the question is what T did until the launch returned or the device
  began: the causes of `sonde.analyze.causes` claim that time; of the rest, what lies before ls is
  the code that T ran, and [ls, b) the launch. The cause with the largest part has the stall.
- **A wait is a cause beyond its own length**: what delayed T while the device still had work is to
  blame for the stalls that follow, as long as it lasted (`sonde.analyze.delays`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from sonde.analyze import delays
from sonde.analyze import intervals as sets
from sonde.analyze.causes import CLAIMS, NUMBER
from sonde.analyze.device_waits import ENQUEUES, RESULT_BYTES, asked_for, device_waits
from sonde.analyze.idle import Stalls, State, devices_of, stalls_of
from sonde.analyze.intervals import Coverage, Intervals
from sonde.analyze.rivals import without_gaps_hidden
from sonde.model.name_parts import matching
from sonde.model.timeline import F64, I32, I64, U8, DeviceKind, Mask, Timeline, Way, is_one_of

SHORT_NS = 20_000
"""Below this an interval between kernels that were all there is the device's own latency."""
LATENCY_NS = 30_000
"""From a launch call's end to its kernel's start on a device that is free."""
LAUNCH_PATH_NS = 200_000
"""Host code that takes longer than this from one launch to the next is more than a way to it."""


@dataclass(frozen=True, slots=True)
class Blame:
    """One cause for each of `stalls`."""

    stalls: Stalls
    cause: U8
    """Index into `causes.KEYS`."""
    lane: I32
    """The thread that was late, or that launched what came next; -1 unknown."""
    launch_ns: I64
    """When the launch began that ended the stall; its end where none is known."""
    op: I64
    """Row of `stalls.events` that ended it, -1 none."""
    delayed_ns: I64
    """A time in the earlier wait that is to blame for it; -1: the cause lies in the stall."""
    threads_left: int = 0
    """Threads that were late and were not looked into, as too many others were for longer."""

    def total_ns(self, key: str) -> int:
        """Summed length of the stalls with this cause."""
        return int(self.stalls.duration_ns[self.cause == NUMBER[key]].sum())


FEW_NS = 100_000_000
"""Samples of this weight, ten at 99 Hz, tell no more than those of all intervals together."""
_WAITING = re.compile(r"^(cu|cuda|hip)\w*(Synchronize|Query)$")
"""Samples in these say nothing of what kept the thread from launching."""
MOST_THREADS, LEAST_THREADS = 256, 2
"""That are looked into for all devices together, and for each; a program has some ten a device."""
SHARED = 0.02
"""Rivals that had a device to themselves for this share of the time also interrupted kernels."""


def blame_device(
    timeline: Timeline, device: int, start_ns: int | None = None, end_ns: int | None = None
) -> Blame:
    """The stalls of a device and their causes, between two instants if given."""
    found = blame(timeline, stalls_of(timeline, device, start_ns, end_ns))
    if found.total_ns("rival") < SHARED * found.stalls.window_ns:
        return found
    shared = blame(timeline, stalls_of(timeline, device, start_ns, end_ns, shared=True))
    return without_gaps_hidden(timeline, shared)


def blame(timeline: Timeline, stalls: Stalls) -> Blame:
    """Find the cause of each stall."""
    count = len(stalls)
    start, end = stalls.start, stalls.end
    events, calls = stalls.events, timeline.calls
    op = np.searchsorted(events.start_ns, end, "left")
    op = np.where(op < len(events), op, -1).astype(np.int64)
    call, exact = _calls_of(timeline, stalls, op)
    known = call >= 0
    at = np.maximum(call, 0)
    lane = np.where(known, calls.lane[at], -1) if len(calls) else np.full(count, -1)
    lane = lane.astype(np.int32)
    begin = np.where(exact, calls.start_ns[at], end) if len(calls) else end
    done = np.where(exact, calls.end_ns[at], end) if len(calls) else end
    begin, done = begin + timeline.clock_error_ns, done + timeline.clock_error_ns
    duration = end - start

    cause = np.full(count, NUMBER["unknown"], np.uint8)
    idle = stalls.state == State.IDLE
    cause[stalls.state == State.COPYING] = NUMBER["copy"]
    cause[stalls.state == State.COLLECTIVE] = NUMBER["collective"]
    cause[stalls.state == State.TAKEN] = NUMBER["rival"]
    queued = idle & known & (done <= start)
    cause[queued & (duration < SHORT_NS)] = NUMBER["short"]
    late_start = queued & (duration >= SHORT_NS)
    cause[late_start & (end - done <= LATENCY_NS)] = NUMBER["launch"]
    cause[late_start & (end - done > LATENCY_NS)] = NUMBER["rival"]
    cause[idle & ~known & (duration < SHORT_NS)] = NUMBER["short"]

    # A small copy to the host is a result being read: it and what delays it are part of that wait.
    reading = _reads_back(stalls, op)
    cause[(reading & queued & (duration < SHORT_NS)) | _copies_back(stalls)] = NUMBER[
        "synchronisation"
    ]

    delayed = np.full(count, -1, np.int64)
    late = np.flatnonzero(idle & known & ~queued)
    del call, exact, known, at, duration, idle, queued, late_start, reading  # they come in millions
    lanes, threads_left = _latest(timeline, lane[late], (end - start)[late])
    for one in lanes:
        rows = late[lane[late] == one]
        cause[rows], delayed[rows] = _of_thread(timeline, stalls, one, rows, begin, done, op)
    launched = np.minimum(np.maximum(begin, start), end)
    return Blame(stalls, cause, lane, launched, op, delayed, threads_left)


def _latest(timeline: Timeline, lane: I32, late_ns: I64) -> tuple[list[int], int]:
    """The threads to look into, those late for longest, and how many are left.

    Each is looked for in all that the timeline holds, so that of any number of them would take the
    square of its size.
    """
    lanes, inverse = np.unique(lane, return_inverse=True)
    most = max(LEAST_THREADS, MOST_THREADS // max(1, len(devices_of(timeline))))
    if len(lanes) <= most:
        return lanes.tolist(), 0
    whole = np.bincount(inverse.reshape(-1), late_ns)
    chosen: list[int] = np.sort(lanes[np.argsort(-whole, kind="stable")[:most]]).tolist()
    return chosen, len(lanes) - most


def _small_d2h(stalls: Stalls) -> Mask:
    events = stalls.events
    small: Mask = (
        (events.kind == DeviceKind.COPY) & (events.way == Way.D2H) & (events.bytes <= RESULT_BYTES)
    )
    return small


def _reads_back(stalls: Stalls, op: I64) -> Mask:
    """Stalls that end with a result being read."""
    small = _small_d2h(stalls)
    found: Mask = op >= 0
    if len(small):
        found &= small[np.maximum(op, 0)]
    return found


def _copies_back(stalls: Stalls) -> Mask:
    """Stalls in which just that goes on."""
    events = stalls.events
    if not len(events):
        return np.zeros(len(stalls), bool)
    found: Mask = stalls.state == State.COPYING
    rows = np.flatnonzero(found)
    at = np.searchsorted(events.start_ns, stalls.start[rows], "right") - 1
    small = _small_d2h(stalls)[np.maximum(at, 0)]
    found[rows] = small & (at >= 0) & (events.end_ns[np.maximum(at, 0)] >= stalls.end[rows])
    return found


def _calls_of(timeline: Timeline, stalls: Stalls, op: I64) -> tuple[I64, Mask]:
    """The row of the call that launched each operation, -1 unknown, and whether it is that one.

    Without a correlation id it is the last launch before the operation: the thread, not the time.
    """
    calls = timeline.calls
    found = np.full(len(op), -1, np.int64)
    if not len(calls):
        return found, found >= 0
    if len(stalls.events):
        ended = op >= 0
        wanted = stalls.events.correlation[op[ended]]
        found[ended] = asked_for(calls.correlation, wanted)
    exact = found >= 0
    launches = np.flatnonzero(is_one_of(calls.kind, *ENQUEUES))
    missing = np.flatnonzero(found < 0)
    if len(launches) and len(missing):
        before = np.searchsorted(calls.start_ns[launches], stalls.end[missing], "right") - 1
        found[missing] = np.where(before >= 0, launches[np.maximum(before, 0)], -1)
    return found, exact


def _of_thread(
    timeline: Timeline, stalls: Stalls, lane: int, rows: I64, begin: I64, done: I64, op: I64
) -> tuple[U8, I64]:
    """Causes of the stalls (rows) in which one thread was late, and `Blame.delayed_ns`."""
    start, end = stalls.start[rows], stalls.end[rows]
    held = np.minimum(np.maximum(done[rows], start), end)
    launch = np.minimum(np.maximum(begin[rows], start), end)
    cause, claimed = _claimed(timeline, lane, start, end, launch, held)
    del launch
    ways = [NUMBER[key] for key in ("launch", "host", "synchronisation", "copy")]
    open_to = is_one_of(cause, *ways)
    device = device_waits(timeline, stalls, lane)
    calls = timeline.calls
    others = is_one_of(calls.kind, *ENQUEUES) & (calls.lane != lane)
    seen = [(key, sets.intersect(mine, stalls.window)) for key, mine in claimed]
    del claimed
    owed = delays.debts(seen, device, calls.start_ns[others])
    del seen, others
    paid = delays.paid(owed, device.settled, held, end - start)
    del owed, device, held
    delayed = np.full(len(rows), -1, np.int64)
    if paid is not None:
        due = np.flatnonzero(open_to)
        owing, within = delays.dealt(paid, due, end - start)
        owes = owing != NUMBER["unknown"]
        cause[due[owes]] = owing[owes]
        delayed[due[owes]] = within[owes]
    next_op = np.maximum(op[rows], 0)
    to_device = (stalls.events.kind[next_op] == DeviceKind.COPY) & (
        stalls.events.way[next_op] == Way.H2D
    )
    small = is_one_of(cause, *(NUMBER[key] for key in ("launch", "synchronisation", "copy")))
    copied = small & to_device & (op[rows] >= 0)
    cause[copied] = NUMBER["copy"]
    delayed[copied] = -1
    return cause, delayed


def _claimed(
    timeline: Timeline, lane: int, start: I64, end: I64, launch: I64, held: I64
) -> tuple[U8, list[tuple[str, Intervals]]]:
    """The cause with the largest part of each stall, and the thread's time by cause.

    `launch`, `held`: begin and end of the call that launched what ended it, within the stall.
    """
    claimed: list[tuple[str, Intervals]] = []
    taken = sets.none()
    for key, claim in CLAIMS:
        mine = sets.subtract(claim(timeline, lane), taken)
        if len(mine):
            claimed.append((key, mine))
            taken = sets.joined(taken, mine)
    del taken
    coverages = [(key, Coverage(mine)) for key, mine in claimed]
    faults = _fault_share(timeline, lane, start, launch)
    cause = np.empty(len(start), np.uint8)
    for part in sets.in_parts(len(start)):  # stalls come in millions
        columns = (start[part], end[part], launch[part], held[part])
        cause[part] = _largest(coverages, *columns, faults[part] if faults is not None else None)
    return cause, claimed


def _largest(
    claimed: list[tuple[str, Coverage]],
    start: I64,
    end: I64,
    launch: I64,
    held: I64,
    faults: F64 | None,
) -> U8:
    """The cause with the largest part of each stall. `faults`: the share of page faults."""
    best = np.zeros(len(start), np.int64)
    cause = np.full(len(start), NUMBER["launch"], np.uint8)

    def claim_for(key: str, amount: I64) -> None:
        better = amount > best
        np.copyto(best, amount, where=better)
        cause[better] = NUMBER[key]

    # A thread that is kept from running may be so within the call that launches.
    rest, calling = launch - start, end - launch
    faulted = np.zeros(len(start), np.int64)
    for key, coverage in claimed:
        amount = coverage.within(start, launch)
        rest -= amount
        if key != "copy":  # which is the call itself
            inside = coverage.within(launch, held)
            calling -= inside
            amount += inside
        if key == "page fault":
            faulted = amount
        else:
            claim_for(key, amount)
    path = rest <= LAUNCH_PATH_NS
    late = np.where(path, 0, rest)
    moved = np.zeros_like(late) if faults is None else (late * faults).astype(np.int64)
    claim_for("page fault", moved + faulted)
    claim_for("host", late - moved)
    # Once launched, work on a free device starts soon, or the device is not free.
    kept = np.minimum(np.maximum(end - held - LATENCY_NS, 0), calling)
    claim_for("rival", kept)
    claim_for("launch", calling - kept + np.where(path, rest, 0))
    return cause


def _fault_share(timeline: Timeline, lane: int, start: I64, end: I64) -> F64 | None:
    """Share of the thread's samples, in and around each interval, that served page faults; None
    without samples.

    Statistical: samples are summed over ticks, so the ticks that touch the interval count, and as
    those hold few samples, the share is drawn to that of all the intervals together.
    """
    samples = timeline.samples
    rows = np.flatnonzero(samples.lane == lane)
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
    whole = weights[high] - weights[low] + FEW_NS
    share: F64 = (faults[high] - faults[low] + usual * FEW_NS) / whole
    return share
