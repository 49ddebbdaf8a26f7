# SPDX-License-Identifier: Apache-2.0
"""Collects the rows of one chunk and encodes them."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final

from sonde import _native

Row = tuple[Any, ...]
MIN_COMPACTED: Final = 512
"""Rows of a table from which on they are made a part: each part takes some hundred bytes."""
PACKED_LEVEL: Final = 6
"""zstd's level where bytes count more than CPU time: 8 % less than by the usual 3, for some 13 ms
more per MB of rows."""
_ARRAYS: Final = {"u64": "Q", "u32": "I", "i32": "i", "f64": "d"}
"""Types of columns (abi/tables.json) as type codes of `array`."""


@cache
def columns_of(table: str) -> tuple[str, ...]:
    """Columns of a table in the order in which rows list them."""
    contract = json.loads(_native.tables_contract())
    return tuple(column[0] for column in contract["tables"][table]["columns"])


@cache
def _types_of(table: str) -> tuple[str, ...]:
    contract = json.loads(_native.tables_contract())
    return tuple(column[1] for column in contract["tables"][table]["columns"])


def _as_columns(table: str, rows: Sequence[Row]) -> dict[str, object]:
    """Rows as columns; numbers become arrays, which take a fifth of the memory."""
    columns = zip(columns_of(table), _types_of(table), zip(*rows, strict=True), strict=True)
    return {
        name: array(_ARRAYS[type_], values) if type_ in _ARRAYS else list(values)
        for name, type_, values in columns
    }


class ChunkBuilder:
    """Rows of one chunk, by table, in the column order of abi/tables.json."""

    def __init__(self, start_ns: int, *, packed: bool = False) -> None:
        """`start_ns`: when the chunk begins (CLOCK_MONOTONIC). `packed`: it is to take few bytes,
        for more CPU time."""
        self.start_ns = start_ns
        self._packed = packed
        self.rows: dict[str, list[Row]] = {}
        self.parts: dict[str, list[Mapping[str, object]]] = {}

    def add(self, table: str, rows: Iterable[Row]) -> None:
        """Append rows."""
        self.rows.setdefault(table, []).extend(rows)

    def add_part(self, table: str, columns: Mapping[str, object]) -> None:
        """Append rows given as whole columns."""
        self.parts.setdefault(table, []).append(columns)

    def compact(self) -> None:
        """Turn many rows into columns, which take less memory: each number of a row is an object,
        and a chunk has the rows of many ticks."""
        for table, rows in self.rows.items():
            if len(rows) >= MIN_COMPACTED:
                self.add_part(table, _as_columns(table, rows))
                rows.clear()

    def encode(self, meta: Mapping[str, object]) -> bytes:
        """The chunk's bytes; `meta`: its metadata (`query/framing.py`)."""
        tables: list[tuple[str, list[Mapping[str, object]]]] = []
        for table in sorted({*self.rows, *self.parts}):
            parts = list(self.parts.get(table, ()))
            if rows := self.rows.get(table):
                parts.append(_as_columns(table, rows))
            tables.append((table, parts))
        packed = PACKED_LEVEL if self._packed else None
        return _native.encode_chunk(json.dumps(meta), tables, packed)
