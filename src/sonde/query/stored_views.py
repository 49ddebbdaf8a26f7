# SPDX-License-Identifier: Apache-2.0
"""Questions over a store that the web page draws: bounded in rows for any selection."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa

from sonde.query.bounded import bounded, count_beyond
from sonde.query.selection import SUMS_VIEW, Selection, StoreTables
from sonde.query.stored import MAX_POINTS, MAX_ROWS, one_of

MAX_LANES = 500
"""Lanes of a timeline: threads by kind of wait, and streams of devices."""
MAX_SPANS = 20_000
"""Intervals of a timeline that are separate boxes."""
EVERY_KIND = "cpu"
"""The default kind of selections. No interval of a timeline is of it: there it means all kinds."""


_LANE = "node, lane_kind, pid, start_ns, tid, device, stream"
_INTERVALS = (
    "SELECT node, kind AS lane_kind, pid, start_ns, tid, 0 AS device, 0 AS stream, name,"
    " greatest(start_time_ns, ?) AS a, least(end_time_ns, ?) AS b FROM span {spans}"
    " UNION ALL "
    "SELECT node, 'device_run' AS lane_kind, 0 AS pid, 0 AS start_ns, 0 AS tid, device, stream,"
    " coalesce(nullif(name, ''), kind) AS name,"
    " greatest(start_time_ns, ?) AS a, least(end_time_ns, ?) AS b FROM device_run {runs}"
)


def timeline(
    session: StoreTables, selection: Selection, points: int = MAX_POINTS, lanes: int = 100
) -> tuple[pa.Table, pa.Table]:
    """(lanes, boxes) of the selected time, which is divided into `points` equal steps.

    Lanes, busiest first: lane, node, lane_kind (kind of span, or device_run), pid, tid, comm,
    device, stream, ns. Boxes: lane, start and end (ns after the start of the selection), name, n,
    ns. The `MAX_SPANS` longest intervals that last at least a step are separate boxes (n 1).
    Shorter ones of a lane and step are one box: with the name of the longest, their number n and
    their sum ns.
    """
    start, end = selection.start_ns, selection.end_ns
    points = max(1, min(points, MAX_POINTS))
    step = max(1, -(-(end - start) // points))
    every = replace(selection, start_ns=-(1 << 62))  # an interval may have begun before
    clauses = []
    parameters: list[Any] = []
    for kind, is_run in ((selection.kind, False), (selection.kind, True)):
        fits = kind == EVERY_KIND or (kind == "kernel") == is_run
        all_kinds = kind == EVERY_KIND or is_run
        clause, own_parameters = every.sql("start_time_ns", kind=not all_kinds)
        clauses.append(f"{clause} AND end_time_ns > ?{'' if fits else ' AND false'}")
        parameters += [start, end, *own_parameters, start]
    intervals = _INTERVALS.format(spans=clauses[0], runs=clauses[1])
    common = (
        f"WITH interval AS ({intervals}), lane AS (SELECT {_LANE}, sum(b - a) AS ns"
        f" FROM interval GROUP BY ALL ORDER BY ns DESC, {_LANE}"
        f" LIMIT {max(1, min(int(lanes), MAX_LANES))}), numbered AS ("
        f"SELECT CAST(row_number() OVER (ORDER BY ns DESC, {_LANE}) - 1 AS INTEGER) AS lane, *"
        " FROM lane) "
    )
    listed = session.arrow(
        common + "SELECT l.lane, l.node, l.lane_kind, l.pid, l.tid, l.device, l.stream,"
        " CAST(l.ns AS BIGINT) AS ns, coalesce(nullif(max(p.command), ''),"
        " arg_max(t.comm, t.time_ns), '') AS comm FROM numbered l"
        " LEFT JOIN thread t ON t.node = l.node AND t.pid = l.pid AND t.tid = l.tid"
        " AND t.start_ns = l.start_ns"
        " LEFT JOIN (SELECT node, pid, start_ns, max(command) AS command FROM process GROUP BY ALL)"
        " p ON p.node = l.node AND p.pid = l.pid AND p.pid = l.tid AND p.start_ns = l.start_ns"
        " GROUP BY ALL ORDER BY l.lane",
        parameters,
    )
    boxes = session.arrow(
        common + f", box AS (SELECT lane, a - {start} AS a, b - {start} AS b, name,"
        f" (a - {start}) // {step} AS slot FROM interval JOIN numbered"
        " USING (node, lane_kind, pid, start_ns, tid, device, stream)), "
        'long AS (SELECT lane, a AS start, b AS "end", name, CAST(1 AS BIGINT) AS n, b - a AS ns'
        f" FROM box WHERE b - a >= {step} ORDER BY b - a DESC, lane, a LIMIT {MAX_SPANS}), "
        f'short AS (SELECT lane, slot * {step} AS start, (slot + 1) * {step} AS "end",'
        " max_by(name, b - a) AS name, count(*) AS n, CAST(sum(b - a) AS BIGINT) AS ns"
        f" FROM box WHERE b - a < {step} GROUP BY lane, slot) "
        "SELECT * FROM (SELECT * FROM long UNION ALL SELECT * FROM short)"
        f' ORDER BY lane, start, "end" LIMIT {MAX_SPANS + MAX_LANES * MAX_POINTS}',
        parameters,
    )
    if lanes > MAX_LANES and listed.num_rows >= MAX_LANES:
        each = f"SELECT DISTINCT {_LANE} FROM ({intervals}) AS interval"
        count_beyond(session, each, parameters, MAX_LANES, lanes)
    if boxes.num_rows >= MAX_SPANS:
        long = f"SELECT 1 AS one FROM interval JOIN numbered USING ({_LANE}) WHERE b - a >= {step}"
        count_beyond(session, common + long, parameters, MAX_SPANS)
    return listed, boxes


def overview(session: StoreTables, selection: Selection) -> pa.Table:
    """Nodes and what they did: node, chunks, first_ns, last_ns, seconds, and by kind of sample
    cpu_ns, blocked_ns, runqueue_ns, device_ns (host time in device calls), kernel_ns (on devices);
    lost (the sum of all losses that its agent counted)."""
    chunk, first = selection.sql("start_ns", kind=False, process=False)
    rows, second = selection.sql(kind=False, process=False)
    sums = ", ".join(
        f"coalesce(sum(weight_ns) FILTER (kind = '{kind}'), 0) AS {kind}_ns"
        for kind in ("cpu", "blocked", "runqueue", "device", "kernel")
    )
    return bounded(
        session,
        "WITH c AS (SELECT node, count(*) AS chunks, min(start_ns) AS first_ns,"
        f" max(end_ns) AS last_ns, sum(end_ns - start_ns) / 1e9 AS seconds FROM chunk {chunk}"
        f" GROUP BY node), s AS (SELECT node, {sums} FROM {SUMS_VIEW} {rows} GROUP BY node), "
        f"l AS (SELECT node, sum(value) AS lost FROM event {rows} AND kind = 'loss' GROUP BY node)"
        " SELECT c.*, s.* EXCLUDE (node), coalesce(l.lost, 0) AS lost FROM c"
        " LEFT JOIN s USING (node) LEFT JOIN l USING (node)"
        " ORDER BY node",
        [*first, *second, *second],
        MAX_ROWS,
    )


def processes(session: StoreTables, selection: Selection, limit: int = 50) -> pa.Table:
    """Processes by weight, at most `limit`: node, pid, start_ns, n, ns, bytes, and their owners."""
    clause, parameters = selection.sql()
    names = ("comm", "exe", "command", "user", "pod", "namespace", "job", "container", "unit")
    who = ", ".join(f"{one_of(name)} AS {name}" for name in names)
    found = session.arrow(
        "WITH w AS (SELECT node, pid, start_ns, sum(weight_count) AS n, sum(weight_ns) AS ns,"
        f" sum(weight_bytes) AS bytes FROM {selection.sums} {clause} GROUP BY ALL"
        f" ORDER BY ns DESC, bytes DESC, node, pid LIMIT {min(int(limit), MAX_ROWS)}), "
        f"p AS (SELECT node, pid, start_ns, {who} FROM process"
        " WHERE (node, pid, start_ns) IN (SELECT node, pid, start_ns FROM w) GROUP BY ALL) "
        "SELECT w.*, p.* EXCLUDE (node, pid, start_ns) FROM w"
        " LEFT JOIN p USING (node, pid, start_ns) ORDER BY ns DESC, bytes DESC, node, pid",
        parameters,
    )
    if limit > MAX_ROWS and found.num_rows >= MAX_ROWS:
        each = f"SELECT DISTINCT node, pid, start_ns FROM {selection.sums} {clause}"
        count_beyond(session, each, parameters, MAX_ROWS, limit)
    return found


def names(session: StoreTables, selection: Selection, limit: int = 50) -> pa.Table:
    """Kernels, reasons of waits or functions of calls, by weight, at most `limit`: name, n, ns,
    bytes."""
    clause, parameters = selection.sql()
    return bounded(
        session,
        "SELECT name, sum(weight_count) AS n, sum(weight_ns) AS ns, sum(weight_bytes) AS bytes"
        f" FROM {selection.sums} {clause} GROUP BY name ORDER BY ns DESC, bytes DESC, name",
        parameters,
        MAX_ROWS,
        limit,
    )


def metrics(session: StoreTables, selection: Selection) -> pa.Table:
    """Metrics that were recorded: series, nodes (how many have it), rows."""
    clause, parameters = selection.sql(kind=False, process=False)
    return bounded(
        session,
        f"SELECT series, count(DISTINCT node) AS nodes, count(*) AS rows FROM metric {clause}"
        " GROUP BY series ORDER BY series",
        parameters,
        MAX_ROWS,
    )
