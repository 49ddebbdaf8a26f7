# SPDX-License-Identifier: Apache-2.0
"""Arrow IPC streams from untrusted files, checked before Arrow allocates memory for them.

Arrow trusts the metadata of a message: the number of rows, and the decompressed size of buffers.
So the messages are checked here first. Allowed is what Sonde's writer makes: one schema of few
columns of numbers, strings or lists of these, then record batches without compression. Columns that
the caller does not name are not decoded.

Layout: https://arrow.apache.org/docs/format/Columnar.html#encapsulated-message-format, and
format/Message.fbs of the Arrow repository; a table of FlatBuffers begins with the distance back to
its vtable.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import pyarrow as pa

MAX_META_BYTES = 256 << 10
"""Greatest size of one message's metadata; Sonde writes about 3 KB."""
MAX_BATCHES = 20_000
"""Of one table in a chunk: a chunk of 600 s with a drain every 0.05 s has 12,000."""
MAX_COLUMNS = 256
"""Of one table; the widest of `schema.TABLES` has 20."""
BATCH_BYTES = 1_024
COLUMN_BYTES = 512
"""Memory that Arrow uses at most for a batch, and for each of its columns, without any rows."""

_CONTINUES = 0xFFFFFFFF
"""Begins each message; formats before Arrow 0.15 lack it."""
_U16, _I32, _U32, _I64 = (struct.Struct(f"<{kind}").unpack_from for kind in "HiIq")
_SCHEMA, _RECORD_BATCH = 1, 3
"""Values of the union `MessageHeader`."""
_HEADER_TYPE, _HEADER, _BODY_LENGTH = 1, 2, 3
"""Numbers of fields of the table `Message`."""
_LENGTH, _COMPRESSION = 0, 3
"""Numbers of fields of the table `RecordBatch`."""


class RefusedError(ValueError):
    """A stream that Sonde's writer does not make."""


@dataclass(frozen=True, slots=True)
class Stream:
    """An Arrow IPC stream whose messages were checked, undecoded."""

    schema: bytes
    """The first message, with its framing."""
    batches: pa.Buffer
    """The messages after it: record batches."""
    count: int
    """Number of record batches."""


def checked(raw: pa.Buffer) -> Stream:
    """A stream with its messages checked. Raises RefusedError."""
    view, at, count = memoryview(raw), 0, -1
    begin = 0
    while len(view) - at >= 8:  # less is padding
        continues, length = struct.unpack_from("<II", view, at)
        if continues != _CONTINUES:
            raise RefusedError("a message of an old format")
        if length == 0:
            break  # the end of the stream
        start = at + 8
        if length > min(MAX_META_BYTES, len(view) - start):
            raise RefusedError(f"metadata of {length} bytes")
        kind, body = _check_message(bytes(view[start : start + length]))
        if kind != (_SCHEMA if count < 0 else _RECORD_BATCH):
            raise RefusedError(f"a message of kind {kind}")
        start += length
        if not 0 <= body <= len(view) - start:
            raise RefusedError(f"a body of {body} bytes")
        at = start + body
        if count < 0:
            begin = at
        count += 1
        if count > MAX_BATCHES:
            raise RefusedError(f"more than {MAX_BATCHES} batches")
    if count < 0:
        raise RefusedError("a stream without a schema")
    return Stream(bytes(view[:begin]), raw.slice(begin, at - begin), count)


def memory_bytes(stream: Stream, columns: int) -> int:
    """Memory that Arrow uses at most for the batches of a stream, besides their rows. `columns`:
    how many are decoded."""
    return stream.count * (BATCH_BYTES + COLUMN_BYTES * columns)


def read_table(raw: pa.Buffer, names: Collection[str], hold: Callable[[int], None]) -> pa.Table:
    """The columns `names` of a stream; `hold` is called with the bytes of memory that are
    about to be used, and may raise.

    Raises RefusedError, pyarrow.ArrowException or OSError for an invalid stream.
    """
    return read_streams([checked(raw)], names, hold)[0]


def read_streams(
    streams: Sequence[Stream], names: Collection[str], hold: Callable[[int], None]
) -> tuple[pa.Table, list[int]]:
    """(the columns `names` of streams with the same schema, number of rows of each).

    Reading many together costs a fraction of reading each. Raises RefusedError and others, as
    `read_table` does.
    """
    schema = pa.ipc.read_schema(pa.py_buffer(streams[0].schema))
    if len(schema.names) > MAX_COLUMNS:
        raise RefusedError(f"{len(schema.names)} columns")
    included = [number for number, name in enumerate(schema.names) if name in names]
    if len({schema.names[number] for number in included}) != len(included):
        raise RefusedError("a column comes twice")
    for number in included:
        _check_type(schema.field(number))
    for one in streams:
        hold(memory_bytes(one, len(included)))
    joined = pa.py_buffer(b"".join([streams[0].schema, *(one.batches for one in streams)]))
    options = pa.ipc.IpcReadOptions(included_fields=included, use_threads=False)
    reader = pa.ipc.open_stream(joined, options=options)
    batches = list(reader)
    if len(batches) != sum(one.count for one in streams):
        raise RefusedError("another number of batches than of messages")
    table = pa.Table.from_batches(batches, reader.schema)
    # A checksum shows that these are the writer's bytes, not that the writer was honest.
    table.validate(full=True)
    rows = []
    at = 0
    for one in streams:
        rows.append(sum(batch.num_rows for batch in batches[at : at + one.count]))
        at += one.count
    return table, rows


def _check_type(field: pa.Field) -> None:
    """Allow numbers, strings and lists of these only: rows of other types can claim any size
    without any bytes."""
    kind = field.type
    item = kind.value_type if pa.types.is_list(kind) else kind
    if not (
        pa.types.is_integer(item)
        or pa.types.is_floating(item)
        or pa.types.is_boolean(item)
        or pa.types.is_string(item)
    ):
        raise RefusedError(f"column {field.name} is {str(kind)[:80]}")


def _check_message(meta: bytes) -> tuple[int, int]:
    """(kind, length of the body) of a message. Raises RefusedError."""
    try:
        table = _U32(meta, 0)[0]
        kind_at = _field(meta, table, _HEADER_TYPE)
        header_at = _field(meta, table, _HEADER)
        body_at = _field(meta, table, _BODY_LENGTH)
        kind = meta[kind_at] if kind_at else 0
        body = _I64(meta, body_at)[0] if body_at else 0
        if kind == _RECORD_BATCH and header_at:
            header = header_at + _U32(meta, header_at)[0]
            if _field(meta, header, _COMPRESSION):
                raise RefusedError("a compressed batch")
            rows_at = _field(meta, header, _LENGTH)
            rows = _I64(meta, rows_at)[0] if rows_at else 0
            if not 0 <= rows <= max(0, 8 * body):  # at least one bit per row
                raise RefusedError(f"{rows} rows in {body} bytes")
    except (struct.error, IndexError) as error:
        raise RefusedError("metadata with an offset out of range") from error
    return kind, body


def _field(meta: bytes, table: int, number: int) -> int:
    """Offset of a field of a FlatBuffers table, 0 where it is missing."""
    vtable = table - _I32(meta, table)[0]
    if vtable < 0:
        raise RefusedError("metadata with an offset out of range")
    entry = 4 + 2 * number
    if entry + 2 > _U16(meta, vtable)[0]:
        return 0
    offset: int = _U16(meta, vtable + entry)[0]
    return table + offset if offset else 0
