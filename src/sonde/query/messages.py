# SPDX-License-Identifier: Apache-2.0
"""Arrow IPC streams from untrusted files, checked before Arrow allocates memory for them.

Arrow trusts the metadata of a message: the number of rows, and the decompressed size of buffers.
So the messages are checked here first. Allowed is what Sonde's writer makes: one schema of few
plain columns, then record batches without compression. Columns that are not wanted are not decoded.

Layout: https://arrow.apache.org/docs/format/Columnar.html#encapsulated-message-format, and
Message.fbs beside it; a table of FlatBuffers begins with the distance back to its vtable.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection

import pyarrow as pa

MOST_META_BYTES = 256 << 10
"""Greatest size of one message's metadata; Sonde writes about 3 KB."""
MOST_BATCHES = 20_000
"""Of one table in a chunk: a chunk of 600 s with a part every 0.05 s has 12,000."""
MOST_COLUMNS = 256
BATCH_BYTES = 1_024
COLUMN_BYTES = 512
"""Memory that Arrow uses for a batch, and for each of its columns, without any rows."""

_CONTINUES = 0xFFFFFFFF
_SCHEMA, _RECORD_BATCH = 1, 3
_HEADER_TYPE, _HEADER, _BODY_LENGTH = 1, 2, 3
_LENGTH, _COMPRESSION = 0, 3


class RefusedError(ValueError):
    """A stream that Sonde's writer does not make."""


def read_table(raw: pa.Buffer, wanted: Collection[str], hold: Callable[[int], None]) -> pa.Table:
    """The wanted columns of a stream; `hold` is called with the bytes that are about to be used.

    Raises RefusedError, pyarrow.ArrowException or OSError for an invalid stream.
    """
    batches = _checked_batches(raw)
    stream = pa.ipc.open_stream(raw)
    names = stream.schema.names
    if len(names) > MOST_COLUMNS:
        raise RefusedError(f"{len(names)} columns")
    chosen = [number for number, name in enumerate(names) if name in wanted]
    if len({names[number] for number in chosen}) != len(chosen):
        raise RefusedError("a column comes twice")
    for number in chosen:
        _check_type(stream.schema.field(number))
    hold(batches * (BATCH_BYTES + COLUMN_BYTES * len(chosen)))
    options = pa.ipc.IpcReadOptions(included_fields=chosen, use_threads=False)
    table = pa.ipc.open_stream(raw, options=options).read_all()
    # A checksum shows that these are the writer's bytes, not that the writer was honest.
    table.validate(full=True)
    return table


def _check_type(field: pa.Field) -> None:
    """Allow plain columns only: rows of other types can claim any size without any bytes."""
    kind = field.type
    item = kind.value_type if pa.types.is_list(kind) else kind
    if not (
        pa.types.is_integer(item)
        or pa.types.is_floating(item)
        or pa.types.is_boolean(item)
        or pa.types.is_string(item)
    ):
        raise RefusedError(f"column {field.name} is {str(kind)[:80]}")


def _checked_batches(raw: pa.Buffer) -> int:
    """Check every message of the stream; return the number of record batches."""
    view, at, batches = memoryview(raw), 0, 0
    first = True
    while at < len(view):
        if len(view) - at < 8:
            break  # padding
        continues, length = struct.unpack_from("<II", view, at)
        if continues != _CONTINUES:
            raise RefusedError("a message of an old format")
        if length == 0:
            break  # the end of the stream
        at += 8
        if length > min(MOST_META_BYTES, len(view) - at):
            raise RefusedError(f"metadata of {length} bytes")
        kind, body = _check_message(bytes(view[at : at + length]))
        if kind != (_SCHEMA if first else _RECORD_BATCH):
            raise RefusedError(f"a message of kind {kind}")
        at += length
        if not 0 <= body <= len(view) - at:
            raise RefusedError(f"a body of {body} bytes")
        at += body
        batches += not first
        first = False
        if batches > MOST_BATCHES:
            raise RefusedError(f"more than {MOST_BATCHES} batches")
    return batches


def _check_message(meta: bytes) -> tuple[int, int]:
    """(kind, length of the body) of a message. Raises RefusedError."""
    try:
        table = struct.unpack_from("<I", meta)[0]
        kind_at, header_at, body_at = (
            _field(meta, table, number) for number in (_HEADER_TYPE, _HEADER, _BODY_LENGTH)
        )
        kind = meta[kind_at] if kind_at else 0
        body = struct.unpack_from("<q", meta, body_at)[0] if body_at else 0
        if kind == _RECORD_BATCH and header_at:
            header = header_at + struct.unpack_from("<I", meta, header_at)[0]
            if _field(meta, header, _COMPRESSION):
                raise RefusedError("a compressed batch")
            rows_at = _field(meta, header, _LENGTH)
            rows = struct.unpack_from("<q", meta, rows_at)[0] if rows_at else 0
            if not 0 <= rows <= max(0, 8 * body):  # at least one bit per row
                raise RefusedError(f"{rows} rows in {body} bytes")
    except (struct.error, IndexError) as error:
        raise RefusedError("metadata with an offset out of range") from error
    return kind, body


def _field(meta: bytes, table: int, number: int) -> int:
    """Offset of a field of a FlatBuffers table, 0 where it is missing."""
    vtable = table - struct.unpack_from("<i", meta, table)[0]
    if vtable < 0:
        raise RefusedError("metadata with an offset out of range")
    size = struct.unpack_from("<H", meta, vtable)[0]
    entry = 4 + 2 * number
    if entry + 2 > size:
        return 0
    offset: int = struct.unpack_from("<H", meta, vtable + entry)[0]
    return table + offset if offset else 0
