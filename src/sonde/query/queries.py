# SPDX-License-Identifier: Apache-2.0
"""Typed queries over a capture.

Profiles and functions come from the table `sample`: estimates with stacks. Waits and device calls
come from `activity`: totals, exact but where a thread has many short waits, of which some, drawn by
chance, count for all. A sampled stack adds only a hint to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from sonde.limits import MAX_NAME_CHARS
from sonde.model.answers import (
    DeviceCalls,
    Loss,
    MetricSeries,
    MetricUse,
    Notice,
    StackEnd,
    Usage,
)
from sonde.model.calls import STATUS_UNKNOWN
from sonde.model.profile import Profile, ProfileKind
from sonde.query.columns import int64_column
from sonde.query.function_locations import frames_of_functions
from sonde.query.function_rows import FunctionRows
from sonde.query.function_weights import function_weights
from sonde.query.process_rows import ProcessRows
from sonde.query.row_sequence import RowSequence
from sonde.query.schema import USAGE_COUNTERS
from sonde.query.session import Session
from sonde.query.single_waits import SingleWaits
from sonde.query.validation import MAX_NUMBER
from sonde.query.wait_rows import IDLE_SHARE, WaitRows

LOSS_TEXT = {
    "stack_map_full": "stacks that did not fit into the map; their weight is kept, their frames"
    " are not",
    "count_map_full": "rows that did not fit into the map; their weight is lost",
    "by_process": "events for which the map had no free row; counted by process, without their"
    " stack",
    "together": "events for which the map had no free row even by process, or of short processes"
    " beyond the share of their user or container; counted in one row for all",
    "task_storage": "events of threads that could not be followed",
    "unseen_switch": "waits whose end the kernel did not show, and how long they were is not known",
    "socket_storage": "times that a TCP connection could not be followed, because there were too"
    " many, or too many of one user or container",
    "ring_full": "single waits or calls not kept one by one; totals hold them",
    "user_stack": "user stacks that could not be read; kernel frames only",
    "nested_call": "calls that began in one that never returned",
    "forgotten": "stacks dropped before all their waits had ended; their weight is kept",
    "events": "events of new processes, names and mappings that were lost, or were beyond the share"
    " of their user or container; /proc was read instead",
    "lost_ring": "device runs lost because the ring buffer of their process was full",
    "yielded_ms": "milliseconds in which another profiler traced a process's device calls, so that"
    " Sonde did not time them",
    "looks_cut": "scans for calls into device libraries that ended before all data of a process was"
    " read; the next scans continue, and device runs called through the rest are missed until then",
    "slots_unread": "times that a process's calls into device libraries could not be looked for, as"
    " its memory could not be read or that took too long; device runs may be missed",
    "slots_late": "times that a process's calls into device libraries were looked for more than 2 s"
    " late, as those of other processes took so long; device runs may be missed",
    "attaches_failed": "attaches that failed, or were not tried because earlier ones to processes"
    " of the same user or container hang in the kernel; notices name the processes",
    "processes_unread": "times that not all mappings of a process were looked through, because they"
    " are very many; what is mapped there was not seen",
    "lost_pool": "sampled device runs that were dropped because too many came at once, their"
    " context was new or one of too many, or nothing proved their time; the rest weigh more",
    "lost_order": "sampled device runs that could not be timed; the rest weigh more",
    "lost_names": "names of device runs that did not fit into the table",
    "records_wrong": "records of a profiled process with impossible values",
    "losses_wrong": "times that a profiled process counted more losses than it can have had; those"
    " beyond are left out",
    "records_overwritten": "records of a profiled process that were overwritten before they were"
    " read",
    "walks_skipped": "scans of all threads or open files that were skipped, as no file descriptor"
    " or memory was left, or given up after a second; what they would have read came with the next",
    "targets_full": "children of watched processes that could not be watched",
    "requests": "requests to block devices that could not be followed",
    "names_put_off": "code locations without a name, because their user or container had used up"
    " the time for names; file and offset are kept",
    "stacks_dropped": "stacks of device runs that were dropped before their runs were read, as"
    " those of one process, or of all, took too much memory",
    "too_large": "stacks that were not kept: those of one user or container took too much memory",
    "texts_cut": "frames whose names were cut, because those of all frames of some seconds were too"
    " long together; names of other users and containers stay whole",
    "without_offset": "addresses of code in no file that became one frame for their whole mapping,"
    " because their user or container had too many new ones",
    "files_put_off": "newly mapped files that were not opened in advance, because their user or"
    " container had used up the time for it; code of processes that ended at once has no names",
    "delayed": "times that the files of a process were not looked at, because its user or container"
    " had used up the time for it; stacks were walked by frame pointers until then",
    "caches_emptied": "times that what was known of a process (names, stacks, threads) was dropped,"
    " as the processes of its user or container took the most memory of all; it was read again, and"
    " stacks whose device runs had not come yet are counted as dropped",
    "put_off": "times that a process was not read with many others, as some of them, of the same"
    " user or container or of several, answered too late or not at all",
    "tables_put_off": "times that the unwind table of a file had to wait, because too many of its"
    " user's or container's waited, or it took too long on a busy machine; its code was walked by"
    " frame pointers until then",
    "too_many_files": "times that a process had more files with code than are looked at; the rest"
    " was walked by frame pointers",
    "mappings": "mappings that could not be followed; when they are unmapped is not seen",
    "share": "launches beyond one process's or user's share of the table of stacks; counted without"
    " a stack",
    "traced": "traced requests, or samples and waits of them, beyond the share of their user or"
    " container",
    "several_requests": "traced requests of a thread that had others to answer (an event loop)",
    "over_budget": "device calls left out because their user or container called the function so"
    " often that its probe cost too much",
    "libraries_refused": "libraries of drivers that were not loaded, because others than root could"
    " change them; their functions are found by symbols alone",
    "files_over_share": "times that a file got no probes, because its user or container had as many"
    " as one may have; its device calls are not seen",
    "peers_cut": "looks for the other end of a socket that ended before all sockets or descriptors"
    " were read, or as a wait was for more addresses than a few; who is there may not be known",
    "probes_put_off": "files whose probes were delayed because a process kept its memory map"
    " locked, or mapped the file too often; calls through them until then were not recorded",
    "no_room": "times that a kernel map was full, so that a process had no unwind tables; its"
    " stacks"
    " were unwound by frame pointers meanwhile",
    "refused": "times that a process could not be prepared for stack unwinding, with the error"
    " named;"
    " its stacks were unwound by frame pointers meanwhile",
    "hung": "times that a process, or a file of it, was left alone for a while, because reading it"
    " did not end in time (it holds its memory map locked, or its disk does not answer) or too many"
    " of its user had not; its rows are kept, but names of its code may be missing",
    "files_unread": "times that the open files of a process were not, or not all, looked at for TCP"
    " connections, because those of its user or container are very many; the next look goes on",
    "folders_hung": "times that the folder of a control group was left alone for a while, because"
    " it did not answer in time (somebody keeps it locked) or too many of its user or container had"
    " not; groups below it have no names, and no metrics",
    "seconds_stuck": "seconds in which nothing was read from the kernel, as Sonde got no CPU or an"
    " answer took long; if the kernel's tables were full meanwhile, other losses count that",
    "intervals_failed": "times that a part of Sonde failed, so that its rows of a second are"
    " missing; the log names the error",
    "queue_full": "processes that the library was not brought into, because too many waited for it;"
    " their device time is missing",
    "files_left_out": "files that were not searched for calls into device libraries, because too"
    " many waited for it; device calls through them are missing",
    "points": "values of metrics that were not taken over, because their reader was slow; a chart"
    " has gaps there",
    "chunks_dropped": "some seconds of rows each that the server never got, because it was away for"
    " longer than the spool has room",
    "chunks_refused": "some seconds of rows each that the server refused; its log has the reason",
    "notes_full": "processes and control groups whose owner was not recorded; /proc was read"
    " instead",
}
"""What a loss counts, for people, by the last part of its name (after the last dot), which
therefore has one meaning for all collectors. A map is one of the kernel's (BPF)."""


