# SPDX-License-Identifier: Apache-2.0
"""From the log to Parquet: batch after batch, each of bounded memory.

```
DIR/data/TENANT/TABLE/day=2026-11-23/hour=08/ID.parquet      sorted by node and time
```

One flush writes one file a table and hour, for all nodes together: a file a node would be thousands
of tiny ones a minute. Rows of a node are next to one another and row groups carry least and
greatest node, so that a query of one node reads its part alone.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sonde.limits import Budget
from sonde.query import framing
from sonde.query.capture import DamagedChunkError, conformed, unpack_chunk
from sonde.store.catalog import Catalog, StoredFile
from sonde.store.record import Damage, Record, scan
from sonde.store.tables import (
    CHUNK_NUMBER,
    DICTIONARIES,
    Hasher,
    Origin,
    stored_tables,
    time_column,
)
from sonde.store.wal import sealed_segments, secret_of, sync_folder

BATCH_BYTES = 32 << 20
"""Memory of the chunks, as sent, that are in memory together; about a sixth of what that takes."""
BATCH_CHUNKS = 512
CHUNK_BYTES = 256 << 20
"""Memory that one chunk may take to decode."""
JOINED_BYTES = 512 << 20
"""The same of a batch. Beyond, its chunks are decoded one by one."""
CLOSE_NS = 2 * 3600 * 10**9
"""Chunks that began this close to when they came are stored under the hour in which they began;
others, of nodes whose clocks are wrong or that were cut off, under the hour in which they came."""
DEATHS_OF_BATCH, DEATHS_OF_CHUNK = 3, 5
"""So many flushers have died over a batch: its chunks are stored one by one. Over one chunk: it is
put aside."""
ASIDE_BYTES = 256 << 20
"""Most that is put aside, in DIR/aside; beyond, it is dropped and counted."""
REMEMBERED_NS = 3 * 86_400 * 10**9
"""How long after it came a chunk's digest is in the catalog, so that this stays small. Whether an
older chunk is stored is read from the files of its hour."""
_ROW_GROUP = 65_536
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


def engine() -> duckdb.DuckDBPyConnection:
    """An engine for flushing and compaction: little memory, no extension from a network."""
    return duckdb.connect(
        config={
            "memory_limit": "128MiB",
            "threads": 1,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
    )


@dataclass(slots=True)
class _Batch:
    """Chunks that are stored by one transaction."""

    fresh: dict[tuple[str, str, int], list[Unpacked]] = field(default_factory=dict)
    """By tenant, day and hour."""
    digests: set[bytes] = field(default_factory=set)
    size_bytes: int = 0
    records: int = 0
    duplicates: int = 0
    undecodable: int = 0
    damaged: int = 0


class Flusher:
    """Flushes the sealed segments of all servers of a directory. One at a time (`flush.lock`)."""

    def __init__(self, folder: Path, catalog: Catalog) -> None:
        self._folder, self._catalog = folder, catalog
        self._id = uuid.uuid4().hex
        self._wal_secret = secret_of(folder / "wal")
        self._hasher = Hasher(engine(), catalog.secret())
        self._known: OrderedDict[tuple[str, str, str], Any] = OrderedDict()

    def flush(self, most_segments: int = 1 << 30) -> Flushed:
        """Flush what is sealed. Raises OSError where the disk refuses, sqlite3.Error."""
        done = Flushed()
        for path in sealed_segments(self._folder / "wal")[:most_segments]:
            done.segments += 1
            name = str(path.relative_to(self._folder))
            self._flush_segment(path, name, done)
            path.unlink()
            self._catalog.forget_segment(name)
        return done

    def _flush_segment(self, path: Path, name: str, done: Flushed) -> None:
        end = start = self._catalog.read_bytes(name)
        deaths = self._catalog.attempt(name, start, self._id)
        batch = _Batch()
        for found in scan(path, self._wal_secret, start):
            end = found.end
            if isinstance(found.item, Damage):
                batch.damaged += 1
                continue
            if deaths >= DEATHS_OF_CHUNK and not batch.records:
                batch.records += 1
                batch.undecodable += 1
                self._put_aside(found.item)
            else:
                self._take(found.item, batch)
            is_full = batch.size_bytes >= BATCH_BYTES or batch.records >= BATCH_CHUNKS
            if is_full or deaths >= DEATHS_OF_BATCH:
                self._flush_batch(batch, name, end, done)
                batch = _Batch()
                deaths = self._catalog.attempt(name, end, self._id)
        if end > start:
            self._flush_batch(batch, name, end, done)

    def _take(self, record: Record, batch: _Batch) -> None:
        """Decode a record into a batch. Whatever it holds, it costs itself at most."""
        batch.records += 1
        if record.digest in batch.digests or self._catalog.known([record.digest]):
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
        place = record.tenant, *_hour_of(one.origin)
        batch.fresh.setdefault(place, []).append(one)

    def _put_aside(self, record: Record) -> None:
        """Keep a chunk over which flushers die, as a capture without its header. Raises OSError."""
        folder = self._folder / "aside"
        folder.mkdir(mode=0o700, exist_ok=True)
        LOG.error("a chunk of %s ends the flusher; it is put aside", record.node)
        kept = sum(path.stat().st_size for path in folder.iterdir())
        if kept + len(record.body) <= ASIDE_BYTES:
            (folder / f"{record.digest.hex()}.chunk").write_bytes(record.body)

    def _flush_batch(self, batch: _Batch, segment: str, end: int, done: Flushed) -> None:
        files: list[StoredFile] = []
        learned: list[tuple[tuple[str, str, str], Any]] = []
        stored: list[Origin] = []
        refused = 0
        for (tenant, day, hour), some in batch.fresh.items():
            for part in self._tables_of(some):
                refused += part.refused
                files += self._write(tenant, day, hour, part, learned)
                stored += part.origins
        undecodable = batch.undecodable + sum(map(len, batch.fresh.values())) - len(stored)
        self._catalog.commit(
            files,
            [(one.digest, one.received_ns) for one in stored],
            segment,
            end,
            {
                "chunks_stored": len(stored),
                "chunks_duplicate": batch.duplicates,
                "chunks_undecodable": undecodable,
                "log_parts_damaged": batch.damaged,
                "rows_refused": refused,
            },
        )
        for key, keys in learned:
            self._learn(key, keys)
        done.chunks += len(stored)
        done.duplicates += batch.duplicates
        done.damaged += batch.damaged
        done.undecodable += undecodable
        done.size_bytes += sum(one.size_bytes for one in files)

    def _tables_of(self, chunks: list[Unpacked]) -> Iterator[_Ready]:
        """Chunks of one hour as tables of the store.

        They are checked together, which is several times faster than one by one. Where one of them
        is wrong, or all are too large, each is checked alone, and the wrong ones are left out.
        """
        try:
            yield self._ready(chunks)
            return
        except Exception as error:  # as in `_take`
            LOG.warning("%d chunks are decoded one by one: %r", len(chunks), error)
        for one in chunks:
            try:
                ready = self._ready([one])
            except Exception as error:
                LOG.warning("a chunk of %s cannot be stored: %r", one.origin.node, error)
                continue
            yield ready

    def _ready(self, chunks: list[Unpacked]) -> _Ready:
        tables, refused = joined(chunks)
        origins = [one.origin for one in chunks]
        return _Ready(origins, stored_tables(origins, tables, self._hasher), refused)

    def _is_old_and_stored(self, chunk: Origin) -> bool:
        """Whether a chunk, whose digest the catalog may have forgotten, is in the files."""
        if chunk.end_ns > time.time_ns() - REMEMBERED_NS // 2:
            return False
        return any(
            pq.read_table(
                self._folder / one.path,
                columns=["digest"],
                filters=[("digest", "=", chunk.digest)],
            ).num_rows
            for one in self._catalog.files(chunk.tenant, "chunk", chunk.start_ns, chunk.end_ns + 1)
        )

    def _write(
        self,
        tenant: str,
        day: str,
        hour: int,
        ready: _Ready,
        learned: list[tuple[tuple[str, str, str], Any]],
    ) -> Iterator[StoredFile]:
        origins = ready.origins
        for name, table in ready.tables.items():
            if name in DICTIONARIES:
                at = (tenant, day, name)
                keys = table.column("key").to_numpy()
                of_this_batch = [some for place, some in learned if place == at]
                known = np.concatenate([self._known_keys(at), *of_this_batch])
                fresh = ~np.isin(keys, known)
                table = table.filter(pa.array(fresh))
                learned.append((at, keys[fresh]))
            if table.num_rows:
                span = min(one.start_ns for one in origins), max(one.end_ns for one in origins)
                yield write_file(self._folder, tenant, name, day, hour, table, span, 0)

    def _known_keys(self, at: tuple[str, str, str]) -> Any:
        keys = self._known.get(at)
        if keys is None:
            tenant, day, name = at
            paths = [
                self._folder / one.path
                for one in self._catalog.files(tenant, name)
                if one.day == day
            ]
            parts = [
                pq.read_table(path, columns=["key"]).column("key").to_numpy() for path in paths
            ]
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
    """A chunk in memory, its tables as they were sent."""

    origin: Origin
    tables: dict[str, pa.Table]
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
    meta, tables = unpack_chunk(raw, budget)
    size = len(record.body)
    origin = Origin(record.tenant, record.node, record.digest, record.received_ns, size, meta)
    return Unpacked(origin, tables, max(budget.held_bytes, size))


def joined(chunks: list[Unpacked]) -> tuple[dict[str, pa.Table], int]:
    """(tables of all chunks, checked, with the chunk of each row; rows refused).

    Raises DamagedChunkError, CaptureTooLarge.
    """
    parts: dict[str, dict[str, list[pa.Table]]] = {}
    for number, chunk in enumerate(chunks):
        for name, table in chunk.tables.items():
            numbers = pa.array(np.full(table.num_rows, number, np.int32))
            table = table.append_column(CHUNK_NUMBER, numbers)
            of_writer = parts.setdefault(name, {})
            of_writer.setdefault(str(table.schema), []).append(table)
    budget = Budget("a batch of chunks", sum(one.origin.size_bytes for one in chunks), JOINED_BYTES)
    refused = 0
    found = {}
    for name, of_writers in parts.items():
        fitting = []
        for some in of_writers.values():
            table, left_out, _ = conformed(name, pa.concat_tables(some), budget)
            refused += left_out
            fitting.append(table)
        found[name] = pa.concat_tables(fitting)
    return found, refused


def _hour_of(origin: Origin) -> tuple[str, int]:
    """(day, hour) that a chunk is stored under. Not just what it says of itself: each hour is a
    file a table, and when it goes is decided by the hour."""
    is_close = abs(origin.start_ns - origin.received_ns) <= CLOSE_NS
    at = time.gmtime((origin.start_ns if is_close else origin.received_ns) // 10**9)
    return time.strftime("%Y-%m-%d", at), at.tm_hour


def write_file(
    folder: Path,
    tenant: str,
    name: str,
    day: str,
    hour: int,
    table: pa.Table,
    span_ns: tuple[int, int],
    level: int,
) -> StoredFile:
    """Write a durable file; it counts once it is in the catalog. Raises OSError."""
    if "node" in table.column_names and name not in DICTIONARIES:
        table = _sorted(table, time_column(name))
    relative = Path("data", tenant, name, f"day={day}", f"hour={hour:02d}")
    path = relative / f"{uuid.uuid4().hex}.parquet"
    made_folders(folder, relative)
    least, most = span_ns
    if time_column(name) in table.column_names:
        times = pc.min_max(table.column(time_column(name))).as_py()
        least, most = min(least, times["min"]), max(most, times["max"])
    whole = folder / path
    try:
        pq.write_table(table, whole, compression="zstd", row_group_size=_ROW_GROUP)
        with whole.open("rb") as file:
            os.fsync(file.fileno())
        sync_folder(whole.parent)
    except BaseException:
        whole.unlink(missing_ok=True)
        raise
    size = whole.stat().st_size
    return StoredFile(str(path), tenant, name, day, hour, least, most, table.num_rows, size, level)


def _sorted(table: pa.Table, time: str) -> pa.Table:
    """By node, then by time."""
    node = table.column("node").cast(pa.string()).dictionary_encode().combine_chunks()
    names = np.array(node.dictionary.to_pylist(), object)
    ranks = np.argsort(np.argsort(names))[node.indices.to_numpy()]
    order = np.lexsort((table.column(time).to_numpy(), ranks))
    return table.take(pa.array(order))


def made_folders(folder: Path, relative: Path) -> None:
    """Make folders durable, from the outermost that is missing."""
    at = folder
    for part in relative.parts:
        at /= part
        if not at.is_dir():
            at.mkdir(mode=0o700, exist_ok=True)
            sync_folder(at.parent)
