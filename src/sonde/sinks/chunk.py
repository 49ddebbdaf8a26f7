# SPDX-License-Identifier: Apache-2.0
"""Collects the rows of one chunk and encodes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache

from sonde import _native

Row = tuple[object, ...]


@cache
def columns_of(table: str) -> tuple[str, ...]:
    """Columns of a table in the order in which rows list them."""
    contract = json.loads(_native.tables_contract())
    return tuple(column[0] for column in contract["tables"][table]["columns"])


class ChunkBuilder:
    """Rows of one chunk, by table, in the column order of abi/tables.json."""

    def __init__(self, start_ns: int) -> None:
        self.start_ns = start_ns
        self.rows: dict[str, list[Row]] = {}
        self.parts: dict[str, list[Mapping[str, object]]] = {}

    def add(self, table: str, rows: Iterable[Row]) -> None:
        """Append rows."""
        self.rows.setdefault(table, []).extend(rows)

    def add_part(self, table: str, columns: Mapping[str, object]) -> None:
        """Append rows given as whole columns."""
        self.parts.setdefault(table, []).append(columns)

    def encode(self, meta: Mapping[str, object]) -> bytes:
        """The finished chunk."""
        tables: list[tuple[str, list[Mapping[str, object]]]] = []
        for table in sorted({*self.rows, *self.parts}):
            parts = list(self.parts.get(table, ()))
            if rows := self.rows.get(table):
                parts.append(
                    dict(zip(columns_of(table), map(list, zip(*rows, strict=True)), strict=True))
                )
            tables.append((table, parts))
        return _native.encode_chunk(json.dumps(meta), tables)