_OF_DIAGNOSE = (
    "beyond what `sonde diagnose` looks at in its time and memory; a slowdown there may be "
    "reported late, without its cause, or not at all"
)


def loss_text(name: str) -> str:
    """What a loss counts and what it means for the result; '' not known."""
    if name.startswith("diagnose."):
        return _OF_DIAGNOSE
    return LOSS_TEXT.get(name.rpartition(".")[2], "")


@dataclass(frozen=True, slots=True)
class Where:
    """Which rows a query reads; an empty field filters nothing.

    `names` are reasons of waits or functions of device calls. Times are CLOCK_MONOTONIC in ns, the
    end exclusive; they select rows by the start of the interval that a row sums over.
    """

    pids: Sequence[int] = ()
    tids: Sequence[int] = ()
    names: Sequence[str] = ()
    start_ns: int | None = None
    end_ns: int | None = None

    def sql(self, *conditions: str) -> tuple[str, list[Any]]:
        """(WHERE clause, its parameters); the clause also requires `conditions`."""
        required = list(conditions)
        parameters: list[Any] = []
        allowed: Iterable[tuple[str, Sequence[Any]]] = (
            ("pid", self.pids),
            ("tid", self.tids),
            ("name", self.names),
        )
        for column, values in allowed:
            if values:
                required.append(f"{column} IN ({', '.join('?' * len(values))})")
                parameters += values
        if self.start_ns is not None:
            required.append("time_ns >= ?")
            parameters.append(self.start_ns)
        if self.end_ns is not None:
            required.append("time_ns < ?")
            parameters.append(self.end_ns)
        return (f"WHERE {' AND '.join(required)}" if required else ""), parameters


