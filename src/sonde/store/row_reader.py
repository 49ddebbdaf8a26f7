# SPDX-License-Identifier: Apache-2.0
"""Rows of a batch of chunks in one pass of native code, where chunks are as Sonde's writer makes
them.

That is nearly always. Whatever else a chunk holds (rows with impossible values, columns of another
version, damage) makes native code refuse the batch; then Arrow reads it (`chunks.joined`,
`tables.stored_tables`), which is several times slower and defines which rows are valid. Both make
the same rows with the same keys.
"""

from __future__ import annotations

import logging
import threading

import numpy as np
import pyarrow as pa

from sonde import _native
from sonde.errors import CaptureTooLarge
from sonde.limits import MAX_NAME_CHARS
from sonde.query.schema import ADDED_LATER, TABLES
from sonde.query.validation import float_limits, integer_limit
from sonde.store.chunks import OpenedChunk, joined
from sonde.store.tables import TIMES, Hasher, chunk_rows, stored_tables

ROWS_BYTES = 96 << 20
"""Memory of the rows of a batch that native code makes; at its peak it takes up to twice as much.
The rows of 40 MiB of chunks that agents send take less than 24 MiB."""

_BY_ARROW = threading.Lock()
"""Arrow reads one batch of the process at a time: at its peak that takes several times the budget
of a batch."""

LOG = logging.getLogger("sonde.store")

_Column = tuple[str, str, bool, bool, float, float, int]
"""See `_column`."""


class RowReader:
    """Makes rows of the store of opened chunks. Not thread-safe."""

    def __init__(self, secret: bytes) -> None:
        """`secret`: of the store, 32 bytes."""
        self._hasher = Hasher(secret)
        tables = [
            (name, [_column(name, field) for field in schema]) for name, schema in TABLES.items()
        ]
        self._native = _native.RowDecoder(tables, secret, self._hasher.words, ROWS_BYTES)
        self.refused_batches = 0
        """Batches that Arrow had to read."""

    def read(self, chunks: list[OpenedChunk]) -> tuple[dict[str, pa.Table], int, bool]:
        """(rows by table of the store, rows left out, whether rows of a node are together and in
        about the order of their times).

        Raises DamagedChunkError, CaptureTooLarge where one of the chunks is wrong.
        """
        try:
            return self._in_native_code(chunks), 0, True
        except ValueError as refused:
            LOG.debug("%d chunks are read by Arrow: %s", len(chunks), refused)
            self.refused_batches += 1
        origins = [one.origin for one in chunks]
        with _BY_ARROW:
            tables, left_out = joined(chunks)
            return stored_tables(origins, tables, self._hasher), left_out, False

    def _in_native_code(self, chunks: list[OpenedChunk]) -> dict[str, pa.Table]:
        """Raises ValueError where it refuses the chunks, CaptureTooLarge where they have too many
        rows."""
        chunks = sorted(chunks, key=lambda one: (one.origin.node, one.origin.start_ns))
        names = sorted({one.origin.node for one in chunks})
        numbers = {name: number for number, name in enumerate(names)}
        try:
            sources = [_source(one, numbers[one.origin.node]) for one in chunks]
            streams, samples = self._native.decode(sources, names)
        except MemoryError as error:
            raise CaptureTooLarge(
                f"the rows of {len(chunks)} chunks take more than {ROWS_BYTES >> 20} MiB", ""
            ) from error
        except (TypeError, KeyError, OverflowError, UnicodeError) as error:
            raise ValueError(f"metadata that Sonde does not write: {error!r}") from error
        tables = {
            name: pa.ipc.open_stream(pa.py_buffer(stream)).read_all()
            for name, stream in streams.items()
        }
        tables["chunk"] = chunk_rows([one.origin for one in chunks], np.array(samples, np.int64))
        return tables


def _source(
    chunk: OpenedChunk, node: int
) -> tuple[bytes, int, bool, list[tuple[str, int, int]], int, int, int]:
    """A chunk as `_native.RowDecoder.decode` takes it; `node`: index into its names."""
    meta = chunk.origin.meta
    tables = [(one["name"], one["offset"], one["length"]) for one in meta["tables"]]
    return (
        chunk.raw.payload,
        meta["raw_len"],
        chunk.raw.has_lengths,
        tables,
        meta["wall_offset_ns"],
        chunk.origin.end_ns,
        node,
    )


def _column(table: str, field: pa.Field) -> _Column:
    """A column as `_native.RowDecoder` takes it: name, kind, whether it may be missing, whether it
    is a time (`wall_offset_ns` is added), least and greatest float, greatest integer or most bytes
    of a text."""
    least, most = float_limits(field.name)
    return (
        field.name,
        _kind(field.type),
        field.name in ADDED_LATER[table],
        field.name in TIMES,
        least,
        most,
        MAX_NAME_CHARS if _kind(field.type) in ("text", "name") else integer_limit(field.name),
    )


def _kind(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        return "name"
    named = {
        pa.uint32(): "u32",
        pa.uint64(): "u64",
        pa.int32(): "i32",
        pa.float64(): "f64",
        pa.bool_(): "bool",
        pa.string(): "text",
    }
    return named.get(kind, "list")
