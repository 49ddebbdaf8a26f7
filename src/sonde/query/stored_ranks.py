# SPDX-License-Identifier: Apache-2.0
"""Ranks of jobs over time: of each process on each device, time at work and time in collectives.

Times on devices are Horvitz-Thompson sums of the timed runs, by what of each lies in a slot. Runs
of several streams add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pyarrow as pa

from sonde.model.collectives import is_collective
from sonde.query.stored import MAX_ROWS, Selection, StoreTables
from sonde.query.timed_windows import NEARLY_ALL

MAX_RANKS = 512
MAX_BINS = 240
"""Columns of a heat map: more are too narrow to click."""
_LEAST_SLOT_NS = 250_000_000
"""Runs are timed in part: finer parts would show which ones were."""
_WHOLE = 0.9
"""Share of the device time of a node."""
_OWNERS = ("comm", "job", "user", "pod", "container")


class BinKind(StrEnum):
    """What the columns of the heat map are."""

    STEPS = "steps"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class TimeBin:
    """A column: a step, or a part of the time. ns since 1970, the end exclusive."""

    start_ns: int
    end_ns: int


def parts_of(wanted: Selection, points: int) -> list[TimeBin]:
    """The time in equal parts, at most `points` and at most 240."""
    length = wanted.end_ns - wanted.start_ns
    count = max(1, min(points, MAX_BINS))
    step = max(_LEAST_SLOT_NS, -(-length // count))
    edges = range(wanted.start_ns, max(wanted.end_ns, wanted.start_ns + 1), step)
    return [TimeBin(start, min(start + step, wanted.end_ns)) for start in edges]


def timed_whole(session: StoreTables, wanted: Selection) -> str:
    """The node with most device time among those where every run was timed, nearly all the time;
    '': there is none. Steps cannot be found where runs between the timed ones are not known."""
    clause, parameters = wanted.sql("start_time_ns", kind=False)
    ns = "weight * (end_time_ns - start_time_ns)"
    rows = session.arrow(
        f"SELECT node FROM device_run {clause} AND kind <> 'sync' GROUP BY node"
        f' HAVING sum({ns}) FILTER (weight <= {NEARLY_ALL} OR "window" > 0)'
        f" >= {_WHOLE} * sum({ns}) ORDER BY sum({ns}) DESC, node LIMIT 1",
        parameters,
    )
    found: list[str] = rows.column("node").to_pylist()
    return found[0] if found else ""


def ranks(
    session: StoreTables, wanted: Selection, slots: Sequence[TimeBin], by: BinKind, most: int = 0
) -> dict[str, Any]:
    """`slots` (columns `start_ns`, `end_ns`), `ranks` (who they are, by job, node and device;
    `all_timed`: every run of it was timed),
    `cells` (columns `rank`, `slot`, `work_ns`, `collective_ns`, `runs`: timed ones), `left_out`
    (ranks beyond `most`, those with the least device time; 0: 512).

    A rank without a cell in a slot was not timed there.
    """
    clause, parameters = wanted.sql("start_time_ns", kind=False)
    seen = (
        f"seen AS (SELECT * FROM device_run {clause} AND kind <> 'sync'), "
        "every AS (SELECT node, pid, start_ns, device,"
        " sum(weight * (end_time_ns - start_time_ns)) AS ns,"
        f" max(weight) <= {NEARLY_ALL} AS all_timed FROM seen GROUP BY ALL), "
        "heavy AS (SELECT * FROM every ORDER BY ns DESC, node, pid, start_ns, device"
        f" LIMIT {int(most) or MAX_RANKS}), "
    )
    who = ", ".join(f"any_value({name}) AS {name}" for name in _OWNERS)
    known = ", ".join(f"coalesce(p.{name}, '') AS {name}" for name in _OWNERS)
    listed = session.arrow(
        f"WITH {seen} p AS (SELECT node, pid, start_ns, {who} FROM process"
        " WHERE (node, pid, start_ns) IN (SELECT node, pid, start_ns FROM heavy) GROUP BY ALL) "
        f"SELECT heavy.node, heavy.pid, heavy.start_ns, device, heavy.ns, heavy.all_timed, {known},"
        " (SELECT count(*) FROM every) AS ranks FROM heavy LEFT JOIN p"
        " USING (node, pid, start_ns) ORDER BY job, heavy.node, device, heavy.pid, heavy.start_ns",
        parameters,
    )
    rows = listed.to_pylist()
    names = session.arrow(
        f"SELECT name FROM (SELECT DISTINCT name FROM device_run {clause} AND kind = 'kernel')"
        f" ORDER BY name LIMIT {10 * MAX_ROWS}",
        parameters,
    )
    collectives = [name for name in names.column("name").to_pylist() if is_collective(name or "")]
    chosen = pa.table(
        {
            "slot": pa.array(range(len(slots)), pa.int64()),
            "begin_ns": pa.array([slot.start_ns for slot in slots], pa.int64()),
            "end_ns": pa.array([slot.end_ns for slot in slots], pa.int64()),
        }
    )
    amount = "s.weight * (least(s.end_time_ns, c.end_ns) - greatest(s.start_time_ns, c.begin_ns))"
    exchanges = "s.kind = 'kernel' AND list_contains(CAST(? AS VARCHAR[]), s.name)"
    cells = session.arrow(
        f"WITH {seen} placed AS (SELECT s.node, s.pid, s.start_ns, s.device, c.slot,"
        f" {amount} AS ns, {exchanges} AS exchanges FROM seen s JOIN chosen c"
        " ON s.start_time_ns < c.end_ns AND s.end_time_ns > c.begin_ns) "
        "SELECT node, pid, start_ns, device, slot,"
        " coalesce(sum(ns) FILTER (NOT exchanges), 0) AS work_ns,"
        " coalesce(sum(ns) FILTER (exchanges), 0) AS collective_ns, count(*) AS runs FROM placed"
        " WHERE (node, pid, start_ns, device) IN (SELECT node, pid, start_ns, device FROM heavy)"
        " GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 2, 3, 4, 5",
        [*parameters, collectives],
        chosen,
    )
    numbers = {
        (row["node"], row["pid"], row["start_ns"], row["device"]): number
        for number, row in enumerate(rows)
    }
    keys = zip(
        *(cells.column(name).to_pylist() for name in ("node", "pid", "start_ns", "device")),
        strict=True,
    )
    columns = ("slot", "work_ns", "collective_ns", "runs")
    every = rows[0]["ranks"] if rows else 0
    return {
        "by": str(by),
        "slots": {
            "start_ns": chosen.column("begin_ns").to_pylist(),
            "end_ns": chosen.column("end_ns").to_pylist(),
        },
        "ranks": [{name: row[name] for name in row if name != "ranks"} for row in rows],
        "cells": {
            "rank": [numbers[key] for key in keys],
            **{name: cells.column(name).to_pylist() for name in columns},
        },
        "collectives": len(collectives),
        "left_out": every - len(rows),
    }
