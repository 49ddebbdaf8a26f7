# SPDX-License-Identifier: Apache-2.0
"""Typed questions over a store: Parquet files of many nodes, of which the caller gives those of a
time.

The tables are those of a capture (abi/tables.json) as src/sonde/store/tables.py stores them: with
`node`, times since 1970, keys of stacks and frames by content. Every value of a caller is a
parameter, never text of the SQL. The engine may read the given directories and nothing else.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import duckdb
import pyarrow as pa

from sonde.errors import CaptureError, CaptureTooLarge
from sonde.query.bounded import bounded, count_beyond
from sonde.query.schema import TABLES

MAX_POINTS = 1_440
"""Points of a series: about as many as a screen has columns of pixels."""
MAX_STACKS = 20_000
"""Of one flame graph, the heaviest."""
MAX_STACK_FRAMES = 2_000_000
"""Frames of all stacks of one flame graph together."""
MAX_FRAMES = 100_000
"""Code locations of one answer."""
MAX_SERIES = 1_000
"""Of one metric, by node and labels."""
MAX_ROWS = 10_000
"""Of other answers."""
MAX_BYTES = 256 << 20
"""Of the rows of one statement: texts are as long as their senders like."""
_ROWS_AT_ONCE = 65_536
"""Rows that are fetched together: the deadline and `MAX_BYTES` are checked between."""
_AGAIN_S = 0.1
"""Time between interrupts of a statement that runs beyond the deadline."""
SUMS_VIEW = "sample_sums"
"""A view for questions whose answers are sums over the whole time: as `sample`, but one row may be
the sum of many (`rows` has how many) and has no thread. For each file of `sample` it reads either
that file or the file of `SUMMED_TABLE` with its sums."""
SUMMED_TABLE = "sample_summed"
"""The table whose files have such sums, one for each file of `sample` that is summed up
(src/sonde/store/tables.py)."""
TRACED_SUMS = (
    "(SELECT *, CAST(0 AS DOUBLE) AS weight_bytes, CAST(1 AS BIGINT) AS rows FROM traced) AS one"
)
"""In place of `SUMS_VIEW`: the samples and waits of traced requests."""
_OWNERS = ("user", "pod", "namespace", "job", "comm", "exe", "container", "unit")
"""Columns of `process` that a selection may name."""


class QueryTimedOutError(CaptureError):
    """A query took longer than it may."""


class UnreadableStoreError(CaptureError):
    """The engine cannot answer: a file may be damaged, or has just been removed."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows a question reads; an empty field does not restrict. Times are ns since 1970, the
    end exclusive."""

    start_ns: int
    end_ns: int
    kind: str = "cpu"
    """As in the column `kind` of `sample`."""
    nodes: Sequence[str] = ()
    pids: Sequence[int] = ()
    names: Sequence[str] = ()
    """Kernels, reasons of waits, functions of calls."""
    owners: Mapping[str, str] | None = None
    """Columns of `process` (of `_OWNERS`) and the values that they must have."""
    trace: str = ""
    """The trace id of a request: only its samples and waits (`sums`)."""

    @property
    def sums(self) -> str:
        """What sums of weights are read from: `SUMS_VIEW`, or the samples of traced requests."""
        return TRACED_SUMS if self.trace else SUMS_VIEW

    def sql(
        self, time: str = "time_ns", kind: bool = True, process: bool = True
    ) -> tuple[str, list[Any]]:
        """(WHERE clause, its parameters).

        `time`: the column that must be between start and end; `kind`: whether `kind` and `names`
        apply; `process`: whether `pids` and `owners` do. Raises CaptureError.
        """
        required = [f"{time} >= ?", f"{time} < ?"]
        parameters: list[Any] = [self.start_ns, self.end_ns]
        if kind:
            required.append("kind = ?")
            parameters.append(self.kind)
        if kind and self.trace:
            required.append("trace_id = ?")
            parameters.append(self.trace)
        allowed: tuple[tuple[str, Sequence[Any]], ...] = (
            ("node", self.nodes),
            ("pid", self.pids if process else ()),
            ("name", self.names if kind else ()),
        )
        for column, values in allowed:
            if values:
                required.append(f"{column} IN ({', '.join('?' * len(values))})")
                parameters += values
        if self.owners and process:
            conditions = []
            for column, value in self.owners.items():
                if column not in _OWNERS:
                    raise CaptureError(f"no owner is called {column}", f"use {', '.join(_OWNERS)}")
                conditions.append(f'"{column}" = ?')
                parameters.append(value)
            required.append(
                "(node, pid, start_ns) IN (SELECT node, pid, start_ns FROM process"
                f" WHERE {' AND '.join(conditions)})"
            )
        return f"WHERE {' AND '.join(required)}", parameters


class StoreTables(Protocol):
    """An engine over the tables of a store, which questions run SQL on. The SQL is DuckDB's, as far
    as sqlglot can translate it to Spark's: no CTE within a CTE, no QUALIFY, no `?::TYPE`."""

    def arrow(
        self, sql: str, parameters: Sequence[Any] = (), chosen: pa.Table | None = None
    ) -> pa.Table:
        """Rows of a query as columns. `chosen`: a table that the query may read by this name.

        Raises CaptureError.
        """

    def check(self) -> None:
        """Raises QueryTimedOutError where the answer has taken too long."""

    def leave_out(self, rows: int) -> None:
        """Count rows that an answer has no room for."""


