# SPDX-License-Identifier: Apache-2.0
"""From the log to Parquet: batch after batch, each of bounded memory.

One flush writes one file a table and hour, for all nodes together: a file a node would be thousands
of tiny ones a minute (parquet.py). While one thread writes the files of a batch and makes it count,
another decodes the next one, and the log is read on.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sonde.limits import Budget
from sonde.query import framing, messages
from sonde.query.capture import DamagedChunkError, conformed, damage, streams_of
from sonde.query.schema import TABLES
from sonde.store.catalog import Catalog, StoredFile
from sonde.store.parquet import make_durable, remove, write_file
from sonde.store.record import Damage, Record, scan
from sonde.store.storage import DirectoryStorage
from sonde.store.stored_digests import StoredDigests, column_of
from sonde.store.tables import (
    CHUNK_NUMBER,
    DICTIONARIES,
    Hasher,
    Origin,
    stored_tables,
)
from sonde.store.wal import sealed_segments, secret_of

BATCH_BYTES = 40 << 20
"""Memory of the chunks of a batch, decompressed; with what is made of them, and two more batches on
their way, about a sixth of what is used. Each batch makes a file a table, so that half as much
takes a fifth more time."""
BATCH_CHUNKS = 1_024
CHUNK_BYTES = 256 << 20
"""Memory that one chunk may take to decode."""
JOINED_BYTES = 512 << 20
"""The same of a batch. Beyond, its chunks are decoded one by one."""
CLOSE_NS = 2 * 3600 * 10**9
"""Chunks that began this close to when they came are stored under the hour in which they began;
others, of nodes whose clocks are wrong or that were cut off, under the hour in which they came."""
MAX_CRASHES_OF_BATCH, MAX_CRASHES_OF_CHUNK = 3, 5
"""After this many flushers that crashed over a batch its chunks are stored singly. Over one chunk:
it is quarantined."""
MAX_QUARANTINE_BYTES = 256 << 20
"""Of DIR/quarantine; beyond, chunks are dropped and counted."""
REMEMBERED_NS = 3 * 86_400 * 10**9
"""How long after it came a chunk's digest is in the catalog, so that this stays small. Whether an
older chunk is stored is read from the files of its hour."""
_KNOWN_KEYS = 8 << 20
"""Keys of dictionaries kept in memory (8 bytes each); beyond, some rows are stored again until they
are compacted."""

LOG = logging.getLogger("sonde.store")


@dataclass(slots=True)
class Flushed:
    """What one pass did."""

    segments: int = 0
    chunks: int = 0
    duplicates: int = 0
    damaged: int = 0
    undecodable: int = 0
    size_bytes: int = 0


_Partition = tuple[str, str, int]
"""A tenant, a day and an hour."""


@dataclass(slots=True)
class _Batch:
    """Chunks that are stored by one transaction."""

    fresh: dict[_Partition, list[Unpacked]] = field(default_factory=dict)
    digests: set[bytes] = field(default_factory=set)
    size_bytes: int = 0
    records: int = 0
    duplicates: int = 0
    undecodable: int = 0
    damaged: int = 0


class _Stage:
    """A thread that does one thing at a time, and nothing more where one has failed."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, name)
        self._last: Future[None] | None = None

    def wait(self) -> None:
        """Until it does nothing. Raises what the last thing has raised, once."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def begin(self, work: Callable[[], None]) -> None:
        """Begin the next thing once the last one is done. Raises what that has raised."""
        self.wait()
        self._last = self._pool.submit(work)


class Flusher:
    """Flushes the sealed segments of all servers of a directory. One at a time (`flush.lock`)."""

    def __init__(
        self, folder: Path, catalog: Catalog, storage: DirectoryStorage | None = None
    ) -> None:
        """`storage`: where its files are; the directory alone where not given."""
        self._folder, self._catalog = folder, catalog
        self._storage = storage or DirectoryStorage(folder)
        self._id = uuid.uuid4().hex
        self._wal_secret = secret_of(folder / "wal")
        self._hasher = Hasher(catalog.secret())
        self._stored = StoredDigests(catalog, self._storage)
        self._known: OrderedDict[tuple[str, str, str], Any] = OrderedDict()
        self._decoder, self._writer = _Stage("sonde-decode"), _Stage("sonde-store")
        self._in_flight: deque[set[bytes]] = deque(maxlen=2)
        """Names of the chunks of the batches that are decoded and written."""

    def flush(self, most_segments: int = 1 << 30) -> Flushed:
        """Flush what is sealed. Raises OSError where the disk refuses, sqlite3.Error."""
        done = Flushed()
        try:
            for path in sealed_segments(self._folder / "wal")[:most_segments]:
                done.segments += 1
                self._flush_segment(path, str(path.relative_to(self._folder)), done)
            self._wait()
        finally:
            for stage in (self._decoder, self._writer):
                with suppress(Exception):  # where it matters it is raised already
                    stage.wait()
            self._in_flight.clear()
        return done

    def _wait(self) -> None:
        """Until nothing is decoded or written. Raises what has been raised there."""
        self._decoder.wait()
        self._writer.wait()

    def _flush_segment(self, path: Path, name: str, done: Flushed) -> None:
        end = start = self._catalog.read_bytes(name)
        crashes = self._catalog.attempt(name, start, self._id)
        # The chunk that crashes flushers is to be found: one thing at a time.
        is_careful = crashes > 0
        singles_left = BATCH_CHUNKS if crashes >= MAX_CRASHES_OF_BATCH else 0
        batch = _Batch()
        for found in scan(path, self._wal_secret, start):
            end = found.end
            if isinstance(found.item, Damage):
                batch.damaged += 1
                continue
            if crashes >= MAX_CRASHES_OF_CHUNK and not batch.records:
                batch.records += 1
                batch.undecodable += 1
                self._quarantine(found.item)
            else:
                self._take(found.item, batch)
            is_full = batch.size_bytes >= BATCH_BYTES or batch.records >= BATCH_CHUNKS
            if is_full or singles_left:
                self._flush_batch(batch, name, end, done)
                if is_careful:
                    self._wait()
                batch, crashes, singles_left = _Batch(), 0, max(0, singles_left - 1)
        if end > start:
            self._flush_batch(batch, name, end, done)

        def forget() -> None:
            self._storage.publish()
            path.unlink()
            self._catalog.forget_segment(name)

        self._decoder.begin(lambda: self._writer.begin(forget))

    def _take(self, record: Record, batch: _Batch) -> None:
        """Decode a record into a batch. Whatever it holds, it costs itself at most."""
        batch.records += 1
        is_here = any(record.digest in some for some in (batch.digests, *self._in_flight))
        is_here = is_here or self._storage.is_elsewhere(record.digest)
        if is_here or self._catalog.known([record.digest]):
            batch.duplicates += 1
            return
        batch.digests.add(record.digest)
        try:
            one = unpack(record)
        except Exception as error:  # it must keep nobody else's chunks from being stored
            LOG.warning("a chunk of %s cannot be decoded: %r", record.node, error)
            batch.undecodable += 1
            return
        if self._is_old_and_stored(one.origin):
            batch.duplicates += 1
            return
        batch.size_bytes += one.size_bytes
        partition = record.tenant, *_hour_of(one.origin)
        batch.fresh.setdefault(partition, []).append(one)

    def _quarantine(self, record: Record) -> None:
        """Keep a chunk that crashes flushers, as a capture without its header. Raises OSError."""
        folder = self._folder / "quarantine"
        folder.mkdir(mode=0o700, exist_ok=True)
        LOG.error("a chunk of %s ends the flusher; it is quarantined", record.node)
        kept = sum(path.stat().st_size for path in folder.iterdir())
        if kept + len(record.body) <= MAX_QUARANTINE_BYTES:
            (folder / f"{record.digest.hex()}.chunk").write_bytes(record.body)

    def _flush_batch(self, batch: _Batch, segment: str, end: int, done: Flushed) -> None:
        """Have a batch decoded and written, each once the one before it is."""
        self._decoder.begin(lambda: self._decode(batch, segment, end, done))
        self._in_flight.append(batch.digests)

    def _decode(self, batch: _Batch, segment: str, end: int, done: Flushed) -> None:
        parts = []
        while batch.fresh:
            partition, some = batch.fresh.popitem()
            batch.undecodable += len(some)
            for part in self._tables_of(some):
                batch.undecodable -= len(part.origins)
                parts.append((partition, part))
        self._writer.begin(lambda: self._store(batch, parts, segment, end, done))

    def _store(
        self,
        batch: _Batch,
        parts: list[tuple[_Partition, _Ready]],
        segment: str,
        end: int,
        done: Flushed,
    ) -> None:
        files: list[StoredFile] = []
        learned: list[tuple[tuple[str, str, str], Any]] = []
        stored = [one for _, part in parts for one in part.origins]
        try:
            for partition, part in parts:
                for one in self._write_files(partition, part, learned):
                    files.append(one)
        except BaseException:
            remove(self._folder, files)
            raise
        make_durable(self._folder, files)
        try:
            self._storage.put(files)
        except BaseException:
            remove(self._folder, files)
            raise
        self._catalog.commit(
            files,
            [(one.digest, one.received_ns) for one in stored],
            segment,
            end,
            {
                "chunks_stored": len(stored),
                "chunks_duplicate": batch.duplicates,
                "chunks_undecodable": batch.undecodable,
                "log_parts_damaged": batch.damaged,
                "rows_refused": sum(part.refused for _, part in parts),
            },
        )
        for key, keys in learned:
            self._learn(key, keys)
        self._catalog.attempt(segment, end, self._id)
        done.chunks += len(stored)
        done.duplicates += batch.duplicates
        done.damaged += batch.damaged
        done.undecodable += batch.undecodable
        done.size_bytes += sum(one.size_bytes for one in files)

    def _tables_of(self, chunks: list[Unpacked]) -> Iterator[_Ready]:
        """Chunks of one hour as tables of the store.

        They are decoded and checked together, which is many times faster than one by one. Where
        that fails, because one of them is wrong or all are too large, each half is tried, until the
        wrong ones are alone. They are left out.
        """
        try:
            yield self._ready(chunks)
            return
        except Exception as error:  # as in `_take`
            if len(chunks) == 1:
                LOG.warning("a chunk of %s cannot be stored: %r", chunks[0].origin.node, error)
                return
        middle = len(chunks) // 2
        yield from self._tables_of(chunks[:middle])
        yield from self._tables_of(chunks[middle:])

    def _ready(self, chunks: list[Unpacked]) -> _Ready:
        tables, refused = joined(chunks)
        origins = [one.origin for one in chunks]
        return _Ready(origins, stored_tables(origins, tables, self._hasher), refused)

    def _is_old_and_stored(self, chunk: Origin) -> bool:
        """Whether a chunk, whose digest the catalog may have forgotten, is in the files."""
        if chunk.end_ns > time.time_ns() - REMEMBERED_NS // 2:
            return False
        return self._stored.has(chunk)

    def _write_files(
        self, partition: _Partition, ready: _Ready, learned: list[tuple[tuple[str, str, str], Any]]
    ) -> Iterator[StoredFile]:
        tenant, day, hour = partition
        origins = ready.origins
        span = min(one.start_ns for one in origins), max(one.end_ns for one in origins)
        for name, table in ready.tables.items():
            if name in DICTIONARIES:
                at = (tenant, day, name)
                keys = table.column("key").to_numpy()
                of_this_batch = [some for key, some in learned if key == at]
                known = np.concatenate([self._known_keys(at), *of_this_batch])
                fresh = ~np.isin(keys, known)
                table = table.filter(pa.array(fresh))
                learned.append((at, keys[fresh]))
            if table.num_rows:
                yield write_file(self._folder, tenant, name, day, hour, table, span)

    def _known_keys(self, at: tuple[str, str, str]) -> Any:
        keys = self._known.get(at)
        if keys is None:
            tenant, day, name = at
            parts = []
            for one in self._catalog.files(tenant, name):
                if one.day == day:
                    # Without a damaged one rows are stored again, until they are compacted.
                    column = column_of(self._catalog, self._storage, one, "key")
                    parts.append(np.zeros(0, np.int64) if column is None else column.to_numpy())
            keys = np.concatenate([np.zeros(0, np.int64), *parts])
            self._known[at] = keys
        self._known.move_to_end(at)
        return keys

    def _learn(self, at: tuple[str, str, str], keys: Any) -> None:
        if at in self._known:
            self._known[at] = np.concatenate([self._known[at], keys])
        while len(self._known) > 1 and sum(map(len, self._known.values())) > _KNOWN_KEYS:
            self._known.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A chunk in memory, its tables as they were sent: checked messages, undecoded."""

    origin: Origin
    streams: dict[str, messages.Stream]
    size_bytes: int
    """Memory of the tables."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """Chunks as tables of the store."""

    origins: list[Origin]
    tables: dict[str, pa.Table]
    refused: int
    """Rows that hold impossible values."""


def unpack(record: Record) -> Unpacked:
    """The chunk of a record. Raises DamagedChunkError, CaptureError."""
    raw = next(iter(framing.framed_chunks(BytesIO(record.body), len(record.body))), None)
    if not isinstance(raw, framing.RawChunk):
        raise DamagedChunkError("no chunk with correct checksums")
    budget = Budget(f"a chunk of {record.node}", len(record.body), CHUNK_BYTES)
    meta, streams = streams_of(raw, budget)
    for name, stream in streams.items():
        budget.hold(messages.memory_bytes(stream, len(TABLES[name])))
    size = len(record.body)
    origin = Origin(record.tenant, record.node, record.digest, record.received_ns, size, meta)
    return Unpacked(origin, streams, max(budget.held_bytes, size))


def joined(chunks: list[Unpacked]) -> tuple[dict[str, pa.Table], int]:
    """(tables of all chunks, checked, with the chunk of each row; rows refused).

    Raises DamagedChunkError, CaptureTooLarge.
    """
    alike: dict[tuple[str, bytes, int], list[int]] = {}
    for number, chunk in enumerate(chunks):
        for name, stream in chunk.streams.items():
            # What is not padded would put the buffers that follow at odd addresses.
            is_padded = not (len(stream.schema) % 8 or stream.batches.size % 8)
            kind = name, stream.schema, -1 if is_padded else number
            alike.setdefault(kind, []).append(number)
    budget = Budget("a batch of chunks", sum(one.origin.size_bytes for one in chunks), JOINED_BYTES)
    refused = 0
    found: dict[str, list[pa.Table]] = {}
    for (name, _, _), numbers in alike.items():
        streams = [chunks[number].streams[name] for number in numbers]
        with damage():
            table, rows = messages.read_streams(streams, TABLES[name].names, budget.hold)
            of_chunk = pa.array(np.repeat(np.array(numbers, np.int32), rows))
            table = table.combine_chunks().append_column(CHUNK_NUMBER, of_chunk)
        table, left_out, _ = conformed(name, table, budget)
        refused += left_out
        found.setdefault(name, []).append(table)
    return {name: pa.concat_tables(some) for name, some in found.items()}, refused


def _hour_of(origin: Origin) -> tuple[str, int]:
    """(day, hour) that a chunk is stored under. Not just what it states of itself: each hour is a
    file a table, and when it goes is decided by the hour."""
    is_close = abs(origin.start_ns - origin.received_ns) <= CLOSE_NS
    at = time.gmtime((origin.start_ns if is_close else origin.received_ns) // 10**9)
    return time.strftime("%Y-%m-%d", at), at.tm_hour
