# SPDX-License-Identifier: Apache-2.0
"""What the waits of a thread for one reason were for, where in the program, and who ended them.

The recorder sums waits by thread, reason and stack, once a second. Each such sum becomes a row of
`activity`, with the thread that ended the last of the waits, and, if a stack was taken, a row of
`sample` with the stack. Rows are in the same order in both tables, and only the sum of waits
without a stack has no row in `sample`. So the two tables are joined by order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sonde.model.distinct_rows import distinct_rows
from sonde.model.libraries import GIL_FRAMES
from sonde.model.spinning import POOLS
from sonde.model.timeline import F64, I64, Activity, Mask, WaitDetail
from sonde.query.columns import Frames, ThreadTracks, int64_column, texts_of
from sonde.query.stack_roles import NUMBER_OF

MUTEX_FRAMES = (
    *("__lll_lock_wait", "___pthread_mutex_lock", "__pthread_mutex_lock", "pthread_mutex_lock"),
    *("__pthread_mutex_lock_full", "pthread_mutex_timedlock", "pthread_mutex_clocklock"),
    *("pthread_rwlock_rdlock", "pthread_rwlock_wrlock", "__pthread_rwlock_rdlock"),
    *("__pthread_rwlock_wrlock", "___pthread_rwlock_rdlock", "___pthread_rwlock_wrlock"),
)
"""Functions of libc that wait for a lock, by the names that its versions have for them."""
PREEMPTED = "preempted"
"""Reason of the time in a run queue of a thread that did not sleep before."""
MAX_PARTS = 32
"""Parts into which the waits of one thread for one reason are split: the longest ones."""
_IN_CALLS = (Activity.DEVICE_WAIT, Activity.COPY, Activity.ALLOCATION)
"""What a thread that is blocked within a call of a device API does there."""
PIPE_FRAMES = (
    *("pipe_read", "pipe_write", "anon_pipe_read", "anon_pipe_write"),
    *("fifo_pipe_read", "fifo_pipe_write"),
)
SOCKET_FRAMES = ("sock_read_iter", "sock_write_iter")
"""Functions of the kernel that read and write these."""
_OF_FILES = ("read", "write")
"""Reasons of waits for files, pipes or sockets."""
_OF_LOCKS = (WaitDetail.GIL, WaitDetail.OWN_LOCK)
"""Details that only waits in futex can have."""
_KINDS = pa.array(["blocked", "device"])
"""Kinds of rows that are split."""


@dataclass(frozen=True, slots=True)
class WaitPart:
    """What waits, or calls of a device API, have in common that count as one part."""

    detail: WaitDetail
    location: str
    """Of the program's innermost own code; '' not known."""
    waker_tid: int
    """Thread that ended them; 0: no thread did (an interrupt), -1: not known."""
    serves: bool = False
    """For the next connection, request or task."""
    service: str = ""
    """As of `Total`, and so are `entry` and `pool`."""
    entry: str = ""
    pool: str = ""


class PartsKey(NamedTuple):
    """What waits, or calls, have in common whose time is split into parts."""

    track: int
    kind: str
    name: str


Parts = dict[PartsKey, dict[WaitPart, float]]
"""By thread, kind and reason of a wait, or function of a device call: the share of each part."""


