# SPDX-License-Identifier: Apache-2.0
"""Questions over a store that pages are drawn from: bounded in rows, whatever the selection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from sonde.query.stored import MAX_POINTS, MAX_ROWS, SUMS_VIEW, Selection, StoreTables

MAX_LANES = 500
MAX_SPANS = 20_000
MAX_NODES = 20_000
"""Boxes of a flame graph."""
MAX_MADE = 200_000
"""Boxes of which those are chosen. Beyond, a stack, lighter than all before it, counts for the last
box of it that there is."""
DEEPEST = 256
"""Levels of a flame graph; what lies deeper counts for the last one."""
EVERY_KIND = "cpu"
"""The default kind of selections; no interval is, so a timeline has all then."""


@dataclass(slots=True)
class FlameNode:
    """A box: a function under its callers."""

    name: str
    binary: str
    kind: str
    value: float = 0.0
    self_value: float = 0.0
    children: dict[int, FlameNode] = field(default_factory=dict)

    def plain(self, least: float) -> dict[str, Any]:
        """As nested objects, heaviest child first, without boxes lighter than `least`."""
        found: dict[str, Any] = {
            "name": self.name,
            "binary": self.binary,
            "kind": self.kind,
            "value": self.value,
            "self": self.self_value,
        }
        kept = [child for child in self.children.values() if child.value >= least]
        if kept:
            kept.sort(key=lambda child: (-child.value, child.name))
            found["children"] = [child.plain(least) for child in kept]
        return found


def _named(frame: Mapping[str, Any] | None) -> tuple[str, str, str]:
    """(name, binary, kind) that a frame is shown as."""
    if frame is None:
        return "[unknown]", "", "unknown"
    binary = str(frame["binary"])
    bare = binary if binary.startswith("[") else f"[{binary or 'unknown'}]"
    return frame["function"] or bare, binary, frame["kind"]


def flame_tree(
    rows: Sequence[Mapping[str, Any]], frames: Mapping[int, Mapping[str, Any]], value: str
) -> dict[str, Any]:
    """Stacks merged from their roots: {"left_out": boxes, "root": nested boxes}.

    `rows`: frame_keys (leaf first) and weights; `frames`: by key; `value`: which weight counts.
    """
    root = FlameNode("all", "", "")
    values: list[FlameNode] = []
    numbers: dict[tuple[str, str, str], int] = {}
    boxes: dict[int, tuple[int, tuple[str, str, str]]] = {}
    # What a frame is shown as, and its number: frames of a function at several lines are alike.
    for row in rows:
        weight = float(row[value])
        if not weight:
            continue
        at = root
        at.value += weight
        for key in row["frame_keys"][: -DEEPEST - 1 : -1]:
            box = boxes.get(key)
            if box is None:
                named = _named(frames.get(key))
                box = boxes[key] = numbers.setdefault(named, len(numbers)), named
            child = at.children.get(box[0])
            if child is None and len(values) >= MAX_MADE:
                break
            if child is None:
                child = at.children[box[0]] = FlameNode(*box[1])
                values.append(child)
            child.value += weight
            at = child
        at.self_value += weight
    weights = sorted((node.value for node in values), reverse=True)
    least = weights[MAX_NODES] if len(weights) > MAX_NODES else 0.0
    left_out = sum(one < least for one in weights)
    return {"left_out": left_out, "root": root.plain(least)}


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
    session: StoreTables, wanted: Selection, points: int = MAX_POINTS, lanes: int = 100
) -> tuple[pa.Table, pa.Table]:
    """(lanes, boxes) of a time.

    Lanes, busiest first: lane, node, lane_kind (kind of span, or device_run), pid, tid, comm,
    device, stream, ns. Boxes: lane, start and end (ns after the begin of the selection), name, n,
    ns. Intervals of at least one of `points` steps are separate boxes (n 1), the longest
    20,000; shorter ones of a lane and step are one box: named by the longest, n of them, ns
    together.
    """
    start, end = wanted.start_ns, wanted.end_ns
    points = max(1, min(points, MAX_POINTS))
    step = max(1, -(-(end - start) // points))
    every = replace(wanted, start_ns=-(1 << 62))
    clauses = []
    parameters: list[Any] = []
    for kind, is_run in ((wanted.kind, False), (wanted.kind, True)):
        fits = kind == EVERY_KIND or (kind == "kernel") == is_run
        all_kinds = kind == EVERY_KIND or is_run
        clause, some = every.sql("start_time_ns", kind=not all_kinds)
        clauses.append(f"{clause} AND end_time_ns > ?{'' if fits else ' AND false'}")
        parameters += [start, end, *some, start]
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
        " CAST(l.ns AS BIGINT) AS ns, any_value(coalesce(t.comm, '')) AS comm FROM numbered l"
        " LEFT JOIN thread t ON t.node = l.node AND t.pid = l.pid AND t.tid = l.tid"
        " AND t.start_ns = l.start_ns GROUP BY ALL ORDER BY l.lane",
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
    return listed, boxes


def overview(session: StoreTables, wanted: Selection) -> pa.Table:
    """Every node and what it did: node, chunks, first_ns, last_ns, seconds, and by kind of sample
    cpu_ns, blocked_ns, runqueue_ns, device_ns (host time in device calls), kernel_ns (on devices);
    lost (events that agents counted as lost)."""
    chunk, first = wanted.sql("start_ns", kind=False, process=False)
    plain, second = wanted.sql(kind=False, process=False)
    sums = ", ".join(
        f"coalesce(sum(weight_ns) FILTER (kind = '{kind}'), 0) AS {kind}_ns"
        for kind in ("cpu", "blocked", "runqueue", "device", "kernel")
    )
    return session.arrow(
        "WITH c AS (SELECT node, count(*) AS chunks, min(start_ns) AS first_ns,"
        f" max(end_ns) AS last_ns, sum(end_ns - start_ns) / 1e9 AS seconds FROM chunk {chunk}"
        f" GROUP BY node), s AS (SELECT node, {sums} FROM {SUMS_VIEW} {plain} GROUP BY node), "
        f"l AS (SELECT node, sum(value) AS lost FROM event {plain} AND kind = 'loss' GROUP BY node)"
        " SELECT c.*, s.* EXCLUDE (node), coalesce(l.lost, 0) AS lost FROM c"
        " LEFT JOIN s USING (node) LEFT JOIN l USING (node)"
        f" ORDER BY node LIMIT {MAX_ROWS}",
        [*first, *second, *second],
    )


def processes(session: StoreTables, wanted: Selection, limit: int = 50) -> pa.Table:
    """Processes by weight: node, pid, start_ns, n, ns, bytes, and who they are."""
    clause, parameters = wanted.sql()
    names = ("comm", "exe", "user", "pod", "namespace", "job", "container", "unit")
    who = ", ".join(f"any_value({name}) AS {name}" for name in names)
    return session.arrow(
        "WITH w AS (SELECT node, pid, start_ns, sum(weight_count) AS n, sum(weight_ns) AS ns,"
        f" sum(weight_bytes) AS bytes FROM {SUMS_VIEW} {clause} GROUP BY ALL"
        f" ORDER BY ns DESC, bytes DESC, node, pid LIMIT {min(int(limit), MAX_ROWS)}), "
        f"p AS (SELECT node, pid, start_ns, {who} FROM process"
        " WHERE (node, pid, start_ns) IN (SELECT node, pid, start_ns FROM w) GROUP BY ALL) "
        "SELECT w.*, p.* EXCLUDE (node, pid, start_ns) FROM w"
        " LEFT JOIN p USING (node, pid, start_ns) ORDER BY ns DESC, bytes DESC, node, pid",
        parameters,
    )


def names(session: StoreTables, wanted: Selection, limit: int = 50) -> pa.Table:
    """Kernels, reasons of waits or functions of calls, by weight: name, n, ns, bytes."""
    clause, parameters = wanted.sql()
    return session.arrow(
        "SELECT name, sum(weight_count) AS n, sum(weight_ns) AS ns, sum(weight_bytes) AS bytes"
        f" FROM {SUMS_VIEW} {clause} GROUP BY name ORDER BY ns DESC, bytes DESC, name"
        f" LIMIT {min(int(limit), MAX_ROWS)}",
        parameters,
    )


def metrics(session: StoreTables, wanted: Selection) -> pa.Table:
    """Metrics that there are: series, nodes, rows."""
    clause, parameters = wanted.sql(kind=False, process=False)
    return session.arrow(
        f"SELECT series, count(DISTINCT node) AS nodes, count(*) AS rows FROM metric {clause}"
        f" GROUP BY series ORDER BY series LIMIT {MAX_ROWS}",
        parameters,
    )
