# SPDX-License-Identifier: Apache-2.0
"""Questions over a store, answered by Apache Spark in place of DuckDB: same functions, same SQL.

sqlglot translates DuckDB's dialect into Spark's. pyspark and sqlglot are installed with the extra
`spark` of the package alone; nothing else of Sonde imports this module. docs/guide/spark.md has an
example.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import sqlglot
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812, the customary name
from sqlglot.errors import SqlglotError

from sonde.errors import CaptureError, CaptureTooLarge
from sonde.query.schema import ADDED_LATER, TABLES
from sonde.query.selection import SUMMED_TABLE, SUMS_VIEW
from sonde.query.stored_session import MAX_BYTES, empty_table

_SETTINGS = {
    "spark.sql.ansi.enabled": "true",  # as DuckDB: an overflow is an error, no null
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.caseSensitive": "true",
}


class SparkTables:
    """The tables of a store on Spark (`StoreTables`), for `sonde.query.stored` and the modules
    beside it.

    Not thread-safe. It works in a new session of the same cluster, so that its views and settings
    stay separate from the caller's.
    """

    def __init__(self, spark: SparkSession, files: Mapping[str, Sequence[str]]) -> None:
        """`files`: by table, addresses that Spark reads (sonde.store.readable_files)."""
        self.session = spark
        self._spark = spark.newSession()
        for name, value in _SETTINGS.items():
            self._spark.conf.set(name, value)
        self._files = files
        self.rows_left_out = 0
        """Rows that answers had no room for."""
        self._views: set[str] = set()

    def arrow(
        self, sql: str, parameters: Sequence[Any] = (), chosen: pa.Table | None = None
    ) -> pa.Table:
        """Rows of a query as columns. `chosen`: a table that the query may read by this name.

        Raises CaptureError, CaptureTooLarge.
        """
        try:
            text = sqlglot.transpile(sql, read="duckdb", write="spark")[0]
            self._make_views(sql)
            if chosen is not None:
                self._spark.createDataFrame(chosen).createOrReplaceTempView("chosen")
            found = self._spark.sql(text, args=[_literal(one) for one in parameters]).toArrow()
        except (PySparkException, Py4JError, SqlglotError) as error:
            line = str(error).split("\n", 1)[0][:160]
            raise CaptureError(f"Spark cannot answer this: {line}", "see Spark's log") from error
        finally:
            if chosen is not None:
                self._spark.catalog.dropTempView("chosen")
        if found.nbytes > MAX_BYTES:
            raise CaptureTooLarge("the answer is too large", "choose a shorter time or fewer nodes")
        return found

    def leave_out(self, rows: int) -> None:
        """Count rows that an answer has no room for."""
        self.rows_left_out += rows

    def check(self) -> None:
        """Does nothing: Spark has its own time limits."""

    def _make_views(self, sql: str) -> None:
        for name in (*TABLES, "chunk", SUMS_VIEW):
            if name not in self._views and re.search(rf"\b{name}\b", sql):
                self._views.add(name)
                self._table(name).createOrReplaceTempView(name)

    def _table(self, name: str) -> DataFrame:
        """The rows of a table, or of `SUMS_VIEW`, as `StoredSession` makes them."""
        paths = self._files.get(name, ())
        if name != SUMS_VIEW:
            if not paths:
                return self._spark.createDataFrame(empty_table(name))
            found = self._read(paths)
            added = ADDED_LATER.get(name, frozenset()).difference(found.columns, {"inner_pid"})
            if name == "process":  # only earlier versions wrote these files
                for column in sorted(added):
                    found = found.withColumn(column, F.lit(None).cast("string"))
            return found
        paths = paths or self._files.get("sample", ())
        if any(f"/{SUMMED_TABLE}/" in path for path in paths):
            rows = F.coalesce(F.col("rows"), F.lit(1).cast("bigint"))
            return self._read(paths).withColumn("rows", rows)
        self._make_views("sample")
        return self._spark.table("sample").withColumn("rows", F.lit(1).cast("bigint"))

    def _read(self, paths: Sequence[str]) -> DataFrame:
        """Rows of files whose columns may differ: a newer version of Sonde writes more."""
        return self._spark.read.option("mergeSchema", "true").parquet(*paths)


def _literal(value: Any) -> Any:
    return F.array(*map(F.lit, value)) if isinstance(value, list) else value
