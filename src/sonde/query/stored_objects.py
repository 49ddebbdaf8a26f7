# SPDX-License-Identifier: Apache-2.0
"""Columns of an answer as Python objects, some at a time.

To make objects of a column keeps the interpreter's lock all along: 100,000 rows with seven columns
would keep it for 0.1 s, and every other request of a server waits. Between two parts others run,
and the deadline is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

AT_ONCE = 4_096
"""Values that are made together; of rows with several columns as many fewer."""
TEXT_BYTES = 4 << 20
"""Of the texts that are made together, about (`text_bytes`)."""
_WIDE_BYTES = 4
"""Memory of each character of a text that has one beyond ASCII, at most."""


def _nothing() -> None:
    pass


def _parts(table: pa.Table) -> Iterator[pa.Table]:
    """The table in parts of at most `AT_ONCE` values and, beyond single rows, `TEXT_BYTES`."""
    most = max(1, AT_ONCE // max(1, table.num_columns))
    for at in range(0, table.num_rows, most):
        part = table.slice(at, most)
        sizes = [int(text_bytes(column).sum()) for column in part.columns if _is_text(column)]
        few = max(1, most * TEXT_BYTES // max(TEXT_BYTES, sum(sizes)))
        for begin in range(0, part.num_rows, few):
            yield part.slice(begin, few)


def rows(table: pa.Table, check: Callable[[], object] = _nothing) -> Iterator[dict[str, Any]]:
    """The rows of a table as `to_pylist` has them. `check` is called between parts, and may
    raise."""
    for part in _parts(table):
        check()
        yield from part.to_pylist()


def values(column: pa.ChunkedArray, check: Callable[[], object] = _nothing) -> list[Any]:
    """The values of a column, likewise."""
    return [row for some in parts_of(column, check) for row in some]


def parts_of(
    column: pa.ChunkedArray, check: Callable[[], object] = _nothing
) -> Iterator[list[Any]]:
    """The values of a column, some at a time."""
    for part in _parts(pa.table({"value": column})):
        check()
        yield part.column(0).to_pylist()


def lists(table: pa.Table, check: Callable[[], object] = _nothing) -> Mapping[str, list[Any]]:
    """The values of each column, as `to_pydict` has them."""
    return {name: values(table.column(name), check) for name in table.column_names}


def _is_text(column: pa.ChunkedArray) -> bool:
    return bool(pa.types.is_string(column.type) or pa.types.is_large_string(column.type))


def text_bytes(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """What each text of a column takes as a Python object, at most, without its head: one character
    beyond ASCII may make four bytes of each. 0 for null."""
    found = [np.zeros(0, np.int64)]
    for chunk in column.chunks:
        sizes, chars = (
            pc.fill_null(count(chunk), 0).to_numpy(zero_copy_only=False).astype(np.int64)
            for count in (pc.binary_length, pc.utf8_length)
        )
        found.append(np.where(sizes == chars, sizes, _WIDE_BYTES * chars))
    return np.concatenate(found)


def common_bytes(sizes: npt.NDArray[np.int64], most: int) -> int:
    """As `limits.common_length`: the length to which the longest texts are cut, so that together
    they have `most`."""
    rest = np.sort(sizes)
    count = len(rest)
    if not count:
        return 0
    before = np.cumsum(rest) - rest
    parts = (most - before) // np.arange(count, 0, -1)
    beyond = np.flatnonzero(rest > parts)
    return max(0, int(parts[beyond[0]])) if len(beyond) else int(rest[-1])


def fitting(table: pa.Table, most: int, short_chars: int) -> pa.Table:
    """The table with the longest of its texts cut, all to one length, so that together they take at
    most about `most` bytes as Python objects; a cut one ends with a mark. Texts of at most
    `short_chars` are neither cut nor counted."""
    names = [name for name in table.column_names if _is_text(table.column(name))]
    sizes = {name: text_bytes(table.column(name)) for name in names}
    every = np.concatenate([np.zeros(0, np.int64), *sizes.values()])
    every = every[every > short_chars]
    if int(every.sum()) <= most:
        return table
    length = max(short_chars, common_bytes(every, most))
    for name in names:
        if len(sizes[name]) and int(sizes[name].max()) > length:
            at = table.schema.get_field_index(name)
            short = _cut(table.column(name), sizes[name], length)
            table = table.set_column(at, table.schema.field(at), short)
    return table


def _cut(column: pa.ChunkedArray, sizes: npt.NDArray[np.int64], length: int) -> pa.ChunkedArray:
    chars = pc.utf8_length(column)
    is_wide = pc.greater(pc.binary_length(column), chars)
    for wide, most in ((False, length), (True, max(1, length // _WIDE_BYTES))):
        begin = pc.utf8_slice_codeunits(column, 0, max(0, most - 1))
        marked = pc.binary_join_element_wise(begin, "…", "")
        is_long = pc.and_(pa.chunked_array([pa.array(sizes > length)]), pc.greater(chars, most))
        chosen = pc.and_(is_long, is_wide if wide else pc.invert(is_wide))
        column = pc.if_else(pc.fill_null(chosen, False), marked, column)
    return column.cast(pa.string())
