# SPDX-License-Identifier: Apache-2.0
"""Rows that no recorder writes are left out and counted: numbers that are none, times to come.

One NaN among weights makes every sum of them NaN, and each verdict with it.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from sonde.limits import MOST_NAME_CHARS
from sonde.query.schema import TABLES, USAGE_COUNTERS

MOST_WEIGHT = 1e17
"""Of one row: three years in ns."""
MOST_VALUE = 1e100
"""Of a metric; a sum of many is still a number."""
MOST_NUMBER = (1 << 62) - 1
MOST_TEXT_BYTES = 64 << 10
"""Of one name; the longest that compilers made so far has some 20,000. What is longer is damage."""
MOST_FRAMES = 65_536

_WEIGHTS = frozenset({"weight", "weight_count", "weight_ns", "weight_bytes"})
_QUANTITIES = frozenset(
    {"time_ns", "start_time_ns", "end_time_ns", "count", "ns", "bytes", "max_ns", "shared_bytes"}
    | set(USAGE_COUNTERS)
)
ROW_BYTES = {
    **dict.fromkeys(TABLES, 64),
    "stack": 256,
    "frame": 1_024,
    "process": 3_072,
    "thread": 1_024,
    "activity": 384,
    "event": 256,
    "metric": 160,
    "usage": 256,
}
"""What a row takes beyond its bytes in the file, once questions are asked of it."""


FRAME_BYTES = 40
"""What a frame takes for each time that it is in a stack, beyond its bytes in the file."""


LABELS_BYTES = 1_024
"""What the labels of a series take as attributes."""


def label_sets(metric: pa.Table) -> int:
    """How many different labels series have."""
    return sum(len(chunk.dictionary) for chunk in metric.column("labels").chunks)


def frames(stack: pa.Table) -> int:
    """How many frames the stacks of a table have in all."""
    return pc.sum(pc.list_value_length(stack.column("frame_ids"))).as_py() or 0


def casting_bytes(name: str, table: pa.Table) -> int:
    """Memory that bringing the columns to the types of the schema takes."""
    kinds = {column: table.schema.field(column).type for column in table.column_names}
    plain = [
        field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        for field in TABLES[name]
        if kinds.get(field.name) != field.type
    ]
    return int(table.num_rows) * sum(4 if pa.types.is_string(kind) else 8 for kind in plain)


def check(name: str, table: pa.Table) -> None:
    """Raise ValueError for columns of another kind, and for names longer than any."""
    for field in TABLES[name]:
        if field.name not in table.column_names:
            continue
        column = table.column(field.name)
        wanted = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if any(alike(column.type) != alike(wanted) for alike in _KINDS):
            raise ValueError(f"{field.name} is {str(column.type)[:80]}")
        if pa.types.is_string(column.type):
            if (pc.max(pc.binary_length(column)).as_py() or 0) > MOST_TEXT_BYTES:
                raise ValueError(f"{field.name} is longer than {MOST_TEXT_BYTES} bytes")
        elif pa.types.is_list(column.type) and _longest_list(column) > MOST_FRAMES:
            raise ValueError(f"{field.name} has more than {MOST_FRAMES} values")


def cut(table: pa.Table) -> tuple[pa.Table, int]:
    """The table with long names cut, and how many were."""
    count = 0
    for at, field in enumerate(table.schema):
        column = table.column(at)
        if not pa.types.is_string(field.type):
            continue
        if (pc.max(pc.binary_length(column)).as_py() or 0) <= MOST_NAME_CHARS:
            continue
        long = pc.greater(pc.utf8_length(column), MOST_NAME_CHARS)
        if amount := pc.sum(long).as_py() or 0:
            begin = pc.utf8_slice_codeunits(column, 0, MOST_NAME_CHARS - 1)
            short = pc.binary_join_element_wise(begin, "…", "")
            table = table.set_column(at, field.name, pc.if_else(long, short, column))
            count += amount
    return table, count


def repeated_bytes(table: pa.Table) -> int:
    """The texts of a table, row by row, as the engine makes them while it sorts and groups."""
    columns = (column for column in table.columns if pa.types.is_string(column.type))
    return sum(pc.sum(pc.binary_length(column)).as_py() or 0 for column in columns)


def text_bytes(table: pa.Table) -> int:
    """Memory that the texts of a table take once they are Python's.

    Those of a dictionary count once. One character that is not ASCII may make Python hold four
    bytes for each.
    """
    whole = 0
    for column in table.columns:
        chunks = column.chunks
        if pa.types.is_dictionary(column.type):
            chunks = [chunk.dictionary for chunk in chunks]
        for texts in chunks:
            if not pa.types.is_string(texts.type):
                break
            size, chars = pc.binary_length(texts), pc.utf8_length(texts)
            held = pc.if_else(pc.equal(size, chars), size, pc.multiply(chars, 4))
            whole += pc.sum(held.cast(pa.int64())).as_py() or 0
    return whole


def _longest_list(column: pa.ChunkedArray) -> int:
    longest: int = pc.max(pc.list_value_length(column)).as_py() or 0
    return longest


_KINDS: tuple[Callable[[pa.DataType], bool], ...] = (
    pa.types.is_string,
    pa.types.is_boolean,
    pa.types.is_list,
)


def rows(name: str, table: pa.Table) -> tuple[pa.Table, int]:
    """The rows that make sense, and how many do not.

    An end before its start is an empty interval: a device's clock was set meanwhile.
    """
    good = None
    for field in TABLES[name]:
        mask = _is_sound(field.name, field.type, table.column(field.name))
        if mask is not None:
            good = mask if good is None else pc.and_(good, mask)
    left_out = 0
    if good is not None:
        left_out = table.num_rows - (pc.sum(good).as_py() or 0)
        if left_out:
            table = table.filter(good)
    if "end_time_ns" in table.column_names:
        start, end = table.column("start_time_ns"), table.column("end_time_ns")
        if pc.any(pc.less(end, start)).as_py():
            at = table.schema.get_field_index("end_time_ns")
            table = table.set_column(at, "end_time_ns", pc.max_element_wise(start, end))
    return table, left_out


def _is_sound(column: str, kind: pa.DataType, values: pa.ChunkedArray) -> pa.ChunkedArray | None:
    if pa.types.is_floating(kind):
        low, high = (0.0, MOST_WEIGHT) if column in _WEIGHTS else (-MOST_VALUE, MOST_VALUE)
        # Comparisons with NaN are false.
        return pc.and_(pc.greater_equal(values, low), pc.less_equal(values, high))
    if column in _QUANTITIES:
        return pc.less_equal(values, pa.scalar(MOST_NUMBER, kind))
    return None