EVERYTHING = Where()


def profile(session: Session, kind: ProfileKind, where: Where = EVERYTHING) -> Profile:
    """Weighted stacks of one kind, heaviest first.

    Held memory is what a stack mapped less what was unmapped of that, where at least a byte
    remains. Mappings without access rights only reserve addresses and do not count. A program may
    claim any number of bytes: sums end at MAX_NUMBER.
    """
    kinds = [kind.column_value]
    clause, parameters = where.sql("kind = ?")
    if kind == ProfileKind.MEMORY_HELD:
        kinds = []
        clause, parameters = where.sql("kind IN ('mapped', 'unmapped')", "name <> 'reserved'")
    sign = "CASE kind WHEN 'unmapped' THEN -1 ELSE 1 END"
    rows = session.arrow(
        "SELECT thread, stack, name,"
        f" CAST(round(sum({sign} * weight_count)) AS BIGINT) AS n,"
        " CAST(round(sum(weight_ns)) AS BIGINT) AS ns,"
        f" CAST(least(round(sum({sign} * weight_bytes)), {MAX_NUMBER}) AS BIGINT) AS bytes "
        f"FROM sample {clause} GROUP BY thread, stack, name"
        f"{f' HAVING sum({sign} * weight_bytes) >= 1' if kind == ProfileKind.MEMORY_HELD else ''}"
        f" ORDER BY {'bytes' if kind.is_memory else 'ns'} DESC, thread, stack, name",
        [*kinds, *parameters],
    )
    names = rows.column("name").combine_chunks().dictionary_encode()

    def column(name: str) -> Sequence[int]:
        return int64_column(rows, name).data  # by items that are of Python, in a quarter of memory

    return Profile(
        kind=kind,
        stacks=session.stacks,
        threads=session.threads,
        names=names.dictionary.to_pylist(),
        row_thread=column("thread"),
        row_stack=column("stack"),
        row_name=names.indices.to_numpy().data,
        row_events=column("n"),
        row_ns=column("ns"),
        row_bytes=column("bytes"),
    )


def top_functions(
    session: Session, kind: ProfileKind, where: Where = EVERYTHING, limit: int = 0
) -> FunctionRows:
    """Functions by self time, then by total time; `limit` 0 returns all."""
    clause, parameters = where.sql("kind = ?")
    weight = session.arrow(
        "SELECT stack, sum(weight_count) AS n, sum(weight_ns) AS ns, sum(weight_bytes) AS b"
        f" FROM sample {clause} GROUP BY stack ORDER BY stack",
        [kind.column_value, *parameters],
    )
    stacks = np.asarray(weight.column("stack").to_numpy(), np.int64)
    weights = [weight.column(name).to_numpy() for name in ("n", "ns", "b")]
    self_sums, total_sums = function_weights(session, stacks, weights)
    seen = np.flatnonzero(total_sums[3])  # in any stack at all
    order = np.lexsort((seen, -total_sums[1][seen], -self_sums[1][seen]))
    order = seen[order][: limit or None]
    sums = [column[order] for column in (*self_sums[:3], *total_sums[:3])]
    weight_of_kind = weights[2 if kind.is_memory else 1]
    locations = frames_of_functions(session, order, stacks, weight_of_kind)
    return FunctionRows(session, order, locations, sums)


