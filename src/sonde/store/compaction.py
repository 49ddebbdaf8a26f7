# SPDX-License-Identifier: Apache-2.0
"""Merges small files into large ones; removes files that are too old, or too large together."""

from __future__ import annotations

import calendar
import logging
import math
import time
import uuid
from collections import Counter
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import duckdb

from sonde.store.bucket import DamagedObjectError
from sonde.store.catalog import Catalog, StoredFile
from sonde.store.flush import REMEMBERED_NS
from sonde.store.parquet import (
    ROW_GROUP,
    make_folders,
    order_of,
    remove,
    sync_file,
    write_batches,
)
from sonde.store.storage import DirectoryStorage
from sonde.store.tables import DICTIONARIES, SUMMED_TABLE
from sonde.store.wal import sync_folder

LOG = logging.getLogger("sonde.store")

COMPACTED_FROM = 12
"""Small files of one table and hour (of dictionaries: day) that are merged into one; not fewer."""
MAX_AT_ONCE = 64
"""Files that are merged into one at most, the smallest first."""
LARGEST_BYTES = 128 << 20
"""Files of this size are left as they are."""
GRACE_NS = 120 * 10**9
"""How long removed files stay on the disk, for queries that still read them."""
HOUR_NS = 3_600 * 10**9


@dataclass(slots=True)
class Compacted:
    """What one pass did."""

    gone: int = 0
    """Files that were replaced."""
    failed: int = 0
    """Groups that could not be merged: too large for the engine's memory, or damaged."""
    last: str = ""
    """The tenant of the last group."""


def compact(
    folder: Path,
    catalog: Catalog,
    storage: DirectoryStorage | None = None,
    most_s: float = math.inf,
    after: str = "",
) -> Compacted:
    """Replace small files by large ones. A group that the engine cannot merge is left as it is, and
    is not tried again. Raises OSError, sqlite3.Error.

    `most_s`: seconds after which no other group is begun, as chunks wait meanwhile. `after`: the
    tenant that was the last one then; others come first.
    """
    storage = storage or DirectoryStorage(folder)
    done = Compacted(last=after)
    ends_s = time.monotonic() + most_s

    def partition(one: StoredFile) -> tuple[str, str, str, int]:
        return one.tenant, one.name, one.day, -1 if one.name in DICTIONARIES else one.hour

    every = catalog.files()
    summed = {Path(one.path).name: one for one in every if one.name == SUMMED_TABLE}
    small = [
        one
        for one in every
        if one.size_bytes < LARGEST_BYTES and one.is_compactable and one.name != SUMMED_TABLE
    ]

    def turn(one: StoredFile) -> tuple[bool, tuple[str, str, str, int]]:
        return one.tenant <= after, partition(one)

    for _, group in groupby(sorted(small, key=turn), partition):
        files = sorted(group, key=lambda one: one.size_bytes)[:MAX_AT_ONCE]
        if len(files) < COMPACTED_FROM:
            continue
        if (done.gone or done.failed) and time.monotonic() > ends_s:
            break
        done.last = files[0].tenant
        try:
            merged = _merged(folder, files, storage)
        except (duckdb.Error, DamagedObjectError) as error:
            LOG.warning("%d files of %s are not compacted: %s", len(files), files[0].name, error)
            catalog.exclude_from_compaction(files)
            done.failed += 1
            continue
        made = [merged]
        try:
            made += _sums_of(folder, merged)
            storage.put(made)
        except BaseException:
            remove(folder, made)
            raise
        old_sums = [summed[name] for one in files if (name := Path(one.path).name) in summed]
        catalog.replace(made, files + old_sums, time.time_ns())
        done.gone += len(files) + len(old_sums)
    storage.publish()
    return done


def _merged(folder: Path, files: list[StoredFile], storage: DirectoryStorage) -> StoredFile:
    """A new file with the rows of all."""
    first = files[0]
    path = Path(first.path).with_name(f"{uuid.uuid4().hex}.parquet")
    absolute = folder / path
    sources = ", ".join(_literal(storage.local(one)) for one in files)
    columns, order = "*", order_of(first.name)
    if first.name in DICTIONARIES:
        columns, order = "DISTINCT ON (key) *", ("key",)
    rows = _copied(
        folder,
        f"SELECT {columns} FROM read_parquet([{sources}], union_by_name = true,"
        f" hive_partitioning = false) ORDER BY {', '.join(order)}",
        path,
    )
    return StoredFile(
        str(path),
        first.tenant,
        first.name,
        first.day,
        first.hour,
        min(one.min_ns for one in files),
        max(one.max_ns for one in files),
        rows,
        absolute.stat().st_size,
        1 + max(one.level for one in files),
    )


