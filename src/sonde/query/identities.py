# SPDX-License-Identifier: Apache-2.0
"""Numbers the processes and threads of a capture, and the rows that are theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sonde.query.grouping import grouped

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

_LOW_HALF = 0xFFFFFFFF

OF_THREADS = ("sample", "activity", "device_run")
"""Tables whose rows are of threads."""
OF_PROCESSES = (*OF_THREADS, "usage")
"""Tables whose rows are of processes."""


@dataclass(frozen=True, slots=True)
class Identities:
    """The processes are those of the table `process` in its order, then those that have rows, but
    none in that table, by pid and start. The threads are those that have rows, and those of the
    table `thread` whose process is known, by pid, start and tid."""

    unnamed: pa.Table
    """pid and start_ns of the processes that are not in the table `process`."""
    threads: pa.Table
    """process, pid, start_ns and tid of each thread, and its `row` in the table `thread`: -1 none.
    """
    process_of: dict[str, I32]
    """By table of `OF_PROCESSES`: the number of the process of each row; shape (rows,)."""
    thread_of: dict[str, I32]
    """By table of `OF_THREADS`: the number of the thread of each row; shape (rows,)."""


def identities(tables: dict[str, pa.Table]) -> Identities:
    """Number what a capture's tables hold. A process is (pid, start), because pids are used again.
    """
    # The table of threads is the last, because it makes no process known.
    order = ("process", *OF_PROCESSES, "thread")
    ends = np.cumsum([0, *(tables[name].num_rows for name in order)]).tolist()
    part = {name: slice(*ends[at : at + 2]) for at, name in enumerate(order)}
    starts, start = grouped(_joined([tables[name] for name in order], "start_ns"))
    keys, process = grouped(start << 32 | _joined([tables[name] for name in order], "pid"))
    named = tables["process"].num_rows
    known = int(process[: part["thread"].start].max(initial=-1)) + 1
    pid, start_ns = keys[:known] & _LOW_HALF, starts.view(np.uint64)[keys[:known] >> 32]
    others = named + np.lexsort((start_ns[named:], pid[named:]))
    unnamed = pa.table({"pid": pid[others].astype(np.uint32), "start_ns": start_ns[others]})
    by_number = np.concatenate((np.arange(named), others))
    pid, start_ns = pid[by_number], start_ns[by_number]
    process = _numbers(by_number, len(keys))[process]

    order = (*OF_THREADS, "thread")
    tid = _joined([tables[name] for name in order], "tid")
    owner = np.concatenate([process[part[name]] for name in order]).astype(np.int64)
    keys, thread = grouped(owner << 32 | tid)
    owner, tid = keys >> 32, keys & _LOW_HALF
    rank = _numbers(np.lexsort((start_ns, pid)), known).astype(np.int64)
    with_process = np.flatnonzero(owner >= 0)
    by_key = np.argsort(rank[owner[with_process]] << 32 | tid[with_process])
    by_number = with_process[by_key]
    thread = _numbers(by_number, len(keys))[thread]
    of_process, tid = owner[by_number], tid[by_number]
    row = np.full(len(by_number), -1, np.int32)
    in_table = thread[len(thread) - tables["thread"].num_rows :]
    row[in_table[in_table >= 0]] = np.flatnonzero(in_table >= 0)
    threads = {
        "process": of_process.astype(np.int32),
        "pid": pid[of_process].astype(np.uint32),
        "start_ns": start_ns[of_process],
        "tid": tid.astype(np.uint32),
        "row": row,
    }
    shift = part["sample"].start
    return Identities(
        unnamed,
        pa.table(threads),
        {name: process[part[name]] for name in OF_PROCESSES},
        {name: thread[part[name].start - shift : part[name].stop - shift] for name in OF_THREADS},
    )


def _joined(tables: Sequence[pa.Table], column: str) -> I64:
    """The values of a column of all tables; those beyond 2^63 as negative ones."""
    return np.concatenate([table.column(column).to_numpy().astype(np.int64) for table in tables])


def _numbers(keys: I64, count: int) -> I32:
    """The position of each of the keys 0, 1, ..., `count` - 1 among some of them; -1 of others."""
    numbers = np.full(count, -1, np.int32)
    numbers[keys] = np.arange(len(keys), dtype=np.int32)
    return numbers
