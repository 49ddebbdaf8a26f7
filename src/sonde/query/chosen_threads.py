# SPDX-License-Identifier: Apache-2.0
"""The threads of a capture of very many threads that a verdict can be about.

A verdict is on threads that ran, waited for a lock or a disk, or called a device for a good part of
the record, and names those that held them up. Of the others it needs two sums each: the CPUs that
they had together, and whether they were short of one, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sonde.model.other_threads import OtherThreads, no_other_threads
from sonde.model.timeline import F64, I64, Mask
from sonde.query.columns import int64_column
from sonde.query.grouping import grouped

MANY_THREADS = 5_000
"""In a capture of at most this many all are chosen."""
MOST = 200
"""Threads that are chosen by each measure: those with most of it."""
GENERATIONS = 8
"""Of processes, back from each chosen thread: the first thread of each is chosen, too."""
_DISK = ("write", "sync to disk", "file")
"""Reasons of waits for a disk."""
_ROW_TABLES = ("sample", "activity", "device_run")
_LOW_HALF = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Chosen:
    """A capture's tables with the rows of some threads."""

    tables: dict[str, pa.Table]
    others: OtherThreads
    """All other threads."""
    note: str = ""
    """How many threads were chosen, in words; '' where all were."""


def chosen_threads(tables: dict[str, pa.Table]) -> Chosen:
    """The tables with the rows of `sample`, `activity` and `span` of the chosen threads, all of
    `device_run`, and the stacks and frames that these have."""
    rows = sum(tables[name].num_rows for name in _ROW_TABLES)
    if max(tables["thread"].num_rows, rows) <= MANY_THREADS:
        return Chosen(tables, no_other_threads())
    keys, of_rows = grouped(np.concatenate([_keys(tables[name]) for name in _ROW_TABLES]))
    # Rows may name threads that have none in the table of threads.
    threads = max(tables["thread"].num_rows, len(keys))
    if threads <= MANY_THREADS:
        return Chosen(tables, no_other_threads())
    ends = np.cumsum([tables[name].num_rows for name in _ROW_TABLES]).tolist()
    of_sample, of_activity, of_run, _ = np.split(of_rows, ends)
    ran = _summed(tables["sample"], "weight_ns", of_sample, len(keys), ("cpu",))
    queued = _summed(tables["activity"], "ns", of_activity, len(keys), ("runqueue",))
    kept = np.zeros(len(keys), bool)
    for measure in (
        ran,
        ran + queued,
        *_waits(tables["activity"], of_activity, len(keys)),
        _summed(tables["activity"], "ns", of_activity, len(keys), ("device",)),
        np.bincount(of_run, minlength=len(keys)).astype(np.float64),
    ):
        kept[_most(measure)] = True
    kept |= np.isin(keys & _LOW_HALF, _wakers(tables["activity"], kept[of_activity]))
    kept |= np.isin(keys, _first_threads(keys[kept] >> 32, tables["process"]))
    rest = ~kept & (ran > 0)
    narrowed = {
        **tables,
        "sample": tables["sample"].filter(
            pa.array(kept[of_sample] & ~_is_in(tables["sample"], "kind", ("runqueue",)))
        ),
        "activity": tables["activity"].filter(pa.array(kept[of_activity])),
        "span": _of_threads(tables["span"], keys[kept]),
    }
    return Chosen(
        _with_used_stacks(narrowed),
        OtherThreads(
            ran[rest],
            queued[rest],
            keys[rest] >> 32,
            _processes(tables["process"], keys[rest] >> 32),
        ),
        f"of {threads:,} threads, the {int(kept.sum()):,} that ran, waited for a lock or a disk, "
        "or called a device most were looked at one by one; the others count by their CPU time",
    )


def _processes(process: pa.Table, pids: I64) -> dict[int, str]:
    """What these processes run, as `Track.process`."""
    mine = process.filter(pc.is_in(process.column("pid"), pa.array(np.unique(pids), pa.uint32())))
    columns = (mine.column(name).to_pylist() for name in ("pid", "comm", "exe", "command"))
    return {pid: command or comm or exe for pid, comm, exe, command in zip(*columns, strict=True)}