class StoredSession:
    """DuckDB over the files that one question reads. Not thread-safe."""

    def __init__(
        self,
        allowed: Path | Sequence[Path],
        files: Mapping[str, Sequence[Path]],
        memory_bytes: int = 256 << 20,
        spill: Path | None = None,
    ) -> None:
        """`allowed`: the directories of the tenant; `files`: by table, those that the question may
        have to read; `spill`: a directory for what does not fit into memory, None for none."""
        self._connection = duckdb.connect(
            config={
                "memory_limit": f"{memory_bytes >> 10}KiB",
                "threads": 2,
                "temp_directory": str(spill) if spill else "",
                "max_temp_directory_size": "2GiB",
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
            }
        )
        self.rows_left_out = 0
        """Rows that answers had no room for."""
        self._ends_s = math.inf
        self._files = files
        self._views: set[str] = set()
        own = [allowed] if isinstance(allowed, Path) else allowed
        folders = ", ".join(_literal(path) for path in (*own, spill) if path)
        self._connection.execute(f"SET allowed_directories = [{folders}]")
        self._connection.execute("SET enable_external_access = false")
        self._connection.execute("SET lock_configuration = true")

    @property
    def files(self) -> Mapping[str, Sequence[Path]]:
        """The files by table, as they were given."""
        return self._files

    def leave_out(self, rows: int) -> None:
        """Count rows that an answer has no room for."""
        self.rows_left_out += rows

    def close(self) -> None:
        """Release the engine."""
        self._connection.close()

    def _make_views(self, sql: str) -> None:
        """Create the views that a query names, not the others: each view costs reading the footers
        of all files of its table."""
        for name in (*TABLES, "chunk", SUMS_VIEW):
            if name in self._views or not re.search(rf"\b{name}\b", sql):
                continue
            self._views.add(name)
            paths = self._files.get(name, ())
            if name == SUMS_VIEW:
                self._make_sums(self._files.get(name if name in self._files else "sample", ()))
            elif paths:
                self._connection.execute(f'CREATE VIEW "{name}" AS SELECT * FROM {_source(paths)}')
            else:
                self._connection.register(name, empty_table(name))

    def _make_sums(self, paths: Sequence[Path]) -> None:
        columns = "SELECT *, CAST(1 AS BIGINT) AS rows FROM sample"
        # Files lie at TABLE/day=…/hour=…/NAME.
        if any(path.parts[-4] == SUMMED_TABLE for path in paths):
            columns = f"SELECT * REPLACE (coalesce(rows, 1) AS rows) FROM {_source(paths)}"
        else:
            self._make_views("sample")
        self._connection.execute(f'CREATE VIEW "{SUMS_VIEW}" AS {columns}')

    def arrow(
        self, sql: str, parameters: Sequence[Any] = (), chosen: pa.Table | None = None
    ) -> pa.Table:
        """Rows of a query as columns. `chosen`: a table that the query may read by this name.

        Raises QueryTimedOutError, CaptureTooLarge, UnreadableStoreError.
        """
        if chosen is not None:
            self._connection.register("chosen", chosen)
        try:
            with _errors():
                self._make_views(sql)
                self.check()
                return self._read(self._connection.sql(sql, params=list(parameters)))
        finally:
            if chosen is not None:
                self._connection.unregister("chosen")

    def _read(self, found: duckdb.DuckDBPyRelation) -> pa.Table:
        reader = found.to_arrow_reader(_ROWS_AT_ONCE)
        batches = []
        size = 0
        try:
            for batch in reader:
                self.check()
                size += batch.nbytes
                if size > MAX_BYTES:
                    raise _too_large()
                batches.append(batch)
        except (OSError, pa.ArrowException) as error:
            # Errors of the engine after the first rows come through Arrow, as text.
            raise _engine_error(str(error)) from error
        return pa.Table.from_batches(batches, reader.schema)

    def check(self) -> None:
        """Raises QueryTimedOutError beyond the deadline. Called between statements and batches: the
        engine itself is interrupted (`deadline`)."""
        if time.monotonic() > self._ends_s:
            raise _timed_out()

    @contextmanager
    def deadline(self, seconds: float) -> Iterator[None]:
        """Within this context, statements that still run, or begin, after `seconds` are
        interrupted."""
        self._ends_s = time.monotonic() + seconds
        done = threading.Event()

        def interrupt() -> None:
            wait_s = seconds
            while not done.wait(wait_s):
                # An interrupt before a statement has begun is lost.
                self._connection.interrupt()
                wait_s = _AGAIN_S

        watch = threading.Thread(target=interrupt, name="sonde-deadline", daemon=True)
        watch.start()
        try:
            yield
        finally:
            done.set()
            watch.join()  # so that it does not interrupt a connection that is closed
            self._ends_s = math.inf