def parts_of_waits(
    tracks: ThreadTracks,
    frames: Frames,
    sample: pa.Table,
    activity: pa.Table,
    in_capture: Mask,
) -> Parts:
    """The parts of all waits and calls with stacks. `in_capture`: which stacks capture graphs."""
    rows = sample.filter(pc.is_in(sample.column("kind"), _KINDS))
    kinds, names = texts_of(rows, "kind"), texts_of(rows, "name")
    roles = frames.roles
    columns = (
        tracks.of_rows(rows),
        _details(frames, rows, in_capture),
        roles.location[frames.row_of(rows.column("stack_id"))],
        _wakers(tracks, rows, activity),
        roles.serves[frames.row_of(rows.column("stack_id"))],
        roles.service[frames.row_of(rows.column("stack_id"))],
        roles.entry[frames.row_of(rows.column("stack_id"))],
        roles.reads[frames.row_of(rows.column("stack_id"))],
        frames.holding(rows.column("stack_id"), PIPE_FRAMES),
        frames.holding(rows.column("stack_id"), SOCKET_FRAMES),
        int64_column(rows, "weight_ns"),
    )
    sums: dict[PartsKey, dict[WaitPart, int]] = defaultdict(lambda: defaultdict(int))
    lists = (column.tolist() for column in columns)
    for kind, name, track, number, *code, is_pipe, is_socket, ns in zip(
        kinds, names, *lists, strict=True
    ):
        location, waker_tid, serves, service, entry, reads = code
        detail = WaitDetail(number)
        if kind != "blocked" and detail != WaitDetail.GRAPH_CAPTURE:
            detail = WaitDetail.NONE
        if detail in _OF_LOCKS and name != "futex":
            detail = WaitDetail.NONE
        if detail == WaitDetail.NONE and name in _OF_FILES and location >= 0:
            of_socket = WaitDetail.SOCKET if is_socket else WaitDetail.NONE
            detail = WaitDetail.PIPE if is_pipe else of_socket
        waits = serves or (reads and name == "socket")
        part = WaitPart(
            detail, roles.location_of(location), waker_tid, waits, *roles.request_of(service, entry)
        )
        sums[PartsKey(track, kind, name)][part] += ns
    return _shares(sums)


def parts_of_run_queue(tracks: ThreadTracks, frames: Frames, sample: pa.Table) -> Parts:
    """The parts of the time in run queues: where a thread stood when it lost its CPU, or went to
    sleep before it was ready again, by the stack that was taken then."""
    rows = sample.filter(pc.equal(sample.column("kind"), "runqueue"))
    roles, row = frames.roles, frames.row_of(rows.column("stack_id"))
    columns = (tracks.of_rows(rows), roles.location[row], roles.pool[row])
    weights = int64_column(rows, "weight_ns")
    sums: dict[PartsKey, dict[WaitPart, int]] = defaultdict(lambda: defaultdict(int))
    for name, track, location, pool, ns in zip(
        texts_of(rows, "name"), *(column.tolist() for column in (*columns, weights)), strict=True
    ):
        # A thread that slept did not spin.
        spins = POOLS[pool - 1] if pool and name == PREEMPTED else ""
        part = WaitPart(WaitDetail.NONE, roles.location_of(location), -1, pool=spins)
        sums[PartsKey(track, "runqueue", name)][part] += ns
    return _shares(sums)


def _shares(sums: Mapping[PartsKey, Mapping[WaitPart, int]]) -> Parts:
    """The shares of the longest parts, from the sum of each."""
    found: Parts = {}
    for key, parts in sums.items():
        all_ns = sum(parts.values())
        ranked = sorted(parts.items(), key=lambda item: -item[1])
        found[key] = {part: ns / all_ns for part, ns in ranked[:MAX_PARTS] if all_ns}
    return found


def _details(frames: Frames, rows: pa.Table, in_capture: Mask) -> I64:
    """The `WaitDetail` of each row, by its stack."""
    stacks = rows.column("stack_id")
    roles, row = frames.roles, frames.row_of(stacks)
    activity = roles.activity[row]
    for_gil = frames.holding(stacks, GIL_FRAMES) | roles.in_interpreter[row]
    of_mutex = roles.own_native_innermost[row] & frames.holding(stacks, MUTEX_FRAMES)
    by_priority = [  # the first that applies
        (in_capture[row], WaitDetail.GRAPH_CAPTURE),
        (roles.for_room[row], WaitDetail.ROOM),
        (activity == NUMBER_OF[Activity.INPUT], WaitDetail.INPUT),
        (np.isin(activity, [NUMBER_OF[one] for one in _IN_CALLS]), WaitDetail.IN_CALL),
        (for_gil, WaitDetail.GIL),
        (roles.communicates[row], WaitDetail.COMMUNICATION),
        (roles.computes[row] | roles.compiles[row], WaitDetail.COMPUTE),
        (roles.in_queue[row], WaitDetail.QUEUE),
        (roles.own_python_innermost[row], WaitDetail.OWN_LOCK),
        (of_mutex, WaitDetail.OWN_LOCK),
    ]
    details: I64 = np.select(
        [applies for applies, _ in by_priority],
        [int(one) for _, one in by_priority],
        int(WaitDetail.NONE),
    )
    return details


