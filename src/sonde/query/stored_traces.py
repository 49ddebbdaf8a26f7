# SPDX-License-Identifier: Apache-2.0
"""Traced requests (the table `traced`): which there were, and what each spent its time on."""

from __future__ import annotations

import pyarrow as pa

from sonde.query.bounded import bounded
from sonde.query.selection import Selection, StoreTables
from sonde.query.stored import MAX_ROWS


def traces(session: StoreTables, selection: Selection, limit: int = 50) -> pa.Table:
    """Traces of requests, the longest observed time first, at most `limit`: trace_id, nodes and
    processes (how many), first_ns, last_ns (of its samples), n (samples and waits), cpu_ns,
    blocked_ns, runqueue_ns. Threads that worked at the same time add up."""
    clause, parameters = selection.sql(kind=False)
    where = clause + (" AND trace_id = ?" if selection.trace else "")
    return bounded(
        session,
        "WITH part AS ("
        " SELECT trace_id, node, pid, start_ns, min(time_ns) AS first_ns, max(time_ns) AS last_ns,"
        " sum(weight_count) AS n, sum(weight_ns) AS ns,"
        " sum(CASE WHEN kind = 'cpu' THEN weight_ns ELSE 0 END) AS cpu_ns,"
        " sum(CASE WHEN kind = 'blocked' THEN weight_ns ELSE 0 END) AS blocked_ns,"
        " sum(CASE WHEN kind = 'runqueue' THEN weight_ns ELSE 0 END) AS runqueue_ns"
        f" FROM traced {where} GROUP BY trace_id, node, pid, start_ns) "
        "SELECT trace_id, count(DISTINCT node) AS nodes, count(*) AS processes,"
        " min(first_ns) AS first_ns, max(last_ns) AS last_ns, sum(n) AS n,"
        " sum(cpu_ns) AS cpu_ns, sum(blocked_ns) AS blocked_ns, sum(runqueue_ns) AS runqueue_ns"
        " FROM part GROUP BY trace_id ORDER BY sum(ns) DESC, trace_id",
        [*parameters, *([selection.trace] if selection.trace else [])],
        MAX_ROWS,
        limit,
    )
