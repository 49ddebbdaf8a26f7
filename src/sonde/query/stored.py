# SPDX-License-Identifier: Apache-2.0
"""Typed questions over a store: Parquet files of many nodes, of which the caller gives those of a
time.

The tables are those of a capture (abi/tables.json) as src/sonde/store/tables.py stores them: with
`node`, times since 1970, keys of stacks and frames by content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sonde.errors import CaptureError
from sonde.query.bounded import bounded, count_beyond
from sonde.query.probe_frames import PROBE_PREFIXES
from sonde.query.selection import TRACED_SUMS, Selection, StoreTables

MAX_POINTS = 1_440
"""Points of a series: about as many as a screen has columns of pixels."""
MAX_STACKS = 20_000
"""Of one flame graph, the heaviest."""
MAX_STACK_FRAMES = 2_000_000
"""Frames of all stacks of one flame graph together."""
MAX_DEPTH = 1_024
"""Frames of one stack of a flame graph. Of a deeper one those in the middle are left out, where
`CUT_KEY` stands: both what it is called by and where it is remain."""
CUT_KEY = 0
MAX_FRAMES = 100_000
"""Code locations of one answer."""
TEXT_CHARS = 4_096
"""Texts of code locations are cut to this length; those of recorders are nearly always shorter."""
TEXTS_CHARS = 32 << 20
"""Of all code locations of one answer. Where they have more, all texts are cut to one length, to
`SHORT_CHARS` at the least."""
SHORT_CHARS = 32
GROUP_CHARS = 512
"""Of the name of a process or thread that stacks are split by."""
MAX_SERIES = 1_000
"""Of one metric, by node and labels."""
MAX_ROWS = 10_000
"""Of other answers."""
GROUPS: Mapping[str, tuple[str, ...]] = {
    "process": ("node", "pid", "start_ns"),
    "thread": ("node", "pid", "start_ns", "tid"),
}
"""What a flame graph can be split by (`by`): the columns of `sample` that identify each part."""


_FRAME_TEXTS = ("kind", "function", "binary", "file")
_HALF = MAX_DEPTH // 2
_STACKS = (
    "once AS (SELECT key, any_value(frame_keys) AS frame_keys FROM stack"
    " WHERE key IN (SELECT stack FROM weight) GROUP BY key), "
    f"cut AS (SELECT key, CASE WHEN array_length(frame_keys) <= {MAX_DEPTH} THEN frame_keys"
    f" ELSE list_concat(array_slice(frame_keys, 1, {_HALF}), [CAST({CUT_KEY} AS BIGINT)],"
    f" array_slice(frame_keys, array_length(frame_keys) - {_HALF - 2}, array_length(frame_keys)))"
    " END AS frame_keys FROM once), "
)
"""Common table expressions: the frames of the stacks in `weight`, with at most `MAX_DEPTH`. The
third argument of `array_slice` is where it ends, on Spark how many it takes: here the same."""


def flame_graph(
    session: StoreTables, selection: Selection, limit: int = MAX_STACKS, by: str = ""
) -> pa.Table:
    """Stacks, heaviest first: stack (key), n, ns, bytes, frame_keys (leaf first). At most `limit`,
    and `MAX_STACK_FRAMES` frames, of one stack `MAX_DEPTH`: `totals` shows what is missing.

    `by`: 'process' or 'thread' has the stacks of each separate, with its `group_name`:
    'python3 (4121)', after the node's name unless one node is selected. Raises CaptureError.
    """
    if by:
        return _grouped_flame_graph(session, selection, limit, by)
    clause, parameters = selection.sql()
    return session.arrow(
        "WITH weight AS ("
        " SELECT stack, sum(weight_count) AS n, sum(weight_ns) AS ns, sum(weight_bytes) AS bytes"
        f" FROM {selection.sums} {clause} GROUP BY stack"
        f" ORDER BY sum(weight_ns) DESC, sum(weight_bytes) DESC, stack LIMIT {int(limit)}), "
        f"{_STACKS}"
        "listed AS (SELECT w.stack, w.n, w.ns, w.bytes, coalesce(o.frame_keys, []) AS frame_keys"
        " FROM weight w LEFT JOIN cut o ON w.stack = o.key), "
        "placed AS (SELECT *, sum(array_length(frame_keys))"
        " OVER (ORDER BY ns DESC, bytes DESC, stack) AS frames_so_far FROM listed) "
        "SELECT stack, n, ns, bytes, frame_keys FROM placed"
        f" WHERE frames_so_far <= {MAX_STACK_FRAMES} ORDER BY ns DESC, bytes DESC, stack",
        parameters,
    )


def _grouped_flame_graph(
    session: StoreTables, selection: Selection, limit: int, by: str
) -> pa.Table:
    if by not in GROUPS:
        raise CaptureError(f"stacks are not kept by {by[:40]!r}", f"use {' or '.join(GROUPS)}")
    key = ", ".join(GROUPS[by])
    number = "tid" if by == "thread" else "pid"
    whose = "" if len(selection.nodes) == 1 else "w.node || ' ' || "
    rows = TRACED_SUMS if selection.trace else "sample"  # sums have no threads
    clause, parameters = selection.sql()
    return session.arrow(
        "WITH weight AS ("
        f" SELECT stack, {key}, sum(weight_count) AS n, sum(weight_ns) AS ns,"
        f" sum(weight_bytes) AS bytes FROM {rows} {clause} GROUP BY stack, {key}"
        f" ORDER BY sum(weight_ns) DESC, sum(weight_bytes) DESC, stack, {key}"
        f" LIMIT {int(limit)}), "
        f"{_STACKS}named AS ({_names_of(by)}), "
        "listed AS (SELECT w.stack, w.n, w.ns, w.bytes,"
        f" {whose}coalesce(nullif(left(m.comm, {GROUP_CHARS}), ''), '{by}')"
        f" || ' (' || w.{number} || ')' AS group_name,"
        " coalesce(o.frame_keys, []) AS frame_keys FROM weight w LEFT JOIN cut o"
        f" ON w.stack = o.key LEFT JOIN named m USING ({key})), "
        "placed AS (SELECT *, sum(array_length(frame_keys))"
        " OVER (ORDER BY ns DESC, bytes DESC, stack, group_name) AS frames_so_far FROM listed) "
        "SELECT stack, n, ns, bytes, frame_keys, group_name FROM placed"
        f" WHERE frames_so_far <= {MAX_STACK_FRAMES}"
        " ORDER BY ns DESC, bytes DESC, stack, group_name",
        parameters,
    )


def one_of(column: str) -> str:
    """SQL: one of the values that rows of `process` of one process have in a column."""
    # The first row may be of before it was known what the process runs.
    return f"max({column})" if column == "command" else f"any_value({column})"


def _names_of(by: str) -> str:
    """SQL: the key of each process or thread (`GROUPS`), and its name as `comm`: that of what an
    interpreter runs, also for its first thread (`Thread.name`)."""
    key = ", ".join(GROUPS[by])
    own = f"SELECT {key}, arg_max(comm, time_ns) AS comm FROM {by} GROUP BY {key}"
    scripts = "SELECT node, pid, start_ns, nullif(max(command), '') AS command FROM process"
    scripts += " GROUP BY node, pid, start_ns"
    first = " AND s.pid = o.tid" if by == "thread" else ""
    columns = ", ".join(f"o.{column}" for column in GROUPS[by])
    return (
        f"SELECT {columns}, coalesce(s.command, o.comm) AS comm FROM ({own}) o"
        f" LEFT JOIN ({scripts}) s ON s.node = o.node AND s.pid = o.pid"
        f" AND s.start_ns = o.start_ns{first}"
    )


def frames(session: StoreTables, keys: Sequence[int] | npt.NDArray[np.int64]) -> pa.Table:
    """The code locations with these keys: key, kind, function, binary, file, line. Texts are
    cut to `TEXT_CHARS`, and where they are more than `TEXTS_CHARS` together, all to one length
    that fits."""
    once = ", ".join(f'any_value(left("{it}", {TEXT_CHARS})) AS "{it}"' for it in _FRAME_TEXTS)
    chars = " + ".join(f"length(coalesce(\"{it}\", ''))" for it in _FRAME_TEXTS)
    most = max(SHORT_CHARS, TEXTS_CHARS // (len(_FRAME_TEXTS) * max(1, len(keys))))
    texts = ", ".join(
        f'CASE WHEN z.chars <= {TEXTS_CHARS} THEN "{it}" ELSE left("{it}", {most}) END AS "{it}"'
        for it in _FRAME_TEXTS
    )
    return session.arrow(
        f"WITH once AS (SELECT key, {once}, any_value(line) AS line FROM frame"
        " WHERE key IN (SELECT key FROM chosen) GROUP BY key), "
        f"size AS (SELECT sum({chars}) AS chars FROM once) "
        f"SELECT key, {texts}, line FROM once CROSS JOIN size z ORDER BY key",
        chosen=pa.table({"key": pa.array(keys, pa.int64())}),
    )


def known_frames(session: StoreTables) -> pa.Table:
    """The code locations of the days of a selection, the first `MAX_FRAMES` by key: as `frames`,
    without build ids."""
    texts = ", ".join(f'left("{it}", {TEXT_CHARS}) AS "{it}"' for it in _FRAME_TEXTS)
    return session.arrow(
        f"SELECT DISTINCT key, {texts}, line FROM frame ORDER BY key LIMIT {MAX_FRAMES}"
    )


def totals(session: StoreTables, selection: Selection) -> dict[str, float]:
    """Sums over a selection: rows (of `sample`), n, ns, bytes."""
    clause, parameters = selection.sql()
    row = session.arrow(
        "SELECT coalesce(sum(rows), 0) AS rows, coalesce(sum(weight_count), 0) AS n,"
        " coalesce(sum(weight_ns), 0) AS ns, coalesce(sum(weight_bytes), 0) AS bytes"
        f" FROM {selection.sums} {clause}",
        parameters,
    ).to_pylist()[0]
    return {name: float(value) for name, value in row.items()}


_PROBE = " OR ".join(f"starts_with(function, '{it}')" for it in PROBE_PREFIXES)
_MEMBERS = (
    "weight{at} AS (SELECT stack, sum(weight_ns) AS ns FROM {sums} {clause} GROUP BY stack), "
    "once{at} AS (SELECT key, any_value(frame_keys) AS frame_keys FROM stack"
    " WHERE key IN (SELECT stack FROM weight{at}) GROUP BY key), "
    'known{at} AS (SELECT key, any_value(function) AS function, any_value("binary") AS "binary"'
    " FROM frame GROUP BY key), "
    "named{at} AS (SELECT key, coalesce(CASE WHEN function <> '' THEN function"
    " WHEN \"binary\" LIKE '[%' THEN \"binary\" WHEN \"binary\" <> '' THEN '[' || \"binary\" || ']'"
    " END, '[unknown]') AS function, coalesce(\"binary\", '') AS \"binary\","
    " CASE WHEN {is_probe} THEN 1 ELSE 0 END AS probe FROM known{at}), "
    'numbered{at} AS (SELECT key, probe, min(key) OVER (PARTITION BY function, "binary") AS id'
    " FROM named{at}), "
    "member{at} AS (SELECT DISTINCT key AS stack, unnest(frame_keys) AS frame FROM once{at}), "
    "within{at} AS (SELECT m.stack, m.frame, coalesce(n.id, m.frame) AS id,"
    " coalesce(n.probe, 0) AS probe FROM member{at} m LEFT JOIN numbered{at} n"
    " ON n.key = m.frame), "
    "inside{at} AS (SELECT DISTINCT stack, id FROM within{at} WHERE probe = 0), "
    "probes{at} AS (SELECT stack, sum(probe) AS n FROM within{at} WHERE probe = 1 GROUP BY stack), "
    "leaf{at} AS (SELECT o.key AS stack, o.frame_keys[CAST(coalesce(p.n, 0) + 1 AS INT)] AS frame"
    " FROM once{at} o LEFT JOIN probes{at} p ON p.stack = o.key), "
    "own{at} AS (SELECT i.id, sum(w.ns) AS ns FROM leaf{at} l JOIN weight{at} w USING (stack)"
    " JOIN within{at} i ON i.stack = l.stack AND i.frame = l.frame GROUP BY i.id), "
    "whole{at} AS (SELECT id, sum(w.ns) AS ns FROM inside{at} JOIN weight{at} w USING (stack)"
    " GROUP BY id), "
    "function{at} AS ("
    "SELECT coalesce(n.function, '[unknown]') AS function,"
    ' coalesce(n."binary", \'\') AS "binary",'
    " sum(coalesce(o.ns, 0)) AS own_ns, sum(w.ns) AS total_ns"
    " FROM whole{at} w LEFT JOIN own{at} o USING (id) LEFT JOIN named{at} n ON n.key = w.id"
    " GROUP BY 1, 2)"
)
"""Functions of a selection, as the part of a WITH clause that ends in the table `function{at}`;
`{at}`: a suffix that makes names distinct. `inside`: each function of a stack once, however often
it calls itself; `own`, `whole`: time in a function itself, and with what it called. `is_probe`:
code that is left out, as it is the recorder's: innermost in stacks of waits (`probe_frames`)."""
_OF_WAITS = frozenset(("blocked", "runqueue"))