def _wakers(tracks: ThreadTracks, sample: pa.Table, activity: pa.Table) -> I64:
    """Thread that ended the waits of each row of `sample`: 0 no thread, -1 not known.

    Rows of one second, thread and reason (a group) are in the same order in both tables. Where
    `activity` has one row more, that row is taken for the one without a stack whose omission makes
    the others agree best in count and length. Where it has more than that, or fewer, nothing is
    known.
    """
    found = np.full(sample.num_rows, -1, np.int64)
    totals = activity.filter(pc.is_in(activity.column("kind"), _KINDS))
    if not sample.num_rows or not totals.num_rows:
        return found
    numbers: dict[tuple[str, str], int] = {}

    def keys_of(table: pa.Table) -> list[I64]:
        pairs = zip(texts_of(table, "kind"), texts_of(table, "name"), strict=True)
        named = [numbers.setdefault(pair, len(numbers)) for pair in pairs]
        columns = (int64_column(table, "time_ns"), tracks.of_rows(table), named)
        return [np.asarray(column, np.int64) for column in columns]

    both = zip(keys_of(sample), keys_of(totals), strict=True)
    group = distinct_rows([np.concatenate(pair) for pair in both])[1]
    sample_group, total_group = group[: sample.num_rows], group[sample.num_rows :]
    count = int(group.max()) + 1
    # By group: the number of rows in each table.
    samples = np.bincount(sample_group, minlength=count)
    sums = np.bincount(total_group, minlength=count)
    # Rows sorted by group, and by group the position of its first row in that order.
    order = np.argsort(sample_group, kind="stable")
    total_order = np.argsort(total_group, kind="stable")
    first, first_total = (np.concatenate([[0], np.cumsum(one)])[:-1] for one in (samples, sums))
    groups = sample_group[order]
    same = sums[groups] == samples[groups]
    extra = sums[groups] == samples[groups] + 1
    partner = first_total[groups] + np.arange(len(order)) - first[groups]
    if extra.any():
        mismatch = _mismatch(sample, totals, order, total_order)
        rows = np.flatnonzero(extra)
        gain = np.zeros(len(order))
        gain[rows] = mismatch(rows, partner[rows]) - mismatch(rows, partner[rows] + 1)
        partner[rows] += _shifts(gain[rows], groups[rows])
    known = np.flatnonzero(same | extra)
    waker = int64_column(totals, "waker_tid")
    found[order[known]] = waker[total_order[partner[known]]]
    return found


def _mismatch(
    sample: pa.Table, totals: pa.Table, order: I64, total_order: I64
) -> Callable[[I64, I64], F64]:
    """A function of positions in `order` and in `total_order`: how badly these rows match, 0 best.

    A wait with a stack stands for one or more waits of about its length. So both the time and the
    count of a sample may exceed those of its sum, in the same ratio, but not fall below.
    """
    weight = sample.column("weight_ns").to_numpy()
    events = sample.column("weight_count").to_numpy()
    ns, count = int64_column(totals, "ns"), int64_column(totals, "count")

    def mismatch(rows: I64, total_rows: I64) -> F64:
        mine, theirs = order[rows], total_order[total_rows]
        by_length = np.log((weight[mine] + 1.0) / (ns[theirs] + 1.0))
        by_count = np.log((events[mine] + 1.0) / (count[theirs] + 1.0))
        found: F64 = np.abs(by_length - by_count) + 10.0 * (events[mine] < count[theirs])
        return found

    return mismatch


def _shifts(gain: F64, group: I64) -> I64:
    """How far each row's partner moves: 1 behind the row of `activity` that is left out, 0 before
    it, in each group.

    `gain`: how much worse each row matches the partner at its position than the next one.
    """
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    sums = np.cumsum(gain)
    sums -= np.repeat((sums - gain)[starts], np.diff([*starts, len(gain)]))
    found = np.ones(len(gain), np.int64)
    for begin, end in zip(starts.tolist(), [*starts[1:].tolist(), len(gain)], strict=True):
        so_far = np.concatenate([[0.0], sums[begin:end]])
        found[begin : begin + int(so_far.argmin())] = 0
    return found
