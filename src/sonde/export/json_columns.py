# SPDX-License-Identifier: Apache-2.0
"""Rows of a JSON document that are stored by column, written some thousand rows at a time.

A busy machine has hundreds of thousands of waits: an object for each of them takes longer than all
of the reading. So each different text is formatted once, and Arrow joins the texts of the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

I64 = npt.NDArray[np.int64]
Numbers = npt.NDArray[Any]

_ROWS_AT_ONCE = 4_096
_CHARS_AT_ONCE = 1 << 20
"""Of texts before they are escaped, which makes them up to six times as long."""
_KEPT_CHARS = 1 << 18
"""Of a column's texts, before they are escaped, that are formatted once for all rows."""
_EXACT = float(1 << 62)
"""Floats below this are rounded to 64-bit integers."""


@dataclass(frozen=True, slots=True)
class Coded:
    """A column whose rows have few different values."""

    values: Sequence[Any]
    """The different ones: what JSON can hold, but no float."""
    index: npt.NDArray[Any]
    """Index in `values` of each row; shape (rows,)."""


Column = Coded | Numbers
"""Numbers: shape (rows,), integers, or floats, which are rounded."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A list of objects with the same fields."""

    columns: dict[str, Column]
    """By the name of the field, in the order of the fields; at least one."""

    def __len__(self) -> int:
        column = next(iter(self.columns.values()))
        return len(column.index if isinstance(column, Coded) else column)


def items(rows: Rows, line: str, text_of: Callable[[Any, str], str]) -> Iterator[str]:
    """The items of the list in the format of `json.dumps(…, indent=1)`, some thousand in a text,
    each with its comma and line break before it.

    `line`: the line break and indentation before each item; `text_of` gives the JSON of a value
    behind such a line break.
    """
    inner = f"{line} "
    before = f",{line}{{"
    parts: list[pa.Scalar | _Texts] = []
    for name, column in rows.columns.items():
        parts.append(pa.scalar(f"{before}{inner}{text_of(name, inner)}: "))
        parts.append(_texts(column, lambda value: text_of(value, inner)))
        before = ","
    parts.append(pa.scalar(f"{line}}}"))
    for some in _blocks(rows):
        joined = pc.binary_join_element_wise(
            *(part if isinstance(part, pa.Scalar) else part(some) for part in parts), ""
        )
        yield str(joined.buffers()[2], "ascii")


def numbers(column: Numbers) -> str:
    """Whole numbers with commas between them, as JSON."""
    if not len(column):
        return ""
    texts = pc.binary_join_element_wise(pa.array(column).cast(pa.string()), ",", "")
    return str(texts.buffers()[2], "ascii")[:-1]


_Texts = Callable[[slice], pa.Array]
"""Gives the JSON of the values of some rows."""


def _texts(column: Column, text_of: Callable[[Any], str]) -> _Texts:
    if isinstance(column, Coded):
        if sum(map(_chars, column.values)) > _KEPT_CHARS:
            return lambda rows: _coded_texts(column, rows, text_of)
        index, values = column.index, pa.array(map(text_of, column.values), pa.string())
        return lambda rows: values.take(pa.array(index[rows]))
    whole = _rounded(column)
    if whole is None:
        return lambda rows: pa.array([str(round(one)) for one in column[rows].tolist()])
    return lambda rows: pa.array(whole[rows]).cast(pa.string())


def _coded_texts(column: Coded, rows: slice, text_of: Callable[[Any], str]) -> pa.Array:
    # Those of all rows would not fit into memory where names are long and have to be escaped.
    used, index = np.unique(column.index[rows], return_inverse=True)
    texts = pa.array([text_of(column.values[number]) for number in used.tolist()], pa.string())
    return texts.take(pa.array(index))


def _blocks(rows: Rows) -> Iterator[slice]:
    """Rows whose texts are in memory together."""
    chars = np.zeros(len(rows), np.int64)
    for column in rows.columns.values():
        if isinstance(column, Coded):
            lengths = np.array([*map(_chars, column.values)], np.int64)
            chars += lengths[column.index]
    return blocks(chars)


def blocks(chars: I64) -> Iterator[slice]:
    """Some thousand rows at a time, fewer where their texts are long. `chars`: of each row."""
    ends = np.cumsum(chars)
    begin = 0
    while begin < len(ends):
        most = _CHARS_AT_ONCE + (int(ends[begin - 1]) if begin else 0)
        end = int(np.searchsorted(ends, most, side="right"))
        end = max(begin + 1, min(end, begin + _ROWS_AT_ONCE))
        yield slice(begin, end)
        begin = end


def _chars(value: Any) -> int:
    """The length of the texts of a value, about."""
    if isinstance(value, dict):
        return sum(map(_chars, value.values()))
    return len(value) if isinstance(value, str) else 0


def _rounded(numbers: Numbers) -> Numbers | None:
    """Floats as the nearest integers, as `round` gives them; None where 64 bits are too few."""
    if numbers.dtype.kind != "f":
        return numbers
    if len(numbers) and not float(np.abs(numbers).max()) < _EXACT:
        return None
    return np.rint(numbers).astype(np.int64)
