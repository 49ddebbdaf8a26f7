# SPDX-License-Identifier: Apache-2.0
"""Chunks of a batch: from records of the log to joined and checked tables."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO

import numpy as np
import pyarrow as pa

from sonde.limits import Budget
from sonde.query import framing, messages
from sonde.query.capture import DamagedChunkError, chunk_meta, conformed, damage, streams_of
from sonde.query.schema import TABLES
from sonde.store.record import Record
from sonde.store.tables import CHUNK_NUMBER, DICTIONARIES, Origin

CHUNK_BYTES = 256 << 20
"""Memory that one chunk may take to decode."""
JOINED_BYTES = 256 << 20
"""The same of chunks that are decoded together; beyond, the caller tries fewer."""


@dataclass(frozen=True, slots=True)
class OpenedChunk:
    """A chunk with correct checksums and metadata; its tables are still compressed."""

    origin: Origin
    raw: framing.RawChunk
    size_bytes: int
    """Of its tables, decompressed."""


def open_chunk(record: Record) -> OpenedChunk:
    """The chunk of a record. Raises DamagedChunkError, CaptureTooLarge."""
    raw = next(iter(framing.framed_chunks(BytesIO(record.body), len(record.body))), None)
    if not isinstance(raw, framing.RawChunk):
        raise DamagedChunkError("no chunk with correct checksums")
    meta = chunk_meta(raw.meta)
    size = len(record.body)
    Budget(f"a chunk of {record.node}", size, CHUNK_BYTES).unpack(meta["raw_len"])
    origin = Origin(record.tenant, record.node, record.digest, record.received_ns, size, meta)
    return OpenedChunk(origin, raw, max(meta["raw_len"], size))


def joined(chunks: list[OpenedChunk]) -> tuple[dict[str, pa.Table], int]:
    """(tables of all chunks, checked, with the column CHUNK_NUMBER; number of rows refused).

    They are decoded and checked together, which is many times faster than one by one. Raises
    DamagedChunkError, CaptureTooLarge.
    """
    groups: dict[tuple[str, bytes, int], list[tuple[int, messages.Stream]]] = {}
    for number, chunk in enumerate(chunks):
        for name, stream in _streams(chunk).items():
            # A stream that is not padded to 8 bytes would make those behind it unaligned.
            is_padded = not (len(stream.schema) % 8 or stream.batches.size % 8)
            key = name, stream.schema, -1 if is_padded else number
            groups.setdefault(key, []).append((number, stream))
    budget = Budget("a batch of chunks", sum(one.origin.size_bytes for one in chunks), JOINED_BYTES)
    refused = 0
    found: dict[str, list[pa.Table]] = {}
    for (name, _, _), group in groups.items():
        numbers = np.array([number for number, _ in group], np.int32)
        with damage():
            streams = [stream for _, stream in group]
            table, rows = messages.read_streams(streams, TABLES[name].names, budget.hold)
            of_chunk = pa.array(np.repeat(numbers, rows))
            table = table.combine_chunks().append_column(CHUNK_NUMBER, of_chunk)
        # For columns that the chunks lack; of dictionaries also for copies that keys are made from.
        words = 6 if name in DICTIONARIES else 1
        budget.hold(8 * words * len(TABLES[name]) * table.num_rows)
        table, left_out, _ = conformed(name, table, budget)
        refused += left_out
        found.setdefault(name, []).append(table)
    return {name: pa.concat_tables(tables) for name, tables in found.items()}, refused


def _streams(chunk: OpenedChunk) -> dict[str, messages.Stream]:
    """The undecoded tables of a chunk. Raises DamagedChunkError, CaptureTooLarge."""
    budget = Budget(f"a chunk of {chunk.origin.node}", chunk.origin.size_bytes, CHUNK_BYTES)
    _, streams = streams_of(chunk.raw, budget)
    for name, stream in streams.items():
        budget.hold(messages.memory_bytes(stream, len(TABLES[name])))
    return streams