def _members(selection: Selection, clause: str, at: str = "") -> str:
    is_probe = _PROBE if selection.kind in _OF_WAITS else "FALSE"
    return _MEMBERS.format(sums=selection.sums, clause=clause, at=at, is_probe=is_probe)


def top_functions(session: StoreTables, selection: Selection, limit: int = 50) -> pa.Table:
    """Functions by own (self) time, at most `limit`: function, binary, own_ns, total_ns. Code
    without a name is one function a binary, called [BINARY] as in a flame graph; one that calls
    itself counts once in `total_ns`.
    """
    clause, parameters = selection.sql()
    members = _members(selection, clause)
    return bounded(
        session,
        f"WITH {members} SELECT * FROM function ORDER BY own_ns DESC, total_ns DESC, 1, 2",
        parameters,
        MAX_ROWS,
        limit,
    )


def difference(
    session: StoreTables, before: Selection, after: Selection, limit: int = 50
) -> pa.Table:
    """Functions whose share of the own (self) time changed most: function, binary, before, after
    (shares, 0 to 1)."""
    parts = []
    parameters: list[Any] = []
    for at, selection in enumerate((before, after)):
        clause, own_parameters = selection.sql()
        parts.append(_members(selection, clause, str(at)))
        parameters += own_parameters
    return bounded(
        session,
        f"WITH {parts[0]}, {parts[1]}, share AS ("
        'SELECT function, "binary",'
        " coalesce(a.own_ns, 0) / greatest((SELECT sum(own_ns) FROM function0), 1) AS before,"
        " coalesce(b.own_ns, 0) / greatest((SELECT sum(own_ns) FROM function1), 1) AS after"
        ' FROM function0 a FULL JOIN function1 b USING (function, "binary")) '
        "SELECT * FROM share"
        " ORDER BY abs(after - before) DESC, 1, 2",
        parameters,
        MAX_ROWS,
        limit,
    )


