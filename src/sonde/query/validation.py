# SPDX-License-Identifier: Apache-2.0
"""Validation of the tables in a chunk: rows that no recorder writes are left out and counted.

Such rows hold NaN, infinite or absurdly large numbers. One NaN among weights would make every sum
of them NaN, and each verdict with it.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from sonde.limits import MAX_NAME_CHARS
from sonde.query.schema import TABLES, USAGE_COUNTERS

MAX_WEIGHT = 1e17
"""Greatest weight of one row, whether a time (three years in ns), a count, or bytes."""
MAX_VALUE = 1e100
"""Greatest value of a metric; a sum of many such values is still finite."""
MAX_NUMBER = (1 << 62) - 1
"""Greatest time, duration, count or size: two of them add up to a signed 64-bit number."""
ANY_NUMBER = (1 << 64) - 1
"""The limit of columns of integers of which each value is valid."""
MAX_TEXT_BYTES = 64 << 10
"""Of one name. The longest names of compilers have some 20,000 bytes; a chunk with one longer than
this is damaged."""
MAX_FRAMES = 65_536
"""Of one stack; a chunk with one deeper is damaged."""
MAX_DEVICE = 65_535
"""Greatest number that a process may have for a device (its ordinal)."""

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
"""Memory for a row of each table, beyond its bytes in the file, once it is queried."""

FRAME_BYTES = 40
"""Memory for each occurrence of a frame in a stack, beyond its bytes in the file."""

LABELS_BYTES = 1_024
"""Memory for the labels of a series, parsed from their JSON."""


def label_set_count(metric: pa.Table) -> int:
    """Number of label sets in the dictionaries of all chunks; one that two chunks have counts
    twice."""
    return sum(len(chunk.dictionary) for chunk in metric.column("labels").chunks)


def frame_count(stack: pa.Table) -> int:
    """Number of frames in all stacks of a table together."""
    return pc.sum(pc.list_value_length(stack.column("frame_ids"))).as_py() or 0


def casting_bytes(name: str, table: pa.Table) -> int:
    """Memory needed to cast the columns to the types of the schema."""
    kinds = {column: table.schema.field(column).type for column in table.column_names}
    cast = [
        field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        for field in TABLES[name]
        if kinds.get(field.name) != field.type
    ]
    return int(table.num_rows) * sum(4 if pa.types.is_string(kind) else 8 for kind in cast)


def check_columns(name: str, table: pa.Table) -> None:
    """Raise ValueError for columns of a wrong type, too long names and too deep stacks. Missing
    columns are ignored."""
    for field in TABLES[name]:
        if field.name not in table.column_names:
            continue
        column = table.column(field.name)
        expected = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if any(is_kind(column.type) != is_kind(expected) for is_kind in _KINDS):
            raise ValueError(f"{field.name} is {str(column.type)[:80]}")
        if pa.types.is_string(column.type):
            if (pc.max(pc.binary_length(column)).as_py() or 0) > MAX_TEXT_BYTES:
                raise ValueError(f"{field.name} is longer than {MAX_TEXT_BYTES} bytes")
        elif pa.types.is_list(column.type) and _longest_list(column) > MAX_FRAMES:
            raise ValueError(f"{field.name} has more than {MAX_FRAMES} values")


def truncate_names(table: pa.Table) -> tuple[pa.Table, int]:
    """The table with names cut to `limits.MAX_NAME_CHARS`, and how many were cut."""
    count = 0
    for at, field in enumerate(table.schema):
        column = table.column(at)
        if not pa.types.is_string(field.type):
            continue
        if (pc.max(pc.binary_length(column)).as_py() or 0) <= MAX_NAME_CHARS:
            continue
        long = pc.greater(pc.utf8_length(column), MAX_NAME_CHARS)
        if amount := pc.sum(long).as_py() or 0:
            begin = pc.utf8_slice_codeunits(column, 0, MAX_NAME_CHARS - 1)
            short = pc.binary_join_element_wise(begin, "…", "")
            table = table.set_column(at, field.name, pc.if_else(long, short, column))
            count += amount
    return table, count


def repeated_bytes(table: pa.Table) -> int:
    """Bytes of all texts of a table, row by row: the engine makes copies to sort and group them."""
    columns = (column for column in table.columns if pa.types.is_string(column.type))
    return sum(pc.sum(pc.binary_length(column)).as_py() or 0 for column in columns)


def text_bytes(table: pa.Table) -> int:
    """Memory for the texts of a table as Python strings.

    Texts of a dictionary count once. One non-ASCII character may make Python use four bytes for
    each character of its text.
    """
    total = 0
    for column in table.columns:
        chunks = column.chunks
        if pa.types.is_dictionary(column.type):
            chunks = [chunk.dictionary for chunk in chunks]
        for texts in chunks:
            if not pa.types.is_string(texts.type):
                break
            size, chars = pc.binary_length(texts), pc.utf8_length(texts)
            used = pc.if_else(pc.equal(size, chars), size, pc.multiply(chars, 4))
            total += pc.sum(used.cast(pa.int64())).as_py() or 0
    return total


def _longest_list(column: pa.ChunkedArray) -> int:
    longest: int = pc.max(pc.list_value_length(column)).as_py() or 0
    return longest


_KINDS: tuple[Callable[[pa.DataType], bool], ...] = (
    pa.types.is_string,
    pa.types.is_boolean,
    pa.types.is_list,
)
"""Kinds of types; what is of none of them is a number. A column must be of its field's kind."""


def valid_rows(name: str, table: pa.Table) -> tuple[pa.Table, int]:
    """(the valid rows, the number of others).

    An end before its start becomes the start: a device's clock may be set in between.
    """
    good = None
    for field in TABLES[name]:
        mask = _valid_values(field.name, field.type, table.column(field.name))
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


def _valid_values(
    column: str, kind: pa.DataType, values: pa.ChunkedArray
) -> pa.ChunkedArray | None:
    """Mask of valid values; None for a column in which every value is valid."""
    if pa.types.is_floating(kind):
        low, high = float_limits(column)
        # Comparisons with NaN are false.
        return pc.and_(pc.greater_equal(values, low), pc.less_equal(values, high))
    most = integer_limit(column)
    return pc.less_equal(values, pa.scalar(most, kind)) if most < ANY_NUMBER else None


def float_limits(column: str) -> tuple[float, float]:
    """Least and greatest valid value of a column of floats."""
    return (0.0, MAX_WEIGHT) if column in _WEIGHTS else (-MAX_VALUE, MAX_VALUE)


def integer_limit(column: str) -> int:
    """Greatest valid value of a column of integers; ANY_NUMBER where each is valid. There is no
    least one: only `status` is signed, and may be negative."""
    if column == "device":
        return MAX_DEVICE
    return MAX_NUMBER if column in _QUANTITIES else ANY_NUMBER
