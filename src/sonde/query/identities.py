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

OF_THREADS = ("sample", "traced", "activity", "device_run")
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
    """Number what a capture's tables hold. A process is (pid, start): pids are used again."""
    # The table of threads is the last, because it makes no process known.
    order = ("process", *OF_PROCESSES, "thread")
    ends = np.cumsum([0, *(tables[name].num_rows for name in order)]).tolist()
    part = {name: slice(*ends[at : at + 2]) for at, name in enumerate(order)}
    starts, start = grouped(_joined([tables[name] for name in order], "start_ns"))
    keys, of_row = grouped(start << 32 | _joined([tables[name] for name in order], "pid"))
    named = tables["process"].num_rows
    known = int(of_row[: part["thread"].start].max(initial=-1)) + 1
    pid, start_ns = keys[:known] & _LOW_HALF, starts.view(np.uint64)[keys[:known] >> 32]
    others = named + np.lexsort((start_ns[named:], pid[named:]))
    by_number = np.concatenate((np.arange(named), others))
    processes = pa.table({"pid": pid[by_number].astype(np.uint32), "start_ns": start_ns[by_number]})
    process = _numbers(by_number, len(keys))[of_row]
    process_of = {name: process[part[name]] for name in (*OF_PROCESSES, "thread")}
    threads, thread_of = _threads(tables, processes, process_of)
    del process_of["thread"]
    return Identities(processes.slice(named), threads, process_of, thread_of)


def _threads(
    tables: dict[str, pa.Table], processes: pa.Table, process_of: dict[str, I32]
) -> tuple[pa.Table, dict[str, I32]]:
    """`Identities.threads` and `thread_of`. `processes`: pid and start_ns of each; `process_of`:
    that of each row, -1 none."""
    order = (*OF_THREADS, "thread")
    owner = np.concatenate([process_of[name] for name in order]).astype(np.int64)
    keys, of_row = grouped(owner << 32 | _joined([tables[name] for name in order], "tid"))
    owner, tid = keys >> 32, keys & _LOW_HALF
    pid, start_ns = (processes.column(name).to_numpy() for name in ("pid", "start_ns"))
    rank = _numbers(np.lexsort((start_ns, pid)), len(pid)).astype(np.int64)
    found = np.flatnonzero(owner >= 0)
    by_number = found[np.argsort(rank[owner[found]] << 32 | tid[found])]
    owner, tid = owner[by_number], tid[by_number]
    thread = _numbers(by_number, len(keys))[of_row]
    ends = np.cumsum([tables[name].num_rows for name in OF_THREADS]).tolist()
    *of_tables, in_table = np.split(thread, ends)
    row = np.full(len(by_number), -1, np.int32)
    row[in_table[in_table >= 0]] = np.flatnonzero(in_table >= 0)
    columns = {
        "process": owner.astype(np.int32),
        "pid": pid[owner],
        "start_ns": start_ns[owner],
        "tid": tid.astype(np.uint32),
        "row": row,
    }
    return pa.table(columns), dict(zip(OF_THREADS, of_tables, strict=True))


def _joined(tables: Sequence[pa.Table], column: str) -> I64:
    """The values of a column of all tables; those beyond 2^63 as negative ones."""
    return np.concatenate([table.column(column).to_numpy().astype(np.int64) for table in tables])


def _numbers(keys: I64, count: int) -> I32:
    """The position of each of the keys 0, 1, ..., `count` - 1 among some of them; -1 of others."""
    numbers = np.full(count, -1, np.int32)
    numbers[keys] = np.arange(len(keys), dtype=np.int32)
    return numbers
