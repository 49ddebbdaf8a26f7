# SPDX-License-Identifier: Apache-2.0
"""Ranks of jobs over time: of each process on each device, time at work and time in collectives.

Here every pair of a process and a device is a rank. Times on devices are Horvitz-Thompson sums of
the timed runs, each counted by the part of it that lies in a slot. Runs of several streams add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import pyarrow as pa

from sonde.model.collectives import is_collective
from sonde.query import stored_objects
from sonde.query.selection import Selection, StoreTables
from sonde.query.stored import MAX_ROWS, TEXT_CHARS, one_of
from sonde.query.timed_windows import NEARLY_ALL

MAX_RANKS = 512
"""Rows of a heat map, unless the caller allows more."""
MAX_BINS = 240
"""Columns of a heat map: more are too narrow to click."""
_LEAST_SLOT_NS = 250_000_000
"""Only a sample of the runs is timed: shorter slots would show which ones were."""
_PIECE_NS = 60 * 10**9
"""Runs less far apart than this are of one piece of the observed time, at least."""
_BINS_A_PIECE = 8
"""Pieces are joined until there are this many bins for each of them."""
_TIMED_SHARE = 0.9
"""Share of a node's device time that must be of stretches in which every run was timed."""
LAST_NS = 60 * 10**9
"""Of a job: what a heat map of its ranks begins with, before its last timed run."""
_MATCHING, _MATCHING_BYTES = 10_000, 1 << 20
"""Kernels that exchange data, and characters of their names: a statement compares each run's name
with all of them."""
_OWNERS = ("comm", "command", "job", "user", "pod", "container")
"""Columns of `process` in an answer."""


class BinKind(StrEnum):
    """What the columns of the heat map are."""

    STEPS = "steps"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class TimeBin:
    """A column of the heat map (slot): a step, or a part of the time. Times are ns since 1970, the
    end exclusive."""

    start_ns: int
    end_ns: int


