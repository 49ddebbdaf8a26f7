# SPDX-License-Identifier: Apache-2.0
"""Arrow schemas of the tables of a chunk; a test compares them with abi/tables.json.

A chunk may come from any version of the writer: unknown columns are ignored, a missing column that
was added in a later version is filled with its default, and every column is cast to the type given
here. Repeating strings are dictionary-encoded, because a capture may have millions of rows.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from sonde.model.owner import OWNER_COLUMNS

_U32 = pa.uint32()
_U64 = pa.uint64()
_F64 = pa.float64()
_TEXT = pa.string()
_NAME = pa.dictionary(pa.int32(), pa.string())
"""A string that many rows have in common."""

USAGE_COUNTERS = (
    *("cpu_ns", "runqueue_ns", "runs", "voluntary", "involuntary", "migrations"),
    *("minor_faults", "major_faults", "read_bytes", "written_bytes"),
    *("reclaims", "reclaim_ns", "reclaimed_pages"),
)
"""Columns of `usage` that are counters: rows are summed."""

TABLES: dict[str, pa.Schema] = {
    "sample": pa.schema(
        {
            "time_ns": _U64,
            "kind": _NAME,
            "name": _NAME,
            "pid": _U32,
            "start_ns": _U64,
            "tid": _U32,
            "stack_id": _U64,
            "weight_count": _F64,
            "weight_ns": _F64,
            "weight_bytes": _F64,
        }
    ),
    "traced": pa.schema(
        {
            "time_ns": _U64,
            "kind": _NAME,
            "name": _NAME,
            "trace_id": _NAME,
            "span_id": _NAME,
            "pid": _U32,
            "start_ns": _U64,
            "tid": _U32,
            "stack_id": _U64,
            "weight_count": _F64,
            "weight_ns": _F64,
        }
    ),
    "activity": pa.schema(
        {
            "time_ns": _U64,
            "kind": _NAME,
            "name": _NAME,
            "api": _NAME,
            "op": _NAME,
            "direction": _NAME,
            "status": pa.int32(),
            "pid": _U32,
            "start_ns": _U64,
            "tid": _U32,
            "count": _U64,
            "ns": _U64,
            "bytes": _U64,
            "max_ns": _U64,
            "waker_pid": _U32,
            "waker_tid": _U32,
        }
    ),
    "span": pa.schema(
        {
            "start_time_ns": _U64,
            "end_time_ns": _U64,
            "kind": _NAME,
            "name": _NAME,
            "op": _NAME,
            "direction": _NAME,
            "status": pa.int32(),
            "pid": _U32,
            "start_ns": _U64,
            "tid": _U32,
            "stack_id": _U64,
            "bytes": _U64,
            "waker_pid": _U32,
            "waker_tid": _U32,
        }
    ),
    "device_run": pa.schema(
        {
            "start_time_ns": _U64,
            "end_time_ns": _U64,
            "kind": _NAME,
            "name": _NAME,
            "source": _NAME,
            "pid": _U32,
            "start_ns": _U64,
            "tid": _U32,
            "stack_id": _U64,
            "correlation": _U64,
            "weight": _F64,
            "window": _U64,
            "device": _U32,
            "stream": _U32,
            "direction": _NAME,
            "bytes": _U64,
            "grid": _NAME,
            "block": _NAME,
            "shared_bytes": _U64,
            "registers": _U32,
        }
    ),
    "stack": pa.schema({"stack_id": _U64, "frame_ids": pa.list_(_U64), "complete": pa.bool_()}),
    "frame": pa.schema(
        {
            "frame_id": _U64,
            "kind": _TEXT,
            "function": _TEXT,
            "binary": _TEXT,
            "build_id": _TEXT,
            "offset": _U64,
            "file": _TEXT,
            "line": _U32,
            "origin": _TEXT,
        }
    ),
    "process": pa.schema(
        {
            "pid": _U32,
            "start_ns": _U64,
            "ppid": _U32,
            "comm": _TEXT,
            "exe": _TEXT,
            **{column: _U32 if column == "inner_pid" else _TEXT for column in OWNER_COLUMNS},
            "command": _TEXT,
        }
    ),
    "thread": pa.schema({"pid": _U32, "start_ns": _U64, "tid": _U32, "comm": _TEXT}),
    "usage": pa.schema(
        {
            "time_ns": _U64,
            "pid": _U32,
            "start_ns": _U64,
            **dict.fromkeys(USAGE_COUNTERS, _U64),
        }
    ),
    "metric": pa.schema({"time_ns": _U64, "series": _NAME, "labels": _NAME, "value": _F64}),
    "event": pa.schema(
        {
            "time_ns": _U64,
            "kind": _NAME,
            "name": _NAME,
            "pid": _U32,
            "start_ns": _U64,
            "value": _F64,
            "text": _TEXT,
        }
    ),
}

ADDED_LATER: dict[str, frozenset[str]] = {
    **{name: frozenset() for name in TABLES},
    "frame": frozenset({"origin"}),
    "process": frozenset({*OWNER_COLUMNS, "command"}),
    "span": frozenset({"waker_pid", "waker_tid"}),
}
"""Columns that a chunk of version 1 may lack."""


def conform(name: str, table: pa.Table) -> pa.Table:
    """Cast a table read from a chunk to its schema; nulls become 0 or ''.

    Raises KeyError for a missing column that every version writes, and pyarrow.ArrowException for
    a column that cannot be cast.
    """
    schema = TABLES[name]
    columns = []
    for field in schema:
        if field.name not in table.column_names:
            if field.name not in ADDED_LATER[name]:
                raise KeyError(field.name)
            columns.append(_default(field.type, table.num_rows))
            continue
        column = table.column(field.name)
        value_type = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if column.type not in (value_type, field.type):
            column = column.cast(value_type)
        if column.null_count and not pa.types.is_nested(value_type):
            column = pc.fill_null(column, _zero(value_type))
        if column.type != field.type:
            column = column.dictionary_encode()
        columns.append(column)
    return pa.table(columns, schema=schema)


def _zero(kind: pa.DataType) -> pa.Scalar:
    if pa.types.is_string(kind):
        return pa.scalar("", kind)
    return pa.scalar(0).cast(kind)


def _default(kind: pa.DataType, rows: int) -> pa.Array:
    if pa.types.is_dictionary(kind):
        return pa.repeat(_zero(kind.value_type), rows).dictionary_encode()
    if pa.types.is_list(kind):
        return pa.array([[]] * rows, kind)
    return pa.repeat(_zero(kind), rows)