def processes(session: Session, where: Where = EVERYTHING) -> ProcessRows:
    """What each process did, sorted by time on a CPU, then in device calls, then blocked."""
    clause, parameters = where.sql()
    rows = session.arrow(
        "WITH every AS ("
        " SELECT process, thread, kind, weight_count AS n, weight_ns AS ns"
        f" FROM (SELECT * FROM sample {clause}) s WHERE kind = 'cpu' UNION ALL"
        ' SELECT process, thread, kind, "count" AS n, ns'
        f" FROM (SELECT * FROM activity {clause}) a) "
        "SELECT process, count(DISTINCT thread) AS threads,"
        " sum(CASE WHEN kind = 'cpu' THEN n ELSE 0 END) AS samples,"
        " sum(CASE WHEN kind = 'cpu' THEN ns ELSE 0 END) AS cpu_ns,"
        " sum(CASE WHEN kind = 'blocked' THEN ns ELSE 0 END) AS blocked_ns,"
        " sum(CASE WHEN kind = 'runqueue' THEN ns ELSE 0 END) AS runqueue_ns,"
        " sum(CASE WHEN kind = 'device' THEN n ELSE 0 END) AS device_calls,"
        " sum(CASE WHEN kind = 'device' THEN ns ELSE 0 END) AS device_ns "
        "FROM every GROUP BY process ORDER BY cpu_ns DESC, device_ns DESC, blocked_ns DESC, 1",
        [*parameters, *parameters],
    )
    return ProcessRows(session, rows)


def usage(session: Session, where: Where = EVERYTHING) -> RowSequence[Usage]:
    """Resource usage of each process by the kernel's counters, most CPU time first."""
    # Rows are per process: filters of threads or names do not apply.
    clause, parameters = replace(where, tids=(), names=()).sql()
    sums = ", ".join(f"CAST(sum({name}) AS BIGINT) AS {name}" for name in USAGE_COUNTERS)
    rows = session.arrow(
        f"SELECT process, {sums} FROM usage {clause} GROUP BY process ORDER BY 2 DESC, 1",
        parameters,
    )
    columns = [int64_column(rows, name) for name in rows.column_names]
    return RowSequence(lambda number, *sums: Usage(session.processes[number], *sums), columns)


LEAST_WOKEN = 0.1
"""A thread that ended a smaller part of another one's waits is not named as its waker."""


def waits(session: Session, where: Where = EVERYTHING) -> WaitRows:
    """Waits of each thread by reason, the longest total first."""
    session.index_user_code()
    clause, parameters = where.sql("kind IN ('blocked', 'runqueue')")
    rows = session.arrow(
        "WITH part AS ("
        ' SELECT thread, kind, name, op, waker_tid, sum("count") AS n, sum(ns) AS ns,'
        " max(max_ns) AS longest"
        f" FROM activity {clause} GROUP BY thread, kind, name, op, waker_tid), "
        "total AS (SELECT thread, kind, name, CAST(sum(n) AS BIGINT) AS n,"
        " CAST(sum(ns) AS BIGINT) AS ns, CAST(max(longest) AS BIGINT) AS max_ns,"
        " max_by(op, ns) AS op,"
        # Timers end many short waits for the interpreter lock; who ends the others is the answer.
        f" CASE WHEN max(ns) FILTER (waker_tid > 0) >= {LEAST_WOKEN} * sum(ns)"
        " THEN max_by(waker_tid, ns) FILTER (waker_tid > 0) ELSE 0 END AS waker_tid"
        " FROM part GROUP BY thread, kind, name), "
        # A stack in the code in which most of a thread's waiting for a reason was sampled: one
        # function may be seen in many stacks.
        "stack_part AS ("
        " SELECT thread, kind, name, stack, sum(weight_ns) AS ns"
        f" FROM sample {clause} GROUP BY thread, kind, name, stack), "
        "code_part AS ("
        " SELECT p.thread, p.kind, p.name, u.code, max_by(p.stack, p.ns) AS stack, sum(p.ns) AS ns"
        " FROM stack_part p JOIN user_code u ON p.stack = u.stack"
        " GROUP BY p.thread, p.kind, p.name, u.code), "
        "hint AS (SELECT thread, kind, name, max_by(stack, ns) AS stack"
        " FROM code_part GROUP BY thread, kind, name) "
        "SELECT t.*, coalesce(h.stack, -1) AS stack FROM total t LEFT JOIN hint h"
        " ON t.thread = h.thread AND t.kind = h.kind AND t.name = h.name "
        "ORDER BY t.ns DESC, t.thread, t.kind, t.name",
        [*parameters, *parameters],
    )
    return WaitRows(session, rows, partial(single_waits, session, where))


