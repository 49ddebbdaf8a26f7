# SPDX-License-Identifier: Apache-2.0
"""Adds source lines and inlined functions to the tables of a capture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import pyarrow as pa

from sonde.query.schema import TABLES

Tables = dict[str, pa.Table]
Locations = Mapping[tuple[str, int], Sequence[tuple[str, str, int]]]
"""By (build id, offset in the file): (function, source file, line) of each function inlined there,
innermost first, then of the function that they are inlined into."""

INLINED = "inlined"
"""`kind` of the added frames."""


def offsets_without_line(tables: Tables) -> dict[str, list[int]]:
    """By build id: file offsets of the user frames without a source line."""
    found: dict[str, list[int]] = {}
    for row in tables["frame"].select(["kind", "build_id", "offset", "line"]).to_pylist():
        if row["kind"] == "user" and row["build_id"] and not row["line"]:
            found.setdefault(row["build_id"], []).append(row["offset"])
    return found


def with_lines(tables: Tables, locations: Locations) -> Tables:
    """The tables with source lines in `frame`, and inlined functions in `frame` and `stack`."""
    rows = []
    inlined_in: dict[int, list[int]] = {}  # ids of the frames inlined in a frame, by its id
    for row in tables["frame"].to_pylist():
        known = locations.get((row["build_id"], row["offset"])) if row["kind"] == "user" else None
        if known:
            *inlined, (function, file, line) = known
            row |= {"function": row["function"] or function, "file": file, "line": line}
            added = list(_inlined(row, inlined))
            inlined_in[row["frame_id"]] = [it["frame_id"] for it in added]
            rows += added
        rows.append(row)
    changed = dict(tables)
    changed["frame"] = _table("frame", {row["frame_id"]: row for row in rows}.values())
    changed["stack"] = _table("stack", _with_inlined(tables["stack"].to_pylist(), inlined_in))
    return changed


def _inlined(
    row: Mapping[str, Any], locations: Sequence[tuple[str, str, int]]
) -> Iterator[dict[str, Any]]:
    """Frames for the functions inlined in a frame, with ids made from its id and their depth."""
    for depth, (function, file, line) in enumerate(locations):
        name = f"{row['frame_id']}\0{depth}"
        number = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
        changes = {"kind": INLINED, "function": function, "file": file, "line": line}
        yield {**row, **changes, "frame_id": number or 1}  # 0 is no id


def _with_inlined(
    stacks: Iterable[dict[str, Any]], inlined_in: Mapping[int, Sequence[int]]
) -> Iterator[dict[str, Any]]:
    for row in stacks:
        ids = [it for frame in row["frame_ids"] for it in (*inlined_in.get(frame, ()), frame)]
        yield {**row, "frame_ids": ids}


def _table(name: str, rows: Iterable[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=TABLES[name])