def _keys(table: pa.Table) -> I64:
    """A number for the thread of each row: pids are below 2^31."""
    return int64_column(table, "pid") << 32 | int64_column(table, "tid")


def _summed(table: pa.Table, column: str, thread: I64, threads: int, kinds: tuple[str, ...]) -> F64:
    """The sum of a column over the rows of these kinds by thread; shape (threads,)."""
    rows = _is_in(table, "kind", kinds)
    sums = np.bincount(thread[rows], int64_column(table, column)[rows], threads)
    found: F64 = sums.astype(np.float64)
    return found


def _waits(activity: pa.Table, thread: I64, threads: int) -> tuple[F64, F64, F64]:
    """By thread: time and number of waits on a futex, and time of waits for a disk."""
    blocked = _is_in(activity, "kind", ("blocked",))
    futex = blocked & _is_in(activity, "name", ("futex",))
    disk = blocked & _is_in(activity, "name", _DISK)
    ns, count = int64_column(activity, "ns"), int64_column(activity, "count")

    def summed(rows: Mask, values: I64) -> F64:
        found: F64 = np.bincount(thread[rows], values[rows], threads).astype(np.float64)
        return found

    return summed(futex, ns), summed(futex, count), summed(disk, ns)


def _wakers(activity: pa.Table, rows: Mask) -> I64:
    """Ids of the threads that ended most of the waits in these rows."""
    ended = rows & _is_in(activity, "kind", ("blocked",))
    tids, of_row = grouped(int64_column(activity, "waker_tid")[ended])
    sums = np.bincount(of_row, int64_column(activity, "ns")[ended], len(tids))
    most = _most(np.where(tids != 0, sums, 0.0))
    found: I64 = tids[most]
    return found


def _first_threads(pids: I64, process: pa.Table) -> I64:
    """The keys of the first threads of these processes and of those that started them."""
    names = ("pid", "ppid")
    parent = dict(zip(*(process.column(name).to_pylist() for name in names), strict=True))
    found = set(pids.tolist())
    youngest = found
    for _ in range(GENERATIONS):
        youngest = {parent.get(pid, 0) for pid in youngest} - found
        found |= youngest
    every = np.array(sorted(found), np.int64)
    return every << 32 | every


def _of_threads(table: pa.Table, keys: I64) -> pa.Table:
    """The rows of these threads, and all calls of devices."""
    if not table.num_rows:
        return table
    mine = pc.is_in(pa.array(_keys(table)), value_set=pa.array(keys)).to_numpy(zero_copy_only=False)
    return table.filter(pa.array(mine | _is_in(table, "kind", ("device",))))


def _with_used_stacks(tables: dict[str, pa.Table]) -> dict[str, pa.Table]:
    """The tables without stacks that no row has, and without frames that no stack has."""
    having = (
        name for name in (*_ROW_TABLES, "span", "traced") if "stack_id" in tables[name].column_names
    )
    ids = [chunk for name in having for chunk in tables[name].column("stack_id").chunks]
    stack, frame = tables["stack"], tables["frame"]
    if ids:
        used = pc.unique(pa.chunked_array(ids))
        stack = stack.filter(pc.is_in(stack.column("stack_id"), value_set=used))
    in_stacks = [chunk.flatten() for chunk in stack.column("frame_ids").chunks]
    if in_stacks:
        known = pc.unique(pa.chunked_array(in_stacks))
        frame = frame.filter(pc.is_in(frame.column("frame_id"), value_set=known))
    return {**tables, "stack": stack, "frame": frame}


def _is_in(table: pa.Table, column: str, texts: tuple[str, ...]) -> Mask:
    """Which rows have one of these texts in a dictionary-encoded column."""
    values = table.column(column).combine_chunks()
    wanted = np.array([text in texts for text in values.dictionary.to_pylist()] + [False])
    found: Mask = wanted[values.indices.to_numpy()]
    return found


def _most(measure: F64) -> I64:
    """Where the greatest values above 0 are, `MOST` at most."""
    ranked: I64 = np.argsort(-measure, kind="stable")[:MOST]
    found: I64 = ranked[measure[ranked] > 0]
    return found