def single_waits(session: Session, where: Where = EVERYTHING) -> SingleWaits:
    """The lengths of the waits that a capture has one by one; of no wait, where the capture was
    read without them. A wait is in the time in which it began."""
    clause, parameters = where.sql()
    rows = session.arrow(
        f"SELECT t.thread, s.kind, s.name, s.ns FROM (SELECT * FROM single_wait {clause}) s"
        " JOIN thread t ON s.pid = t.pid AND s.start_ns = t.start_ns AND s.tid = t.tid",
        parameters,
    )
    return SingleWaits(rows)


def ended_by(
    session: Session, threads: Sequence[int], reason: str, where: Where = EVERYTHING
) -> dict[int, int]:
    """By thread id: for how long these threads waited for a reason until that thread woke them up,
    in ns. `threads`: indices in `Session.threads`."""
    marks = ", ".join("?" * len(threads))
    clause, parameters = where.sql(
        "kind = 'blocked'", "waker_tid > 0", "name = ?", f"thread IN ({marks})"
    )
    rows = session.rows(
        f"SELECT waker_tid, CAST(sum(ns) AS BIGINT) FROM activity {clause} GROUP BY waker_tid",
        [reason, *threads, *parameters],
    )
    return dict(rows)


def idle_threads(session: Session) -> frozenset[int]:
    """Indices of the threads of which one wait lasted (nearly) the whole recording."""
    rows = session.rows(
        "SELECT thread, max(max_ns) FROM activity WHERE kind = 'blocked' GROUP BY thread"
    )
    least_ns = session.info.duration_ns * IDLE_SHARE
    return frozenset(thread for thread, max_ns in rows if least_ns and max_ns >= least_ns)


def device_calls(session: Session, where: Where = EVERYTHING) -> list[DeviceCalls]:
    """Device calls by process and function, the longest total first. A program may ask for any
    number of bytes: sums end at MAX_NUMBER."""
    clause, parameters = where.sql("kind = 'device'")
    rows = session.rows(
        'SELECT process, name, api, op, direction, CAST(sum("count") AS BIGINT),'
        f' CAST(sum(CASE WHEN status IN (0, {STATUS_UNKNOWN}) THEN 0 ELSE "count" END) AS BIGINT),'
        f" CAST(sum(ns) AS BIGINT), CAST(max(max_ns) AS BIGINT),"
        f" CAST(least(sum(bytes), {MAX_NUMBER}) AS BIGINT),"
        f' CAST(sum(CASE WHEN status = {STATUS_UNKNOWN} THEN "count" ELSE 0 END) AS BIGINT) '
        f"FROM activity {clause} GROUP BY process, name, api, op, direction "
        "ORDER BY process, name, api, op, direction",
        parameters,
    )
    grouped: dict[tuple[int, str, str, str], list[tuple[Any, ...]]] = {}
    for process, name, api, op, *rest in rows:
        grouped.setdefault((process, name, api, op), []).append(tuple(rest))
    found = [
        DeviceCalls(
            process=session.processes[process],
            function=name,
            api=api,
            op=op,
            calls=sum(row[1] for row in parts),
            errors=sum(row[2] for row in parts),
            ns=sum(row[3] for row in parts),
            max_ns=max(row[4] for row in parts),
            bytes={row[0]: row[5] for row in parts if row[5]},
            at_entry=sum(row[6] for row in parts),
        )
        for (process, name, api, op), parts in grouped.items()
    ]
    return sorted(found, key=lambda row: -row.ns)


