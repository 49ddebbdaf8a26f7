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

import os
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sonde.errors import CaptureError
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
from sonde.store.wal import sealed_segments, sync_folder

BATCH_RAW_BYTES = 32 << 20
"""Decompressed size of the chunks that are in memory together; about a sixth of what that takes."""
BATCH_CHUNKS = 512
CHUNK_BYTES = 512 << 20
"""Memory that one chunk may take to decode."""
REMEMBERED_NS = 3 * 86_400 * 10**9
"""How long after its end a chunk's digest is in the catalog, so that this stays small. Whether an
older chunk is stored is read from the files of its hour."""
_ROW_GROUP = 65_536
_KNOWN_KEYS = 8 << 20
"""Keys of dictionaries kept in memory (8 bytes each); beyond, some rows are stored again until they
are compacted."""


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


class Flusher:
    """Flushes the sealed segments of all servers of a directory. One at a time (`flush.lock`)."""

    def __init__(self, folder: Path, catalog: Catalog) -> None:
        self._folder, self._catalog = folder, catalog
        self._hasher = Hasher(engine())
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
        start = self._catalog.read_bytes(name)
        batch: list[Record] = []
        size = damaged = 0
        end = start
        for found in scan(path, start):
            end = found.end
            if isinstance(found.item, Damage):
                damaged += 1
                continue
            batch.append(found.item)
            size += _raw_bytes(found.item.body)
            if size >= BATCH_RAW_BYTES or len(batch) >= BATCH_CHUNKS:
                self._flush_batch(batch, name, end, damaged, done)
                batch, size, damaged = [], 0, 0
        if batch or damaged or end > start:
            self._flush_batch(batch, name, end, damaged, done)

    def _flush_batch(
        self, batch: list[Record], segment: str, end: int, damaged: int, done: Flushed
    ) -> None:
        known = self._catalog.known([record.digest for record in batch])
        fresh: dict[tuple[str, str, int], list[Unpacked]] = {}
        duplicates = undecodable = 0
        for record in batch:
            if record.digest in known:
                duplicates += 1
                continue
            known.add(record.digest)
            try:
                one = unpack(record)
            except (DamagedChunkError, CaptureError):
                undecodable += 1
                continue
            if self._is_old_and_stored(one.origin):
                duplicates += 1
                continue
            fresh.setdefault((record.tenant, *_hour_of(one.origin.start_ns)), []).append(one)
        files: list[StoredFile] = []
        learned: list[tuple[tuple[str, str, str], Any]] = []
        stored: list[Origin] = []
        refused = 0
        for (tenant, day, hour), some in fresh.items():
            origins, tables, left_out, bad = together(some)
            refused += left_out
            undecodable += bad
            if origins:
                files += self._write(tenant, day, hour, origins, tables, learned)
            stored += origins
        self._catalog.commit(
            files,
            [(one.digest, one.end_ns) for one in stored],
            segment,
            end,
            {
                "chunks_stored": len(stored),
                "chunks_duplicate": duplicates,
                "chunks_undecodable": undecodable,
                "log_parts_damaged": damaged,
                "rows_refused": refused,
            },
        )
        for key, keys in learned:
            self._learn(key, keys)
        done.chunks += len(stored)
        done.duplicates += duplicates
        done.damaged += damaged
        done.undecodable += undecodable
        done.size_bytes += sum(one.size_bytes for one in files)

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
        origins: list[Origin],
        tables: dict[str, pa.Table],
        learned: list[tuple[tuple[str, str, str], Any]],
    ) -> Iterator[StoredFile]:
        for name, table in stored_tables(origins, tables, self._hasher).items():
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


def unpack(record: Record) -> Unpacked:
    """The chunk of a record. Raises DamagedChunkError, CaptureError."""
    raw = next(iter(framing.framed_chunks(BytesIO(record.body), len(record.body))), None)
    if not isinstance(raw, framing.RawChunk):
        raise DamagedChunkError("no chunk with correct checksums")
    budget = Budget(f"a chunk of {record.node}", len(record.body), CHUNK_BYTES)
    meta, tables = unpack_chunk(raw, budget)
    size = len(record.body)
    origin = Origin(record.tenant, record.node, record.digest, record.received_ns, size, meta)
    return Unpacked(origin, tables)


def together(
    chunks: list[Unpacked],
) -> tuple[list[Origin], dict[str, pa.Table], int, int]:
    """(chunks, their tables as one, rows refused, chunks refused).

    Tables are checked together, which is several times faster than one by one. Where one of them is
    wrong, each chunk is checked alone, and the wrong ones are left out.
    """
    try:
        tables, refused = _joined(chunks)
        return [one.origin for one in chunks], tables, refused, 0
    except (DamagedChunkError, CaptureError):
        good = []
        for one in chunks:
            try:
                _joined([one])
            except (DamagedChunkError, CaptureError):
                continue
            good.append(one)
        tables, refused = _joined(good) if good else ({}, 0)
        return [one.origin for one in good], tables, refused, len(chunks) - len(good)


def _joined(chunks: list[Unpacked]) -> tuple[dict[str, pa.Table], int]:
    parts: dict[str, dict[str, list[pa.Table]]] = {}
    for number, chunk in enumerate(chunks):
        for name, table in chunk.tables.items():
            numbers = pa.array(np.full(table.num_rows, number, np.int32))
            table = table.append_column(CHUNK_NUMBER, numbers)
            of_writer = parts.setdefault(name, {})
            of_writer.setdefault(str(table.schema), []).append(table)
    budget = Budget("a batch of chunks", sum(one.origin.size_bytes for one in chunks), 4 << 30)
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


def _raw_bytes(body: bytes) -> int:
    """A guess of the decompressed size, before anything is decompressed: chunks reach 8."""
    return 8 * len(body)


def _hour_of(time_ns: int) -> tuple[str, int]:
    """(day, hour) of a time. Clocks of nodes may say anything: beyond 9999 no day has a name."""
    at = time.gmtime(min(max(time_ns, 0) // 10**9, 253_402_300_799))
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
