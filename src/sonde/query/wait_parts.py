# SPDX-License-Identifier: Apache-2.0
"""What the waits of a thread for one reason were for, where in the program, and who ended them.

The recorder sums waits by thread, reason and stack, once a second. Such a row has the thread that
ended its last wait, and becomes a row of `activity` (which has the waker) and, if its stack was
taken, a row of `sample` (which has the stack), both in the same order. Only the row of waits
without a stack has none in `sample`. So the two are joined by order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sonde.model.timeline import F64, I64, Activity, Mask, WaitDetail
from sonde.query.columns import Frames, ThreadTracks, texts_of, whole
from sonde.query.stack_roles import NUMBER_OF

GIL_FRAMES = (
    *("take_gil", "PyEval_RestoreThread", "PyEval_AcquireThread", "PyEval_AcquireLock"),
    *("PyGILState_Ensure", "_PyThreadState_Attach"),
)
"""Functions of CPython that wait for its lock; the first is missing in interpreters without a
table of symbols."""
MOST_PARTS = 32
"""Parts that the waits of one thread for one reason are split into: the longest."""
_IN_CALLS = (Activity.DEVICE_WAIT, Activity.COPY, Activity.ALLOCATION)
"""What a thread that is blocked within a device's call does there."""
_OF_LOCKS = (WaitDetail.GIL, WaitDetail.OWN_LOCK)
_KINDS = pa.array(["blocked", "device"])


@dataclass(frozen=True, slots=True)
class WaitPart:
    """Waits, or calls of a device, that are alike."""

    detail: WaitDetail
    location: str
    """Of the program's innermost own code; '' not known."""
    waker_tid: int
    """Thread that ended them: 0 none, -1 not known."""


class PartsKey(NamedTuple):
    """What waits that are split have in common."""

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
        tracks.of(rows),
        _details(frames, rows, in_capture),
        roles.location[frames.row_of(rows.column("stack_id"))],
        _wakers(tracks, rows, activity),
        whole(rows, "weight_ns"),
    )
    sums: dict[PartsKey, dict[WaitPart, int]] = defaultdict(lambda: defaultdict(int))
    for kind, name, track, number, location, waker_tid, ns in zip(
        kinds, names, *(column.tolist() for column in columns), strict=True
    ):
        detail = WaitDetail(number)
        if kind != "blocked" and detail != WaitDetail.GRAPH_CAPTURE:
            detail = WaitDetail.NONE
        if detail in _OF_LOCKS and name != "futex":
            detail = WaitDetail.NONE
        part = WaitPart(detail, roles.location_of(location), waker_tid)
        sums[PartsKey(track, kind, name)][part] += ns
    found: Parts = {}
    for key, parts in sums.items():
        all_ns = sum(parts.values())
        ranked = sorted(parts.items(), key=lambda item: -item[1])
        found[key] = {part: ns / all_ns for part, ns in ranked[:MOST_PARTS] if all_ns}
    return found


def _details(frames: Frames, rows: pa.Table, in_capture: Mask) -> I64:
    """The `WaitDetail` of each row, by its stack."""
    stacks = rows.column("stack_id")
    roles, row = frames.roles, frames.row_of(stacks)
    activity = roles.activity[row]
    for_lock = frames.holding(stacks, GIL_FRAMES) | roles.in_interpreter[row]
    by_priority = [  # the first that applies
        (in_capture[row], WaitDetail.GRAPH_CAPTURE),
        (activity == NUMBER_OF[Activity.INPUT], WaitDetail.INPUT),
        (np.isin(activity, [NUMBER_OF[one] for one in _IN_CALLS]), WaitDetail.IN_CALL),
        (for_lock, WaitDetail.GIL),
        (roles.communicates[row], WaitDetail.COMMUNICATION),
        (roles.computes[row], WaitDetail.COMPUTE),
        (roles.in_queue[row], WaitDetail.QUEUE),
        (roles.own_python_innermost[row], WaitDetail.OWN_LOCK),
    ]
    details: I64 = np.select(
        [applies for applies, _ in by_priority],
        [int(one) for _, one in by_priority],
        int(WaitDetail.NONE),
    )
    return details