def _source(paths: Sequence[Path]) -> str:
    listed = ", ".join(map(_literal, paths))
    return f"read_parquet([{listed}], union_by_name = true, hive_partitioning = false)"


def _literal(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"


def _timed_out() -> QueryTimedOutError:
    return QueryTimedOutError(
        "the query took longer than it may", "choose a shorter time or fewer nodes"
    )


def _too_large() -> CaptureTooLarge:
    return CaptureTooLarge(
        "the query needs more memory than it may use", "choose a shorter time or fewer nodes"
    )


def _unanswerable(text: str) -> UnreadableStoreError:
    line = text.split("\n", 1)[0][:160]
    return UnreadableStoreError(f"the store cannot answer this: {line}", "try again")


def _engine_error(text: str) -> CaptureError:
    if text.startswith("INTERRUPT"):
        return _timed_out()
    return _too_large() if text.startswith("Out of Memory") else _unanswerable(text)


_UNREADABLE = (
    duckdb.OutOfRangeException,
    duckdb.ConversionException,
    # Raised for files that are no valid Parquet, by what is wrong with them.
    duckdb.IOException,
    duckdb.InvalidInputException,
    duckdb.SerializationException,
)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except duckdb.InterruptException:
        raise _timed_out() from None
    except _UNREADABLE as error:
        raise _unanswerable(str(error)) from error
    except duckdb.OutOfMemoryException:
        raise _too_large() from None
    except duckdb.Error as error:
        if type(error) is not duckdb.Error:
            raise
        # An invalid footer raises the base class itself; subclasses that come here are programming
        # errors.
        raise _unanswerable(str(error)) from error


def empty_table(name: str) -> pa.Table:
    """A table of the store without rows."""
    added = {"node": pa.string(), "key": pa.int64(), "time_ns": pa.int64()}
    if name == "chunk":
        names = ("seq", "start_ns", "end_ns", "received_ns", "size_bytes", "sample_rows")
        return pa.schema({"node": pa.string(), "capture": pa.string(), "about": pa.string(),
                          **dict.fromkeys(names, pa.int64())}).empty_table()  # fmt: skip
    fields = {
        ("stack" if field.name == "stack_id" else field.name): _stored_type(field.type)
        for field in TABLES[name]
    }
    if name == "stack":
        fields = {"frame_keys": pa.list_(pa.int64()), "complete": pa.bool_()}
    return pa.schema(added | fields).empty_table()


def _stored_type(kind: pa.DataType) -> pa.DataType:
    """The type with which the store keeps a column of this type."""
    if pa.types.is_dictionary(kind):
        return pa.string()
    return pa.int64() if pa.types.is_integer(kind) else kind


GROUPS: Mapping[str, tuple[str, ...]] = {
    "process": ("node", "pid", "start_ns"),
    "thread": ("node", "pid", "start_ns", "tid"),
}
"""What a flame graph can be split by (`by`): the columns of `sample` that identify each part."""


def flame_graph(
    session: StoreTables, selection: Selection, limit: int = MAX_STACKS, by: str = ""
) -> pa.Table:
    """Stacks, heaviest first: stack (key), n, ns, bytes, frame_keys (leaf first). At most `limit`,
    and `MAX_STACK_FRAMES` frames: `totals` shows what is missing.

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
        "once AS (SELECT key, any_value(frame_keys) AS frame_keys FROM stack"
        " WHERE key IN (SELECT stack FROM weight) GROUP BY key), "
        "listed AS (SELECT w.stack, w.n, w.ns, w.bytes, coalesce(o.frame_keys, []) AS frame_keys"
        " FROM weight w LEFT JOIN once o ON w.stack = o.key), "
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
        "once AS (SELECT key, any_value(frame_keys) AS frame_keys FROM stack"
        " WHERE key IN (SELECT stack FROM weight) GROUP BY key), "
        f"named AS (SELECT {key}, arg_max(comm, time_ns) AS comm FROM {by} GROUP BY {key}), "
        "listed AS (SELECT w.stack, w.n, w.ns, w.bytes,"
        f" {whose}coalesce(nullif(m.comm, ''), '{by}') || ' (' || w.{number} || ')' AS group_name,"
        " coalesce(o.frame_keys, []) AS frame_keys FROM weight w LEFT JOIN once o"
        f" ON w.stack = o.key LEFT JOIN named m USING ({key})), "
        "placed AS (SELECT *, sum(array_length(frame_keys))"
        " OVER (ORDER BY ns DESC, bytes DESC, stack, group_name) AS frames_so_far FROM listed) "
        "SELECT stack, n, ns, bytes, frame_keys, group_name FROM placed"
        f" WHERE frames_so_far <= {MAX_STACK_FRAMES}"
        " ORDER BY ns DESC, bytes DESC, stack, group_name",
        parameters,
    )


def frames(session: StoreTables, keys: Sequence[int]) -> pa.Table:
    """The code locations with these keys: key, kind, function, binary, build_id, file, line."""
    return session.arrow(
        "SELECT key, any_value(kind) AS kind, any_value(function) AS function,"
        ' any_value("binary") AS "binary", any_value(file) AS file, any_value(line) AS line'
        " FROM frame WHERE key IN (SELECT key FROM chosen) GROUP BY key ORDER BY key",
        chosen=pa.table({"key": pa.array(keys, pa.int64())}),
    )


def known_frames(session: StoreTables) -> pa.Table:
    """The code locations of the days of a selection, the first `MAX_FRAMES` by key: as `frames`,
    without build ids."""
    return session.arrow(
        'SELECT DISTINCT key, kind, function, "binary", file, line FROM frame'
        f" ORDER BY key LIMIT {MAX_FRAMES}"
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


_MEMBERS = (
    "weight{at} AS (SELECT stack, sum(weight_ns) AS ns FROM {sums} {clause} GROUP BY stack), "
    "once{at} AS (SELECT key, any_value(frame_keys) AS frame_keys FROM stack"
    " WHERE key IN (SELECT stack FROM weight{at}) GROUP BY key), "
    "member{at} AS (SELECT DISTINCT key AS stack, unnest(frame_keys) AS frame FROM once{at}), "
    "leaf{at} AS (SELECT key AS stack, frame_keys[1] AS frame FROM once{at}), "
    "own{at} AS (SELECT frame, sum(ns) AS ns FROM leaf{at} JOIN weight{at} USING (stack)"
    " GROUP BY frame), "
    "whole{at} AS (SELECT frame, sum(ns) AS ns FROM member{at} JOIN weight{at} USING (stack)"
    " GROUP BY frame), "
    'known{at} AS (SELECT key, any_value(function) AS function, any_value("binary") AS "binary"'
    " FROM frame GROUP BY key), "
    "named{at} AS (SELECT key, \"binary\", CASE WHEN function <> '' THEN function"
    " WHEN \"binary\" LIKE '[%' THEN \"binary\" WHEN \"binary\" <> '' THEN '[' || \"binary\" || ']'"
    " END AS function FROM known{at}), "
    "function{at} AS ("
    "SELECT coalesce(n.function, '[unknown]') AS function,"
    ' coalesce(n."binary", \'\') AS "binary",'
    " sum(coalesce(o.ns, 0)) AS own_ns, sum(w.ns) AS total_ns"
    " FROM whole{at} w LEFT JOIN own{at} o USING (frame) LEFT JOIN named{at} n ON n.key = w.frame"
    " GROUP BY 1, 2)"
)
"""Functions of a selection, as the part of a WITH clause that ends in the table `function{at}`;
`{at}`: a suffix that makes names distinct. `member`: each code location of a stack once; `own`,
`whole`: time in a location itself, and with what it called."""


def top_functions(session: StoreTables, selection: Selection, limit: int = 50) -> pa.Table:
    """Functions by own (self) time, at most `limit`: function, binary, own_ns, total_ns. Code
    without a name is one function a binary, called [BINARY] as in a flame graph.

    A function that is twice in a stack at two lines counts twice in `total_ns`.
    """
    clause, parameters = selection.sql()
    members = _MEMBERS.format(sums=selection.sums, clause=clause, at="")
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
        parts.append(_MEMBERS.format(sums=selection.sums, clause=clause, at=at))
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
