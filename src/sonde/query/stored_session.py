# SPDX-License-Identifier: Apache-2.0
"""DuckDB over the files of a store that one question reads.

Each session may use so much memory and time, and read the given directories and nothing else. Views
have the tables of a capture (abi/tables.json) as src/sonde/store/tables.py stores them.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from sonde.errors import CaptureError, CaptureTooLarge
from sonde.query.databases import Databases, database
from sonde.query.schema import ADDED_LATER, TABLES
from sonde.query.selection import SUMMED_TABLE, SUMS_VIEW

MAX_BYTES = 256 << 20
"""Of the rows of one statement: texts are as long as their senders like."""
_ROWS_AT_ONCE = 2_048
"""Rows that are fetched together: the deadline and `MAX_BYTES` are checked between. Each may have
several texts of 64 KiB."""
_AGAIN_S = 0.1
"""Time between interrupts of a statement that runs beyond the deadline."""


class QueryTimedOutError(CaptureError):
    """A query took longer than it may."""


class UnreadableStoreError(CaptureError):
    """The engine cannot answer: a file may be damaged, or has just been removed."""


class StoredSession:
    """DuckDB over the files that one question reads. Not thread-safe."""

    def __init__(
        self,
        allowed: Path | Sequence[Path],
        files: Mapping[str, Sequence[Path]],
        memory_bytes: int = 256 << 20,
        spill: Path | None = None,
        databases: Databases | None = None,
    ) -> None:
        """`allowed`: the directories of the tenant; `files`: by table, those that the question may
        have to read; `spill`: a directory for what does not fit into memory, None for none;
        `databases`: where they are made ahead."""
        self._connection = databases.take() if databases is not None else database()
        self._connection.execute(f"SET memory_limit = '{memory_bytes >> 10}KiB'")
        self._connection.execute(f"SET temp_directory = {_literal(spill) if spill else repr('')}")
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
                columns = ", ".join(("*", *self._absent(name, paths)))
                rows = f"SELECT {columns} FROM {_source(paths)}"
                self._connection.execute(f'CREATE VIEW "{name}" AS {rows}')
            else:
                self._connection.register(name, empty_table(name))

    def _absent(self, name: str, paths: Sequence[Path]) -> list[str]:
        """SQL for the columns of `process` that none of the files has, as only earlier versions
        wrote them."""
        if name != "process":
            return []
        found = self._connection.sql(f"SELECT * FROM {_source(paths)} LIMIT 0").columns
        absent = sorted(ADDED_LATER[name].difference(found))
        return [f'CAST(NULL AS VARCHAR) AS "{one}"' for one in absent if one != "inner_pid"]

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
        finally:
            reader.close()  # the connection takes no statement while there are rows to come
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