def _wakers(tracks: ThreadTracks, sample: pa.Table, activity: pa.Table) -> I64:
    """Thread that ended the waits of each row of `sample`: 0 none, -1 not known.

    Rows of one second, thread and reason are in the same order in both tables. Where `activity` has
    one row more, the one without a stack is left out so that the rest agrees best in count and
    length; where it has more than that, nothing is known.
    """
    found = np.full(sample.num_rows, -1, np.int64)
    totals = activity.filter(pc.is_in(activity.column("kind"), _KINDS))
    if not sample.num_rows or not totals.num_rows:
        return found
    numbers: dict[tuple[str, str], int] = {}

    def keys_of(table: pa.Table) -> I64:
        pairs = zip(texts_of(table, "kind"), texts_of(table, "name"), strict=True)
        named = [numbers.setdefault(pair, len(numbers)) for pair in pairs]
        columns = (whole(table, "time_ns"), tracks.of(table).astype(np.int64), named)
        return np.stack([np.asarray(column, np.int64) for column in columns], axis=1)

    both = np.concatenate([keys_of(sample), keys_of(totals)])
    group = np.unique(both, axis=0, return_inverse=True)[1].reshape(-1)
    ours, theirs = group[: sample.num_rows], group[sample.num_rows :]
    count = int(group.max()) + 1
    many, more = np.bincount(ours, minlength=count), np.bincount(theirs, minlength=count)
    order, at = np.argsort(ours, kind="stable"), np.argsort(theirs, kind="stable")
    first, begin = (np.concatenate([[0], np.cumsum(those)])[:-1] for those in (many, more))
    mine = ours[order]
    position = np.arange(len(order)) - first[mine]
    same = more[mine] == many[mine]
    extra = more[mine] == many[mine] + 1
    partner = begin[mine] + position
    if extra.any():
        differs = _difference(sample, totals, order, at)
        rows = np.flatnonzero(extra)
        gain = np.zeros(len(order))
        gain[rows] = differs(rows, partner[rows]) - differs(rows, partner[rows] + 1)
        partner[rows] += _behind_left_out(gain[rows], mine[rows])
    known = np.flatnonzero(same | extra)
    waker = whole(totals, "waker_tid")
    found[order[known]] = waker[at[partner[known]]]
    return found


def _difference(
    sample: pa.Table, totals: pa.Table, order: I64, at: I64
) -> Callable[[I64, I64], F64]:
    """How badly rows of the one table, by their number in `order`, match those of the other, in
    `at`: each wait with a stack stands for one or more, all of about the same length."""
    weight, stood = sample.column("weight_ns").to_numpy(), sample.column("weight_count").to_numpy()
    ns, count = whole(totals, "ns"), whole(totals, "count")

    def differs(rows: I64, others: I64) -> F64:
        mine, theirs = order[rows], at[others]
        by_length = np.log((weight[mine] + 1.0) / (ns[theirs] + 1.0))
        by_count = np.log((stood[mine] + 1.0) / (count[theirs] + 1.0))
        badly: F64 = np.abs(by_length - by_count) + 10.0 * (stood[mine] < count[theirs])
        return badly

    return differs


def _behind_left_out(gain: F64, group: I64) -> I64:
    """1 for the rows from the one that is left out on, 0 for those before it, in each group.

    `gain`: how much worse each row matches its own number than the next one.
    """
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    sums = np.cumsum(gain)
    sums -= np.repeat((sums - gain)[starts], np.diff([*starts, len(gain)]))
    found = np.ones(len(gain), np.int64)
    for begin, end in zip(starts.tolist(), [*starts[1:].tolist(), len(gain)], strict=True):
        so_far = np.concatenate([[0.0], sums[begin:end]])
        found[begin : begin + int(so_far.argmin())] = 0
    return found
