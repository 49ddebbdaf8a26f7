# SPDX-License-Identifier: Apache-2.0
"""What a store has of one node in a time, as a capture: everything that reads captures reads it.

Its clock is the time since 1970: `wall_offset_ns` is 0. Keys of stacks and frames are those of the
store. Rows count where their interval overlaps the selected time.
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
from sonde.query.stored import Selection, StoreTables
from sonde.query.validation import frame_count

MAX_ROWS = 1_000_000
"""Of all tables together: what a server holds in memory for one question."""
MAX_DEVICES = 64
"""Each is explained by itself, beside the work of all others."""
_BYTES = 512 << 20
_INTERVALS = ("span", "device_run")
_RENAMED = {"frame_ids": "frame_keys", "frame_id": "key"}
_KEY_COLUMNS = {"process": ("pid", "start_ns"), "thread": ("pid", "start_ns", "tid")}


class NothingStoredError(CaptureError):
    """There is nothing of a node in a time."""


def capture_of(session: StoreTables, wanted: Selection) -> Capture:
    """The rows of one node between two times. Raises CaptureError, CaptureTooLarge."""
    if len(wanted.nodes) != 1:
        raise CaptureError("this question is about one node", "give its name as node=NAME")
    conditions = {name: _where(name, wanted) for name in TABLES if name not in ("stack", "frame")}
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
    budget = Budget("the selected time", 1, _BYTES)
    budget.hold(64 * rows + 40 * frame_count(tables["stack"]))
    return Capture(_info(session, wanted), tables, None)


def _where(name: str, wanted: Selection) -> tuple[str, list[Any]]:
    node = wanted.nodes[0]
    if name in _KEY_COLUMNS:
        return "WHERE node = ?", [node]
    if name in _INTERVALS:
        clause = "WHERE node = ? AND start_time_ns < ? AND end_time_ns >= ?"
        return clause, [node, wanted.end_ns, wanted.start_ns]
    return "WHERE node = ? AND time_ns >= ? AND time_ns < ?", [node, wanted.start_ns, wanted.end_ns]


def _dictionary(name: str, session: StoreTables, used: list[pa.ChunkedArray]) -> pa.Table:
    """The rows of `stack` or `frame` with the keys that are used: a day has those of all nodes."""
    parts = [whole_keys.combine_chunks() for whole_keys in used]
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
        # What was stored by earlier versions only lacks their columns.
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


def _info(session: StoreTables, wanted: Selection) -> CaptureInfo:
    found = session.arrow(
        "SELECT count(*) AS chunks, min(start_ns) AS first, max(end_ns) AS last,"
        " max_by(about, end_ns) AS about, coalesce(sum(size_bytes), 0) AS size FROM chunk"
        " WHERE node = ? AND start_ns < ? AND end_ns >= ?",
        [wanted.nodes[0], wanted.end_ns, wanted.start_ns],
    ).to_pylist()[0]
    if not found["chunks"]:
        raise NothingStoredError("this node sent nothing in this time", "choose another time")
    try:
        about = json.loads(found["about"] or "{}")
    except ValueError:
        about = {}
    host = about.get("host") if isinstance(about, dict) else None
    return CaptureInfo(
        path=Path(wanted.nodes[0]),
        size_bytes=int(found["size"]),
        id="",
        version="",
        host=host if isinstance(host, dict) else {},
        start_ns=max(wanted.start_ns, found["first"]),
        end_ns=min(wanted.end_ns, found["last"]),
        paused_ns=0,
        wall_offset_ns=0,
        chunks=found["chunks"],
        chunks_damaged=0,
        chunks_missing=0,
        damaged_bytes=0,
        tail_bytes=0,
        clean_end=True,
    )
