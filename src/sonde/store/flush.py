# SPDX-License-Identifier: Apache-2.0
"""From the log to Parquet: batch after batch, each of bounded memory.

A batch becomes one file for each table and hour, for all nodes together: one for each node would be
thousands of tiny files a minute (parquet.py). While one thread writes the files of a batch and
commits them, others decode the next ones, and the log is read on.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sonde.store.catalog import Catalog, StoredFile
from sonde.store.chunks import OpenedChunk, open_chunk
from sonde.store.parquet import make_durable, remove, write_all, write_file
from sonde.store.put_off import PutOff, Turns
from sonde.store.record import Damage, Record, scan
from sonde.store.row_reader import RowReader
from sonde.store.storage import DirectoryStorage
from sonde.store.stored_digests import StoredDigests, column_of
from sonde.store.tables import DICTIONARIES, Origin
from sonde.store.wal import sealed_segments, secret_of

BATCH_BYTES = 40 << 20
"""Size of the chunks of a batch, decompressed. A flusher takes about six times as much memory: for
the rows made of them, and for two more batches. Each batch makes a file for each table, so with
half as much, flushing takes a fifth more time."""
BATCH_CHUNKS = 1_024
"""Records of the log in a batch."""
MADE_BYTES = 96 << 20
"""Memory of decoded rows after which they are written before more are decoded: rows may be many
times as large as in their chunks."""
DECODERS = 2
"""Batches that are decoded at a time; one more is written, and one is read from the log."""
TURN_BYTES = BATCH_BYTES
"""Size of the chunks, decompressed, that one tenant gets stored of a segment with chunks of others;
what is beyond is put off (put_off.py)."""
CLOSE_NS = 2 * 3600 * 10**9
"""Chunks whose start differs from the time at which they came by at most this are stored under the
hour of their start; others, of nodes with wrong clocks or that were cut off, under the hour in
which they came."""
MAX_CRASHES_OF_BATCH, MAX_CRASHES_OF_CHUNK = 3, 5
"""After this many flushers have crashed at one offset of the log, the chunks that follow are stored
one by one; after this many, the first of them is quarantined."""
MAX_QUARANTINE_BYTES = 256 << 20
"""Of all files in DIR/quarantine; beyond, chunks are dropped and counted."""
REMEMBERED_NS = 3 * 86_400 * 10**9
"""How long after a chunk came its digest stays in the catalog. Whether an older chunk is stored is
read from the files of the table `chunk` (stored_digests.py)."""
_KNOWN_KEYS = 8 << 20
"""Keys of stored dictionary rows that are kept in memory (8 bytes each). Rows whose keys are not
known are stored again; compaction removes duplicates."""

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
"""A tenant, a day and an hour: what a file is of."""
_Dictionary = tuple[str, str, str]
"""A tenant, a day and the name of a table of DICTIONARIES."""


@dataclass(slots=True)
class _Batch:
    """Chunks that are stored by one transaction."""

    fresh: dict[_Partition, list[OpenedChunk]] = field(default_factory=dict)
    """Those that are to be stored."""
    digests: set[bytes] = field(default_factory=set)
    size_bytes: int = 0
    records: int = 0
    duplicates: int = 0
    undecodable: int = 0
    set_aside: int = 0
    """Old chunks in quarantine: a file that may have them is damaged."""
    damaged: int = 0
    """Parts of the log without a readable record."""
    put_off: int = 0
    """Chunks that were copied to a segment that is stored later."""


class Flusher:
    """Flushes the sealed segments of all servers of a directory. Only for the holder of
    `flush.lock`."""

    def __init__(
        self, folder: Path, catalog: Catalog, storage: DirectoryStorage | None = None
    ) -> None:
        """`storage`: where files are; the directory alone where not given."""
        self._folder, self._catalog = folder, catalog
        self._storage = storage or DirectoryStorage(folder)
        self._id = uuid.uuid4().hex
        self._wal_secret = secret_of(folder / "wal")
        self._later = PutOff(folder / "wal", self._wal_secret)
        self._turns = Turns(folder / "wal", self._wal_secret)
        self._reached: dict[str, int] = {}
        """Up to which offset segments were read, of those that were read in part in this pass."""
        self._secret = catalog.secret()
        self._of_thread = threading.local()
        """`rows`: the thread's `RowReader`."""
        self._stored = StoredDigests(catalog, self._storage)
        self._known: OrderedDict[_Dictionary, Any] = OrderedDict()
        """Sorted keys of stored rows, by dictionary; the least recently used is dropped first."""
        self._decoders = ThreadPoolExecutor(DECODERS, "sonde-decode")
        self._writer = ThreadPoolExecutor(1, "sonde-store")
        self._begun: deque[Future[None]] = deque()
        """Work of the writer that has not ended, in order."""
        self._has_failed = False
        """Whether the writer's last work failed: what follows must not be stored then, as a segment
        is always read on from one offset."""
        self._in_flight: deque[set[bytes]] = deque(maxlen=DECODERS + 1)
        """Digests of the chunks of each batch that is decoded or written."""

    def flush(self, most_segments: int = 1 << 30) -> Flushed:
        """Flush up to `most_segments` sealed segments. Raises OSError where the disk refuses,
        sqlite3.Error.

        Those of several tenants come first; between two of them one batch is stored of the tenant
        whose turn it is among those that have segments alone.
        """
        done = Flushed()
        over: set[Path] = set()
        try:
            while done.segments < most_segments:
                sealed = [one for one in sealed_segments(self._folder / "wal") if one not in over]
                shared = self._turns.look(sealed, over)
                for path in shared[:1]:
                    self._flush_segment(path, done, over, is_shared=True)
                alone = self._turns.next()
                if alone is not None and alone not in over:
                    self._flush_segment(alone, done, over, is_shared=False)
                elif not shared:
                    break
            self._wait()
        finally:
            while self._begun:
                with suppress(Exception):  # the first one was raised already
                    self._begun.popleft().result()
            self._in_flight.clear()
            self._reached.clear()
            self._later.drop()
            self._has_failed = False
        return done

    def _begin(self, work: Callable[[], None]) -> None:
        """Have the writer do something after all that was begun before."""

        def work_unless_failed() -> None:
            if self._has_failed:
                return
            try:
                work()
            except BaseException:
                self._has_failed = True
                raise

        self._begun.append(self._writer.submit(work_unless_failed))

    def _wait(self, most: int = 0) -> None:
        """Wait until the writer has at most `most` works left. Raises what they raise."""
        while len(self._begun) > most:
            self._begun.popleft().result()

    def _flush_segment(self, path: Path, done: Flushed, over: set[Path], is_shared: bool) -> None:
        """Flush a segment, and add it to `over`; of one that is not shared by tenants one batch
        alone."""
        name = str(path.relative_to(self._folder))
        crashes = 0
        if name in self._reached:
            start = self._reached[name]
        else:
            start = self._catalog.read_bytes(name)
            crashes = self._catalog.attempt(name, start, self._id)
        end = start
        # To find the chunk that crashes flushers, the next batch is begun after the last has ended.
        is_careful = crashes > 0
        singles_left = BATCH_CHUNKS if crashes >= MAX_CRASHES_OF_BATCH else 0
        turns: Counter[str] | None = Counter() if is_shared and not is_careful else None
        batch = _Batch()
        for found in scan(path, self._wal_secret, start):
            end = found.end
            if isinstance(found.item, Damage):
                batch.damaged += 1
                continue
            if crashes >= MAX_CRASHES_OF_CHUNK and not batch.records:
                batch.records += 1
                batch.undecodable += 1
                self._quarantine(found.item, "ends the flusher")
            else:
                self._take(found.item, batch, turns)
            is_full = batch.size_bytes >= BATCH_BYTES or batch.records >= BATCH_CHUNKS
            if is_full or singles_left or self._later.is_full:
                self._flush_batch(batch, path, name, end, done)
                if is_careful:
                    self._wait()
                batch, crashes, singles_left = _Batch(), 0, max(0, singles_left - 1)
                if not is_shared and not is_careful:
                    self._reached[name] = end
                    return
        if batch.records or batch.damaged:
            self._flush_batch(batch, path, name, end, done)
        over.add(path)
        done.segments += 1

        def forget() -> None:
            self._storage.publish()
            path.unlink()
            self._catalog.forget_segment(name)

        self._begin(forget)

    def _take(self, record: Record, batch: _Batch, turns: Counter[str] | None = None) -> None:
        """Add the chunk of a record to a batch. One that cannot be decoded affects no other.

        `turns`: bytes of each tenant's chunks of this segment; beyond its turn a chunk is put off.
        """
        batch.records += 1
        is_here = any(record.digest in digests for digests in (batch.digests, *self._in_flight))
        is_here = is_here or self._storage.is_elsewhere(record.digest)
        if is_here or self._catalog.known([record.digest]):
            batch.duplicates += 1
            return
        if turns is not None and self._turns.waits(record.tenant):
            self._put_off(record, batch)
            return
        batch.digests.add(record.digest)
        try:
            one = open_chunk(record)
        except Exception as error:  # chunks of other nodes must be stored all the same
            LOG.warning("a chunk of %s cannot be decoded: %r", record.node, error)
            batch.undecodable += 1
            return
        is_stored = self._is_old_and_stored(one.origin)
        if is_stored is None:
            batch.set_aside += 1
            self._quarantine(record, "is old, and a file that may have it is damaged")
            return
        if is_stored:
            batch.duplicates += 1
            return
        if turns is not None:
            # The first one is stored in any case: a turn lasts until it is used up.
            is_over = turns[record.tenant] >= TURN_BYTES
            turns[record.tenant] += one.size_bytes
            if is_over:
                batch.digests.discard(record.digest)
                self._put_off(record, batch)
                return
        batch.size_bytes += one.size_bytes
        partition = record.tenant, *_hour_of(one.origin)
        batch.fresh.setdefault(partition, []).append(one)

    def _put_off(self, record: Record, batch: _Batch) -> None:
        """Have a chunk stored after others of its tenant that wait. Raises OSError."""
        self._later.add(record)
        self._turns.put_off(record.tenant)
        batch.put_off += 1

    def _quarantine(self, record: Record, why: str) -> None:
        """Keep a chunk that is not stored, in a file: a capture without file header. Raises
        OSError."""
        folder = self._folder / "quarantine"
        folder.mkdir(mode=0o700, exist_ok=True)
        LOG.error("a chunk of %s is quarantined: it %s", record.node, why)
        kept = sum(path.stat().st_size for path in folder.iterdir())
        if kept + len(record.body) <= MAX_QUARANTINE_BYTES:
            (folder / f"{record.digest.hex()}.chunk").write_bytes(record.body)
        else:
            LOG.error("the quarantine is full: a chunk of %s is lost", record.node)
            self._catalog.count(chunks_lost=1)

    def _flush_batch(
        self, batch: _Batch, path: Path, segment: str, end: int, done: Flushed
    ) -> None:
        """Have a batch decoded, concurrently with others, and written after those before it."""
        self._later.seal(path)  # before the catalog notes that the segment was read up to `end`
        self._wait(DECODERS)
        parts = self._decoders.submit(self._decode, batch)
        self._in_flight.append(batch.digests)
        self._begin(lambda: self._store(batch, parts.result(), segment, end, done))

    def _decode(self, batch: _Batch) -> _Decoded:
        """The first parts of a batch, decoded, and an iterator that decodes the others."""
        others = self._parts(batch)
        return _next_parts(others), others

    def _parts(self, batch: _Batch) -> Iterator[tuple[_Partition, _Ready]]:
        """Decode a batch. What cannot be decoded is counted in it."""
        while batch.fresh:
            partition, chunks = batch.fresh.popitem()
            batch.undecodable += len(chunks)
            for part in self._tables_of(chunks):
                batch.undecodable -= len(part.origins)
                yield partition, part

    def _store(
        self, batch: _Batch, decoded: _Decoded, segment: str, end: int, done: Flushed
    ) -> None:
        """Write the files of a batch and commit them. Run by the writer."""
        learned: list[tuple[_Dictionary, Any]] = []
        stored: list[Origin] = []
        files: list[StoredFile] = []
        refused = 0
        parts, others = decoded
        try:
            while parts:
                stored += [one for _, part in parts for one in part.origins]
                refused += sum(part.refused for _, part in parts)
                writes = [one for each in parts for one in self._fresh_tables(*each, learned)]
                files += write_all(writes, self._folder)
                parts.clear()
                writes.clear()
                parts = _next_parts(others)
            make_durable(self._folder, files)
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
                "chunks_set_aside": batch.set_aside,
                "chunks_put_off": batch.put_off,
                "log_parts_damaged": batch.damaged,
                "rows_refused": refused,
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

    def _tables_of(self, chunks: list[OpenedChunk]) -> Iterator[_Ready]:
        """Chunks of one hour as tables of the store.

        They are decoded and checked together, which is many times faster than one by one. Where
        that fails, because one of them is invalid or all are too large, each half is tried, down to
        single chunks. Those that fail are left out.
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

    def _ready(self, chunks: list[OpenedChunk]) -> _Ready:
        rows = getattr(self._of_thread, "rows", None)
        if rows is None:
            rows = self._of_thread.rows = RowReader(self._secret)
        tables, refused, is_sorted = rows.read(chunks)
        return _Ready([one.origin for one in chunks], tables, refused, is_sorted)

    def _is_old_and_stored(self, chunk: Origin) -> bool | None:
        """Whether a chunk is so old that the catalog may have dropped its digest, and is in the
        files; None: a file that may have it is damaged."""
        if chunk.end_ns > time.time_ns() - REMEMBERED_NS // 2:
            return False
        return self._stored.has(chunk)

    def _fresh_tables(
        self, partition: _Partition, ready: _Ready, learned: list[tuple[_Dictionary, Any]]
    ) -> Iterator[Callable[[], StoredFile]]:
        """Functions that write a table each, without the rows of dictionaries that are stored
        already. The keys of the others are added to `learned`."""
        tenant, day, hour = partition
        origins = ready.origins
        span = min(one.start_ns for one in origins), max(one.end_ns for one in origins)
        for name, table in ready.tables.items():
            if name in DICTIONARIES:
                at = (tenant, day, name)
                keys = table.column("key").to_numpy()
                fresh = ~_is_among(keys, self._known_keys(at))
                for other, more in learned:
                    if other == at:
                        fresh &= ~np.isin(keys, more)
                table = table.filter(pa.array(fresh))
                learned.append((at, keys[fresh]))
            if table.num_rows:
                yield partial(
                    write_file, self._folder, tenant, name, day, hour, table, span, ready.is_sorted
                )

    def _known_keys(self, at: _Dictionary) -> Any:
        """Sorted keys of the rows of a dictionary that are stored, as far as they are known."""
        keys = self._known.get(at)
        if keys is None:
            tenant, day, name = at
            parts = []
            left = _KNOWN_KEYS
            for one in self._catalog.files(tenant, name):
                left -= one.row_count if one.day == day else 0
                if one.day == day and left >= 0:
                    # Rows of a damaged file are stored again.
                    column = column_of(self._catalog, self._storage, one, "key")
                    parts.append(np.zeros(0, np.int64) if column is None else column.to_numpy())
            keys = np.sort(np.concatenate([np.zeros(0, np.int64), *parts]))
            self._known[at] = keys
        self._known.move_to_end(at)
        return keys

    def _learn(self, at: _Dictionary, keys: Any) -> None:
        """Add keys of rows that are stored now."""
        if at in self._known and len(self._known[at]) + len(keys) <= _KNOWN_KEYS:
            # A stable sort merges two sorted arrays in one pass.
            both = np.concatenate([self._known[at], np.sort(keys)])
            self._known[at] = np.sort(both, kind="stable")
        while len(self._known) > 1 and sum(map(len, self._known.values())) > _KNOWN_KEYS:
            self._known.popitem(last=False)


@dataclass(frozen=True, slots=True)
class _Ready:
    """Chunks of one hour as tables of the store."""

    origins: list[Origin]
    tables: dict[str, pa.Table]
    refused: int
    """Rows that hold impossible values."""
    is_sorted: bool
    """Whether rows are sorted by node and, more or less, by time."""


_Decoded = tuple[list[tuple[_Partition, _Ready]], Iterator[tuple[_Partition, _Ready]]]
"""The first parts of a batch, and an iterator that decodes the others."""


def _next_parts(parts: Iterator[tuple[_Partition, _Ready]]) -> list[tuple[_Partition, _Ready]]:
    """The next ones, until they reach `MADE_BYTES`."""
    found: list[tuple[_Partition, _Ready]] = []
    size = 0
    for partition, part in parts:
        found.append((partition, part))
        size += sum(table.nbytes for table in part.tables.values())
        if size >= MADE_BYTES:
            break
    return found


def _is_among(keys: Any, known: Any) -> Any:
    """Whether each key is among the known ones, which are sorted."""
    if not len(known):
        return np.zeros(len(keys), np.bool_)
    positions = np.searchsorted(known, keys)
    return known[np.minimum(positions, len(known) - 1)] == keys


def _hour_of(origin: Origin) -> tuple[str, int]:
    """(day, hour) that a chunk is stored under. Not always by the times that it states: each hour
    makes a file for each table, and the hour decides when files expire."""
    is_close = abs(origin.start_ns - origin.received_ns) <= CLOSE_NS
    at = time.gmtime((origin.start_ns if is_close else origin.received_ns) // 10**9)
    return time.strftime("%Y-%m-%d", at), at.tm_hour