def losses(session: Session) -> list[Loss]:
    """Everything that is missing: what the recorder lost, and what of the file was not read."""
    found = [
        Loss(name, value or 0.0, text or loss_text(name))
        for name, value, text in session.rows(
            "SELECT name, sum(value), max(text) FROM event WHERE kind = 'loss' "
            "GROUP BY name HAVING sum(value) <> 0 ORDER BY 2 DESC, 1"
        )
    ]
    info = session.info
    if info.chunks_damaged:
        text = f"{info.damaged_bytes:,} bytes of the file are damaged and were left out"
        found.append(Loss("chunks damaged", info.chunks_damaged, text))
    if info.chunks_missing:
        found.append(Loss("chunks missing", info.chunks_missing, "they never reached the file"))
    if info.rows_refused:
        text = "with numbers that no recorder writes (NaN, infinite, beyond all time)"
        found.append(Loss("rows refused", info.rows_refused, text))
    if info.names_cut:
        text = f"texts longer than {MAX_NAME_CHARS:,} characters; their beginning is kept"
        found.append(Loss("names cut", info.names_cut, text))
    if info.tail_bytes:
        found.append(Loss("bytes cut", info.tail_bytes, "of an unfinished chunk at the end"))
    return found


def stack_ends(session: Session) -> list[StackEnd]:
    """Why unwinding of user stacks ended, most frequent first; empty in captures before 0.2."""
    return [
        StackEnd(name.partition(".")[0], name.partition(".")[2], int(count), text)
        for name, count, text in session.rows(
            "SELECT name, sum(value), max(text) FROM event WHERE kind = 'stack_end' "
            "GROUP BY name ORDER BY 2 DESC, 1"
        )
    ]


def notices(session: Session) -> list[Notice]:
    """Events of probes and of Sonde itself, most frequent first."""
    rows = session.rows(
        "SELECT e.kind, e.name, e.pid, e.n, e.text, coalesce(p.process, -1) FROM ("
        " SELECT kind, name, pid, start_ns, count(*) AS n, max(text) AS text FROM event"
        " WHERE kind IN ('probe', 'notice') GROUP BY kind, name, pid, start_ns) e"
        " LEFT JOIN process p ON e.pid = p.pid AND e.start_ns = p.start_ns "
        "ORDER BY e.n DESC, e.kind, e.name, e.pid"
    )
    return [
        Notice(kind, name, _who(session, process, pid), count, text)
        for kind, name, pid, count, text, process in rows
    ]


def _who(session: Session, process: int, pid: int) -> str:
    """A process for people; `process` -1: not known."""
    if process >= 0:
        return session.processes[process].label
    return f"pid {pid}" if pid else ""


def metrics(session: Session) -> list[MetricUse]:
    """A summary of every series over the recording."""
    return [
        MetricUse(*row)
        for row in session.rows(
            "SELECT series, labels, count(*), min_by(value, time_ns), max_by(value, time_ns),"
            " min(value), avg(value), max(value) FROM metric GROUP BY series, labels "
            "ORDER BY series, labels"
        )
    ]


def metric_series(
    session: Session, names: Sequence[str], where: Where = EVERYTHING
) -> list[MetricSeries]:
    """All values of the series with these names, by series and labels; filtered by time only."""
    if not names:
        return []
    during = Where(start_ns=where.start_ns, end_ns=where.end_ns)
    clause, parameters = during.sql(f"series IN ({', '.join('?' * len(names))})")
    rows = session.rows(
        f"SELECT series, labels, time_ns, value FROM metric {clause} ORDER BY 1, 2, 3",
        [*names, *parameters],
    )
    return [
        MetricSeries(*key, [row[2] for row in part], [row[3] for row in part])
        for key, group in groupby(rows, key=lambda row: (row[0], row[1]))
        for part in [list(group)]
    ]
