# SPDX-License-Identifier: Apache-2.0
"""Questions over a store that the web page draws: bounded in rows for any selection."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from sonde.query.bounded import bounded, count_beyond
from sonde.query.selection import SUMS_VIEW, Selection, StoreTables
from sonde.query.stored import MAX_POINTS, MAX_ROWS, one_of
from sonde.query.stored_flame import FlameStacks

MAX_LANES = 500
"""Lanes of a timeline: threads by kind of wait, and streams of devices."""
MAX_SPANS = 20_000
"""Intervals of a timeline that are separate boxes."""
MAX_NODES = 20_000
"""Boxes of a flame graph in an answer, the heaviest."""
MAX_MADE = 200_000
"""Boxes that are made, heaviest stacks first, before `MAX_NODES` of them are chosen. Once this many
are made, the weight of a stack counts for the innermost of its boxes that there is."""
DEEPEST = 256
"""Levels of a flame graph; what lies deeper counts for the last one."""
EVERY_KIND = "cpu"
"""The default kind of selections. No interval of a timeline is of it: there it means all kinds."""


def _named(frame: Mapping[str, Any] | None) -> tuple[str, str, str]:
    """(name, binary, kind) that a frame is shown as."""
    if frame is None:
        return "[unknown]", "", "unknown"
    binary = str(frame["binary"])
    bare = binary if binary.startswith("[") else f"[{binary or 'unknown'}]"
    return frame["function"] or bare, binary, frame["kind"]


def flame_tree(
    rows: Iterable[Mapping[str, Any]], frames: Mapping[int, Mapping[str, Any]], value: str
) -> dict[str, Any]:
    """Stacks merged from their roots: {"left_out": number of boxes, "root": nested boxes} with
    name, binary, kind, value, self and, heaviest first, children.

    `rows`: frame_keys (leaf first) and weights, heaviest first; `frames`: by key; `value`: the
    column of `rows` that is the weight.
    """
    # What a frame is shown as, and its number: frames of a function at several lines are alike.
    # Of texts, which Python's collector of cycles does not visit, as it would tuples.
    numbers: dict[str, int] = {}
    shown: dict[int, int] = {}
    # Boxes in columns: an object for each would take more than all stacks. The first is the root.
    inside: dict[int, int] = {}
    parents, names = array("i", (0,)), array("i", (0,))
    values, own = [0.0], [0.0]
    for row in rows:
        weight = float(row[value])
        if not weight:
            continue
        at = 0
        values[0] += weight
        for key in row["frame_keys"][: -DEEPEST - 1 : -1]:
            if (number := shown.get(key)) is None:
                number = numbers.setdefault(_joined(*_named(frames.get(key))), len(numbers))
                shown[key] = number
            place = at << 32 | number
            if (child := inside.get(place)) is None:
                if len(parents) > MAX_MADE:
                    break
                child = inside[place] = len(parents)
                parents.append(at)
                names.append(number)
                values.append(0.0)
                own.append(0.0)
            values[child] += weight
            at = child
        own[at] += weight
    inside.clear()
    return _nested(parents, names, values, own, list(numbers))


def flame_tree_of(stacks: FlameStacks, value: str) -> dict[str, Any]:
    """The same as `flame_tree` of stacks and their frames, level by level, where no more boxes can
    be made than `MAX_MADE`. Raises CaptureError."""
    if stacks.frame_count > MAX_MADE:
        return flame_tree(stacks, stacks.frames(), value)
    numbers: dict[str, int] = {}
    found = map(_named, stacks.locations("function", "binary", "kind"))
    shown = np.array([numbers.setdefault(_joined(*it), len(numbers)) for it in found], np.int64)
    flat, begins, ends, weights = stacks.columns(value)
    flat = shown[flat]
    begins = np.maximum(begins, ends - DEEPEST)
    rows = np.flatnonzero(weights)
    at = np.zeros(len(weights), np.int64)
    parents, names = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)]
    values = [np.array((float(weights.sum()),))]
    made = 1
    for level in range(1, DEEPEST + 1):  # from the roots of the stacks, which are their ends
        rows = rows[ends[rows] - level >= begins[rows]]
        if not len(rows):
            break
        stacks.check()
        place, which = np.unique(at[rows] << 32 | flat[ends[rows] - level], return_inverse=True)
        at[rows] = made + which
        parents.append(place >> 32)
        names.append(place & (1 << 32) - 1)
        values.append(np.bincount(which, weights[rows], len(place)))
        made += len(place)
    return _nested(
        np.concatenate(parents).tolist(),
        np.concatenate(names).tolist(),
        np.concatenate(values).tolist(),
        np.bincount(at, weights, made).tolist(),
        list(numbers),
    )


def _nested(
    parents: Sequence[int],
    names: Sequence[int],
    values: Sequence[float],
    own: Sequence[float],
    listed: Sequence[str],
) -> dict[str, Any]:
    """The heaviest boxes, nested. In columns, the first is the root: the box that a box is in, its
    name (in `listed`), and its weights."""
    weights = np.array(values[1:])
    # A box is never lighter than those in it, and was made before them: with a box there are those
    # that it is in.
    kept = 1 + np.sort(np.argsort(-weights, kind="stable")[: MAX_NODES + 1])
    root: dict[str, Any] = _box("all", "", "", values[0], own[0])
    boxes = {0: root}
    texts: dict[int, tuple[str, str, str]] = {}
    for number in kept.tolist():
        if (found := texts.get(names[number])) is None:
            found = texts[names[number]] = _apart(listed[names[number]])
        box = boxes[number] = _box(*found, values[number], own[number])
        boxes[parents[number]].setdefault("children", []).append(box)
    for box in boxes.values():
        if len(box.get("children", ())) > 1:
            box["children"].sort(key=lambda child: (-child["value"], child["name"]))
    return {"left_out": len(weights) - len(kept), "root": root}


def _joined(name: str, binary: str, kind: str) -> str:
    return f"{len(name)},{len(binary)},{name}{binary}{kind}"


def _apart(joined: str) -> tuple[str, str, str]:
    """What `_joined` joined."""
    name, binary, texts = joined.split(",", 2)
    middle, end = int(name), int(name) + int(binary)
    return texts[:middle], texts[middle:end], texts[end:]


def _box(name: str, binary: str, kind: str, value: float, own: float) -> dict[str, Any]:
    return {"name": name, "binary": binary, "kind": kind, "value": value, "self": own}


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