def series(
    session: StoreTables, selection: Selection, name: str, points: int = MAX_POINTS
) -> pa.Table:
    """A metric's series, the first `MAX_SERIES` by node and labels, in at most `points` equal steps
    each: node, labels, time_ns (of the step), value (mean), least, most."""
    points = max(1, min(points, MAX_POINTS))
    step = max(1, -(-(selection.end_ns - selection.start_ns) // points))
    clause, parameters = selection.sql(kind=False, process=False)
    chosen = f"SELECT node, labels, time_ns, value FROM metric {clause} AND series = ?"
    found = session.arrow(
        f"WITH chosen AS ({chosen}), "
        "listed AS (SELECT DISTINCT node, labels FROM chosen ORDER BY node, labels"
        f" LIMIT {MAX_SERIES}) "
        "SELECT node, labels, ? + (time_ns - ?) // ? * ? AS time_ns, avg(value) AS value,"
        " min(value) AS least, max(value) AS most FROM chosen JOIN listed USING (node, labels)"
        " GROUP BY 1, 2, 3 ORDER BY 1, 2, 3",
        [*parameters, name, selection.start_ns, selection.start_ns, step, step],
    )
    if found.num_rows >= MAX_SERIES:  # each series has a row at least
        each = f"SELECT DISTINCT node, labels FROM ({chosen}) AS chosen"
        count_beyond(session, each, [*parameters, name], MAX_SERIES)
    return found


def nodes(session: StoreTables, selection: Selection) -> pa.Table:
    """Nodes that sent chunks: node, chunks, sample_rows, first_ns, last_ns, size_bytes, about
    (`capture` in the metadata of its latest chunk, JSON)."""
    clause, parameters = selection.sql("start_ns", kind=False, process=False)
    return bounded(
        session,
        "SELECT node, count(*) AS chunks, CAST(sum(sample_rows) AS BIGINT) AS sample_rows,"
        " min(start_ns) AS first_ns, max(end_ns) AS last_ns,"
        " CAST(sum(size_bytes) AS BIGINT) AS size_bytes, max_by(about, end_ns) AS about"
        f" FROM chunk {clause} GROUP BY node ORDER BY node",
        parameters,
        MAX_ROWS,
    )


def losses(session: StoreTables, selection: Selection) -> pa.Table:
    """Losses that agents counted, largest first: node, name, value."""
    clause, parameters = selection.sql(kind=False)
    return bounded(
        session,
        f"SELECT node, name, sum(value) AS value FROM event {clause} AND kind = 'loss'"
        " GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2",
        parameters,
        MAX_ROWS,
    )
