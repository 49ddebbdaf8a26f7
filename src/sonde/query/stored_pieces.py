# SPDX-License-Identifier: Apache-2.0
"""Single runs of ranks on devices: work between two exchanges, and exchanges of two ranks.

An exchange is a kernel by which ranks send data to one another: a collective, or a send or receive.
A piece is the work of a rank between two exchanges of a slot. Only runs of stretches in which every
run was timed are read: between sampled runs there are others.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from sonde.model.collectives import is_collective, is_point_to_point
from sonde.query.selection import Selection, StoreTables
from sonde.query.stored_ranks import TimeBin, kernels_like
from sonde.query.timed_windows import NEARLY_ALL

MAX_PIECES = 50_000
MAX_EXCHANGES = 200_000
"""Rows of an answer. Where there are more, it has one row more: callers must not use it then, as
they would compare a part of one rank's rows with all of another's."""
_ALL_TIMED = f"""kind <> 'sync' AND (weight <= {NEARLY_ALL} OR "window" > 0)"""
"""The condition for runs of stretches in which every run was timed (`timed_windows`)."""


def last_run_ns(session: StoreTables, selection: Selection) -> int:
    """When the last timed run of a selection began, in ns since 1970; 0 where there is none."""
    clause, parameters = selection.sql("start_time_ns", kind=False)
    rows = session.arrow(
        f"SELECT max(start_time_ns) AS last FROM device_run {clause} AND kind <> 'sync'", parameters
    )
    return int(rows.to_pylist()[0]["last"] or 0)


def pieces(session: StoreTables, selection: Selection, slots: Sequence[TimeBin]) -> pa.Table:
    """Work of ranks by piece: node, pid, start_ns, device, slot, piece (number of exchanges before
    it in the slot), ns."""
    clause, parameters = selection.sql("start_time_ns", kind=False)
    chosen = pa.table(
        {
            "slot": pa.array(range(len(slots)), pa.int64()),
            "begin_ns": pa.array([slot.start_ns for slot in slots], pa.int64()),
            "end_ns": pa.array([slot.end_ns for slot in slots], pa.int64()),
        }
    )
    names = kernels_like(session, selection, is_collective)
    return session.arrow(
        "WITH run AS (SELECT s.node, s.pid, s.start_ns, s.device, c.slot, s.start_time_ns,"
        " s.end_time_ns - s.start_time_ns AS ns, s.kind = 'kernel'"
        " AND list_contains(CAST(? AS VARCHAR[]), s.name) AS exchanges"
        f" FROM (SELECT * FROM device_run {clause} AND {_ALL_TIMED}) s JOIN chosen c"
        " ON s.start_time_ns >= c.begin_ns AND s.start_time_ns < c.end_ns), "
        "placed AS (SELECT *, sum(CASE WHEN exchanges THEN 1 ELSE 0 END) OVER"
        " (PARTITION BY node, pid, start_ns, device, slot ORDER BY start_time_ns) AS piece"
        " FROM run) "
        "SELECT node, pid, start_ns, device, slot, CAST(piece AS BIGINT) AS piece, sum(ns) AS ns"
        " FROM placed WHERE NOT exchanges GROUP BY 1, 2, 3, 4, 5, 6"
        f" ORDER BY 1, 2, 3, 4, 5, 6 LIMIT {MAX_PIECES + 1}",
        [names, *parameters],
        chosen,
    )


def exchanges(session: StoreTables, selection: Selection) -> pa.Table:
    """Kernels that send to, or receive from, one other rank: node, pid, start_ns, device, begin_ns,
    end_ns. Only those whose start on the device is known, as CUPTI reports it."""
    clause, parameters = selection.sql("start_time_ns", kind=False)
    names = kernels_like(session, selection, is_point_to_point)
    return session.arrow(
        "SELECT node, pid, start_ns, device, start_time_ns AS begin_ns, end_time_ns AS end_ns"
        f" FROM device_run {clause} AND {_ALL_TIMED} AND kind = 'kernel' AND source = 'cupti'"
        f" AND list_contains(CAST(? AS VARCHAR[]), name) ORDER BY 1, 2, 3, 4, 5, 6"
        f" LIMIT {MAX_EXCHANGES + 1}",
        [*parameters, names],
    )
