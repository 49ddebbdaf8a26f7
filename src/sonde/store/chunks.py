# SPDX-License-Identifier: Apache-2.0
"""Chunks of a batch: from records of the log to checked tables of all of them."""

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
"""The same of a batch. Beyond, its chunks are decoded one by one."""


@dataclass(frozen=True, slots=True)
class OpenedChunk:
    """A chunk with correct checksums and a correct description; its tables are still packed."""

    origin: Origin
    raw: framing.RawChunk
    size_bytes: int
    """Memory of its tables, unpacked."""


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
    """(tables of all chunks, checked, with the chunk of each row; rows refused).

    They are decoded and checked together, which is many times faster than one by one. Raises
    DamagedChunkError, CaptureTooLarge.
    """
    alike: dict[tuple[str, bytes, int], list[tuple[int, messages.Stream]]] = {}
    for number, chunk in enumerate(chunks):
        for name, stream in _streams(chunk).items():
            # What is not padded would put the buffers that follow at odd addresses.
            is_padded = not (len(stream.schema) % 8 or stream.batches.size % 8)
            kind = name, stream.schema, -1 if is_padded else number
            alike.setdefault(kind, []).append((number, stream))
    budget = Budget("a batch of chunks", sum(one.origin.size_bytes for one in chunks), JOINED_BYTES)
    refused = 0
    found: dict[str, list[pa.Table]] = {}
    for (name, _, _), some in alike.items():
        numbers = np.array([number for number, _ in some], np.int32)
        with damage():
            streams = [stream for _, stream in some]
            table, rows = messages.read_streams(streams, TABLES[name].names, budget.hold)
            of_chunk = pa.array(np.repeat(numbers, rows))
            table = table.combine_chunks().append_column(CHUNK_NUMBER, of_chunk)
        # Columns that a chunk leaves out are made, and the words of keys, several times.
        words = 6 if name in DICTIONARIES else 1
        budget.hold(8 * words * len(TABLES[name]) * table.num_rows)
        table, left_out, _ = conformed(name, table, budget)
        refused += left_out
        found.setdefault(name, []).append(table)
    return {name: pa.concat_tables(some) for name, some in found.items()}, refused


def _streams(chunk: OpenedChunk) -> dict[str, messages.Stream]:
    """The tables of a chunk as they were sent. Raises DamagedChunkError, CaptureTooLarge."""
    budget = Budget(f"a chunk of {chunk.origin.node}", chunk.origin.size_bytes, CHUNK_BYTES)
    _, streams = streams_of(chunk.raw, budget)
    for name, stream in streams.items():
        budget.hold(messages.memory_bytes(stream, len(TABLES[name])))
    return streams
