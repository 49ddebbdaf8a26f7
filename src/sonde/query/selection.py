# SPDX-License-Identifier: Apache-2.0
"""Which rows a question over a store reads, and what it may ask of an engine.

Every value of a caller is a parameter, never text of the SQL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from sonde.errors import CaptureError

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
OWNERS = ("user", "pod", "namespace", "job", "comm", "exe", "container", "unit")
"""Columns of `process` by which a selection can choose processes."""


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
    """Columns of `process` (of `OWNERS`) and the values that they must have."""
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
                if column not in OWNERS:
                    raise CaptureError(f"no owner is called {column}", f"use {', '.join(OWNERS)}")
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