def parts_of(selection: Selection, points: int) -> list[TimeBin]:
    """The selected time in equal parts: at most `points`, at most `MAX_BINS`, none shorter than
    `_LEAST_SLOT_NS` but the last."""
    length = selection.end_ns - selection.start_ns
    count = max(1, min(points, MAX_BINS))
    step = max(_LEAST_SLOT_NS, -(-length // count))
    edges = range(selection.start_ns, max(selection.end_ns, selection.start_ns + 1), step)
    return [TimeBin(start, min(start + step, selection.end_ns)) for start in edges]


def observed(session: StoreTables, selection: Selection, points: int) -> list[Selection]:
    """The parts of the selected time in which runs were timed, in order: each from the begin of its
    first run to the end of its last. Parts are joined over ever longer gaps until there are few
    enough for `points` bins; [] without runs."""
    clause, parameters = selection.sql("start_time_ns", kind=False)
    # A column of at most a few thousand rows, however long the time is.
    step = max(_PIECE_NS // 2, (selection.end_ns - selection.start_ns) // MAX_ROWS)
    rows = session.arrow(
        "SELECT min(start_time_ns) AS begin_ns, max(end_time_ns) AS finish_ns FROM device_run"
        f" {clause} AND kind <> 'sync' GROUP BY start_time_ns // {step} ORDER BY 1",
        parameters,
    )
    found = list(zip(rows["begin_ns"].to_pylist(), rows["finish_ns"].to_pylist(), strict=True))
    most = max(1, min(points, MAX_BINS) // _BINS_A_PIECE)
    gap = max(_PIECE_NS, step)
    while True:
        joined: list[tuple[int, int]] = []
        for begin, finish in found:
            if joined and begin - joined[-1][1] <= gap:
                joined[-1] = joined[-1][0], max(joined[-1][1], finish)
            else:
                joined.append((begin, finish))
        if len(joined) <= most:
            break
        gap *= 2
    return [
        replace(selection, start_ns=begin, end_ns=max(begin + 1, min(finish, selection.end_ns)))
        for begin, finish in joined
    ]


def bins_of(pieces: Sequence[Selection], points: int) -> list[TimeBin]:
    """At most about `points` bins, of alike length, in these parts of the time."""
    whole = sum(one.end_ns - one.start_ns for one in pieces)
    found: list[TimeBin] = []
    for one in pieces:
        its = max(1, round(points * (one.end_ns - one.start_ns) / max(1, whole)))
        found += parts_of(one, its)
    return found


def timed_whole(session: StoreTables, selection: Selection) -> str:
    """The node with most device time among those of which nearly all is of stretches in which every
    run was timed; '' where there is none. Only there can steps be found."""
    clause, parameters = selection.sql("start_time_ns", kind=False)
    ns = "weight * (end_time_ns - start_time_ns)"
    rows = session.arrow(
        f"SELECT node FROM (SELECT node, sum({ns}) AS all_ns,"
        f' sum({ns}) FILTER (WHERE weight <= {NEARLY_ALL} OR "window" > 0) AS timed_ns'
        f" FROM device_run {clause} AND kind <> 'sync' GROUP BY node) AS sums"
        f" WHERE timed_ns >= {_TIMED_SHARE} * all_ns ORDER BY all_ns DESC, node LIMIT 1",
        parameters,
    )
    found: list[str] = rows.column("node").to_pylist()
    return found[0] if found else ""


def ranks(
    session: StoreTables, selection: Selection, slots: Sequence[TimeBin], by: BinKind, most: int = 0
) -> dict[str, Any]:
    """The heat map of ranks, as an object:

    - `by`: what `slots` are; `slots`: columns `start_ns`, `end_ns`;
    - `ranks`: objects, sorted by job, node and device; `all_timed`: every run of it was timed;
    - `cells`: columns `rank`, `slot` (indices), `work_ns`, `collective_ns`, `runs` (timed ones). A
      rank without a cell in a slot was not timed there;
    - `collectives`: the number of kernels (names) that count as collectives;
    - `left_out`: ranks beyond `most` (0: `MAX_RANKS`), those with the least device time.
    """
    clause, parameters = selection.sql("start_time_ns", kind=False)
    seen = (
        f"seen AS (SELECT * FROM device_run {clause} AND kind <> 'sync'), "
        "every AS (SELECT node, pid, start_ns, device,"
        " sum(weight * (end_time_ns - start_time_ns)) AS ns,"
        f" max(weight) <= {NEARLY_ALL} AS all_timed FROM seen GROUP BY ALL), "
        "heavy AS (SELECT * FROM every ORDER BY ns DESC, node, pid, start_ns, device"
        f" LIMIT {int(most) or MAX_RANKS}), "
    )
    who = ", ".join(f"left({one_of(name)}, {TEXT_CHARS}) AS {name}" for name in _OWNERS)
    known = ", ".join(f"coalesce(p.{name}, '') AS {name}" for name in _OWNERS)
    listed = session.arrow(
        f"WITH {seen} p AS (SELECT node, pid, start_ns, {who} FROM process"
        " WHERE (node, pid, start_ns) IN (SELECT node, pid, start_ns FROM heavy) GROUP BY ALL) "
        f"SELECT heavy.node, heavy.pid, heavy.start_ns, device, heavy.ns, heavy.all_timed, {known},"
        " (SELECT count(*) FROM every) AS ranks FROM heavy LEFT JOIN p"
        " USING (node, pid, start_ns) ORDER BY job, heavy.node, device, heavy.pid, heavy.start_ns",
        parameters,
    )
    rows = list(stored_objects.rows(listed, session.check))
    collectives = kernels_like(session, selection, is_collective)
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
    of_rank = cells.select(["node", "pid", "start_ns", "device"])
    keys = (tuple(row.values()) for row in stored_objects.rows(of_rank, session.check))
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
            **stored_objects.lists(cells.select(columns), session.check),
        },
        "collectives": len(collectives),
        "left_out": every - len(rows),
    }


def kernels_like(
    session: StoreTables, selection: Selection, matches: Callable[[str], bool]
) -> list[str | None]:
    """Names of kernels of a selection that match, in order. Those beyond `_MATCHING` of them, or
    `_MATCHING_BYTES`, count as left out."""
    clause, parameters = selection.sql("start_time_ns", kind=False)
    names = session.arrow(
        f"SELECT name FROM (SELECT DISTINCT name FROM device_run {clause} AND kind = 'kernel')"
        f" ORDER BY name LIMIT {10 * MAX_ROWS}",
        parameters,
    )
    found: list[str | None] = []
    left_bytes, left_out = _MATCHING_BYTES, 0
    for some in stored_objects.parts_of(names.column("name"), session.check):
        for name in some:
            if not matches(name or ""):
                continue
            left_bytes -= len(name or "")
            if left_bytes < 0 or len(found) >= _MATCHING:
                left_out += 1
            else:
                found.append(name)
    session.leave_out(left_out)
    return found


def jobs(session: StoreTables, selection: Selection, most: int) -> pa.Table:
    """Jobs whose runs on devices were timed, the latest first, at most `most`: job ('': processes
    of no job), ranks (timed in its last `LAST_NS`), first_ns, last_ns (when its first run began and
    its last one ended, since 1970), start_ns (where its last `LAST_NS` begin, not before first_ns).
    Raises CaptureError."""
    clause, parameters = selection.sql("start_time_ns", kind=False)
    return session.arrow(
        "WITH seen AS (SELECT node, pid, start_ns, device, min(start_time_ns) AS first_ns,"
        f" max(end_time_ns) AS last_ns FROM device_run {clause} AND kind <> 'sync' GROUP BY ALL), "
        "p AS (SELECT node, pid, start_ns, any_value(job) AS job FROM process"
        " WHERE (node, pid, start_ns) IN (SELECT node, pid, start_ns FROM seen) GROUP BY ALL), "
        "named AS (SELECT coalesce(p.job, '') AS job, first_ns, last_ns,"
        " max(last_ns) OVER (PARTITION BY coalesce(p.job, '')) AS end_ns"
        " FROM seen LEFT JOIN p USING (node, pid, start_ns)) "
        f"SELECT job, count(*) FILTER (last_ns > end_ns - {LAST_NS}) AS ranks,"
        " min(first_ns) AS first_ns, max(last_ns) AS last_ns,"
        f" greatest(min(first_ns), max(last_ns) - {LAST_NS}) AS start_ns FROM named"
        f" GROUP BY job ORDER BY last_ns DESC, job LIMIT {int(most)}",
        parameters,
    )
