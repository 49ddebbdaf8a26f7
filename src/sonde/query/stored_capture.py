# SPDX-License-Identifier: Apache-2.0
"""What a store has of one node in a time, as a capture: whatever takes a `Capture` takes this.

Its clock is the time since 1970: `wall_offset_ns` is 0. Keys of stacks and frames are those of the
store. Spans and runs on devices are read where they overlap the selected time, other rows where
their time lies in it, of `process` and `thread` all rows in the files of that time. Of a selection
only its node and its time count.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sonde.errors import CaptureError, CaptureTooLarge
from sonde.limits import Budget
from sonde.query.capture import Capture, CaptureInfo
from sonde.query.schema import ADDED_LATER, TABLES, conform
from sonde.query.selection import Selection, StoreTables
from sonde.query.validation import frame_count

MAX_ROWS = 1_000_000
"""Of all tables together, `process` and `thread` included: what a server holds in memory for one
question."""
MAX_DEVICES = 64
"""Different ordinals (numbers of devices within a process). Each device is explained separately,
against the work of all others."""
_BYTES = 512 << 20
"""Memory for all rows and frames of stacks, checked once they are loaded."""
_INTERVALS = ("span", "device_run")
"""Tables with a start and an end."""
_RENAMED = {"frame_ids": "frame_keys", "frame_id": "key"}
"""Columns of captures, and what the store calls them."""
_KEY_COLUMNS = {"process": ("pid", "start_ns"), "thread": ("pid", "start_ns", "tid")}
"""Tables of which the last row of a key counts."""


class NothingStoredError(CaptureError):
    """There is nothing of a node in a time."""


def capture_of(session: StoreTables, selection: Selection) -> Capture:
    """What is stored of one node. Raises CaptureError (NothingStoredError, CaptureTooLarge, …)."""
    if len(selection.nodes) != 1:
        raise CaptureError("this question is about one node", "give its name as node=NAME")
    conditions = {
        name: _where(name, selection) for name in TABLES if name not in ("stack", "frame")
    }
    rows = 0
    for name, (clause, parameters) in conditions.items():
        counted = session.arrow(f"SELECT count(*) AS n FROM {name} {clause}", parameters)
        rows += counted.column("n")[0].as_py()
    if rows > MAX_ROWS:
        raise CaptureTooLarge(
            f"this time has {rows:,} rows, more than {MAX_ROWS:,}", "choose a shorter time"
        )
    tables = {
        name: _table(name, session, clause, parameters)
        for name, (clause, parameters) in conditions.items()
    }
    devices = pc.count_distinct(tables["device_run"].column("device")).as_py()
    if devices > MAX_DEVICES:
        raise CaptureTooLarge(
            f"this node has {devices:,} devices, more than {MAX_DEVICES}",
            "`sonde explain` on a recording has no such bound",
        )
    used = [one.column("stack_id") for one in tables.values() if "stack_id" in one.column_names]
    tables["stack"] = _dictionary("stack", session, used)
    frames = [pc.list_flatten(tables["stack"].column("frame_ids"))]
    tables["frame"] = _dictionary("frame", session, frames)
    budget = Budget("the selected time", packed_bytes=1, limit_bytes=_BYTES)
    budget.hold(64 * rows + 40 * frame_count(tables["stack"]))
    return Capture(_info(session, selection), tables, None)


def _where(name: str, selection: Selection) -> tuple[str, list[Any]]:
    """(WHERE clause, its parameters) for a table."""
    node, start_ns, end_ns = selection.nodes[0], selection.start_ns, selection.end_ns
    if name in _KEY_COLUMNS:
        return "WHERE node = ?", [node]
    if name in _INTERVALS:
        clause = "WHERE node = ? AND start_time_ns < ? AND end_time_ns >= ?"
        return clause, [node, end_ns, start_ns]
    return "WHERE node = ? AND time_ns >= ? AND time_ns < ?", [node, start_ns, end_ns]


def _dictionary(name: str, session: StoreTables, used: list[pa.ChunkedArray]) -> pa.Table:
    """The rows of `stack` or `frame` with the keys in `used`: the files have those of all nodes."""
    parts = [column.combine_chunks() for column in used]
    keys = pc.unique(pa.concat_arrays([pc.fill_null(part, 0) for part in parts]))
    signed = pa.array(keys.to_numpy(zero_copy_only=False).view(np.int64))
    clause = "WHERE key IN (SELECT key FROM chosen)"
    return _table(name, session, clause, [], pa.table({"key": signed}))


def _table(
    name: str,
    session: StoreTables,
    clause: str,
    parameters: list[Any],
    chosen: pa.Table | None = None,
) -> pa.Table:
    renamed = _RENAMED | {"stack_id": "key" if name == "stack" else "stack"}
    fields = list(TABLES[name])
    if ADDED_LATER[name]:
        # Where only earlier versions stored rows, these columns are missing.
        stored = session.arrow(f"SELECT * FROM {name} LIMIT 0", []).column_names
        absent = ADDED_LATER[name].difference(stored)
        fields = [field for field in fields if field.name not in absent]
    columns = ", ".join(
        f'"{renamed.get(field.name, field.name)}" AS "{field.name}"' for field in fields
    )
    sql = f"SELECT {columns} FROM {name} {clause}"
    if name in ("stack", "frame"):
        sql = f"SELECT {columns} FROM (SELECT DISTINCT ON (key) * FROM {name} {clause})"
    elif name in _KEY_COLUMNS:
        sql = f"SELECT {columns} FROM {name} {clause} ORDER BY time_ns"
    found = session.arrow(sql, parameters, chosen)
    decoded = {}
    for field in fields:
        column = found.column(field.name)
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        value_type = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        decoded[field.name] = column.cast(value_type, safe=False)
    table = conform(name, pa.table(decoded))
    if name in _KEY_COLUMNS:
        keys = list(
            zip(*(table.column(key).to_pylist() for key in _KEY_COLUMNS[name]), strict=True)
        )
        last = {key: row for row, key in enumerate(keys)}
        table = table.take(pa.array(last.values(), pa.int64()))
    return table.unify_dictionaries()


def _info(session: StoreTables, selection: Selection) -> CaptureInfo:
    found = session.arrow(
        "SELECT count(*) AS chunks, min(start_ns) AS first, max(end_ns) AS last,"
        " max_by(about, end_ns) AS about, coalesce(sum(size_bytes), 0) AS size FROM chunk"
        " WHERE node = ? AND start_ns < ? AND end_ns >= ?",
        [selection.nodes[0], selection.end_ns, selection.start_ns],
    ).to_pylist()[0]
    if not found["chunks"]:
        raise NothingStoredError("this node sent nothing in this time", "choose another time")
    try:
        about = json.loads(found["about"] or "{}")
    except ValueError:
        about = {}
    host = about.get("host") if isinstance(about, dict) else None
    return CaptureInfo(
        path=Path(selection.nodes[0]),
        size_bytes=int(found["size"]),
        id="",
        version="",
        host=host if isinstance(host, dict) else {},
        start_ns=max(selection.start_ns, found["first"]),
        end_ns=min(selection.end_ns, found["last"]),
        paused_ns=0,
        wall_offset_ns=0,
        chunks=found["chunks"],
        chunks_damaged=0,
        chunks_missing=0,
        damaged_bytes=0,
        tail_bytes=0,
        clean_end=True,
    )