def _sums_of(folder: Path, sample: StoredFile) -> list[StoredFile]:
    """The file of `SUMMED_TABLE` with the sums of a file of `sample`, which questions over many
    hours read in its place. [] for a file of another table, and where it would have more than half
    as many rows."""
    if sample.name != "sample":
        return []
    # With the same day, hour and file name.
    path = Path("data", sample.tenant, SUMMED_TABLE, *Path(sample.path).parts[3:])
    make_folders(folder, path.parent)
    try:
        rows = _copied(
            folder,
            "SELECT node, kind, name, pid, start_ns, stack, min(time_ns) AS time_ns,"
            " sum(weight_count) AS weight_count, sum(weight_ns) AS weight_ns,"
            " sum(weight_bytes) AS weight_bytes, count(*) AS rows"
            f" FROM read_parquet({_literal(folder / sample.path)}, hive_partitioning = false)"
            " GROUP BY ALL ORDER BY node, kind, name, pid, stack",
            path,
        )
    except duckdb.Error as error:
        LOG.warning("%d rows are not summed up: %s", sample.row_count, error)
        return []
    if 2 * rows > sample.row_count:
        (folder / path).unlink()
        return []
    size = (folder / path).stat().st_size
    return [replace(sample, path=str(path), name=SUMMED_TABLE, row_count=rows, size_bytes=size)]


def _copied(folder: Path, sql: str, path: Path) -> int:
    """Write the rows of a query to a durable file; returns how many."""
    absolute = folder / path
    connection = engine()
    spill = folder / "spill"
    spill.mkdir(mode=0o700, exist_ok=True)
    connection.execute(f"SET temp_directory = {_literal(spill)}")
    try:
        rows = write_batches(connection.sql(sql).to_arrow_reader(ROW_GROUP), absolute)
        sync_file(absolute)
        sync_folder(absolute.parent)
    except (OSError, duckdb.Error):
        absolute.unlink(missing_ok=True)
        raise
    finally:
        connection.close()
    return rows


def engine() -> duckdb.DuckDBPyConnection:
    """An engine for compaction: little memory, no extensions from the network."""
    return duckdb.connect(
        config={
            "memory_limit": "128MiB",
            "threads": 1,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
    )


def _literal(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"


def retain(folder: Path, catalog: Catalog, age_ns: int, size_bytes: int, now_ns: int) -> int:
    """Mark files older than `age_ns` as removed, and the oldest beyond `size_bytes`; returns how
    many, dictionaries included. A limit of 0 is none.

    A file's age is that of the hour it is stored under, not of the times that nodes claim. Beyond
    `size_bytes` files of the tenant with most bytes are removed. Dictionaries are removed with the
    last other file of their day. Files of one hour go in the order of their paths: of a file of
    `sample` and that of its sums, one may be gone before the other.
    """
    files = catalog.files()
    expired: set[str] = set()
    queues: dict[str, list[StoredFile]] = {}
    total: Counter[str] = Counter()
    others: Counter[tuple[str, str]] = Counter()
    """Number of files of a tenant's day that are no dictionaries."""
    dictionaries: Counter[tuple[str, str]] = Counter()
    """Bytes of the dictionaries of a tenant's day."""

    def expire(one: StoredFile) -> None:
        expired.add(one.path)
        total[one.tenant] -= one.size_bytes
        others[one.tenant, one.day] -= 1
        if not others[one.tenant, one.day]:
            total[one.tenant] -= dictionaries[one.tenant, one.day]

    for one in files:
        total[one.tenant] += one.size_bytes
        if one.name in DICTIONARIES:
            dictionaries[one.tenant, one.day] += one.size_bytes
        else:
            others[one.tenant, one.day] += 1
            queues.setdefault(one.tenant, []).append(one)
    for queue in queues.values():
        queue.sort(key=lambda one: (one.day, one.hour, one.path), reverse=True)
        while (
            age_ns and queue and hour_ns(queue[-1].day, queue[-1].hour) + HOUR_NS < now_ns - age_ns
        ):
            expire(queue.pop())
    while size_bytes and total.total() > size_bytes:
        most = max(queues, key=lambda tenant: (bool(queues[tenant]), total[tenant]), default="")
        if not queues.get(most):
            break
        expire(queues[most].pop())
    catalog.forget_chunks(now_ns - REMEMBERED_NS)
    if not expired:
        return 0
    left = {
        (one.tenant, one.day)
        for one in files
        if one.path not in expired and one.name not in DICTIONARIES
    }
    gone = [
        one
        for one in files
        if one.path in expired or (one.name in DICTIONARIES and (one.tenant, one.day) not in left)
    ]
    catalog.replace([], gone, now_ns, files_expired=len(expired))
    return len(gone)


def hour_ns(day: str, hour: int) -> int:
    """When an hour begins, ns since 1970."""
    return (calendar.timegm(time.strptime(day, "%Y-%m-%d")) + 3600 * hour) * 10**9


def sweep(
    folder: Path, catalog: Catalog, now_ns: int, storage: DirectoryStorage | None = None
) -> int:
    """Delete files that were marked as removed `GRACE_NS` ago, in the directory and the bucket;
    returns how many. Raises OSError."""
    storage = storage or DirectoryStorage(folder)
    storage.publish()
    gone = storage.deletable(catalog.removed(now_ns - GRACE_NS))
    for path in gone:
        storage.delete(path)
    catalog.forget(gone)
    return len(gone)


def sweep_orphans(folder: Path, catalog: Catalog) -> int:
    """Remove files that are in no catalog, since a flush was killed before its commit; returns how
    many. Only for the holder of `flush.lock`."""
    known = {one.path for one in catalog.files()} | set(catalog.removed(1 << 62))  # whenever
    orphans = [
        path
        for path in (folder / "data").glob("*/*/*/*/*.parquet")
        if str(path.relative_to(folder)) not in known
    ]
    for path in orphans:
        path.unlink(missing_ok=True)
    return len(orphans)
