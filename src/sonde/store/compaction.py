# SPDX-License-Identifier: Apache-2.0
"""Few large files instead of many small ones; and an end to what is too old or too much."""

from __future__ import annotations

import os
import time
import uuid
from itertools import groupby
from pathlib import Path

import duckdb

from sonde.store.catalog import Catalog, StoredFile
from sonde.store.flush import REMEMBERED_NS, engine
from sonde.store.tables import DICTIONARIES, time_column
from sonde.store.wal import sync_folder

COMPACTED_FROM = 12
"""Files of one table and hour (day, of dictionaries) before they become one."""
MOST_AT_ONCE = 64
LARGEST_BYTES = 128 << 20
"""Files of this size are left as they are."""
GRACE_NS = 120 * 10**9
"""How long exchanged files stay, for queries that still read them."""


def compact(folder: Path, catalog: Catalog) -> int:
    """Exchange small files for large ones; returns how many went. Raises OSError, duckdb.Error."""
    gone = 0

    def place(one: StoredFile) -> tuple[str, str, str, int]:
        return one.tenant, one.name, one.day, -1 if one.name in DICTIONARIES else one.hour

    small = [one for one in catalog.files() if one.size_bytes < LARGEST_BYTES]
    for _, group in groupby(sorted(small, key=place), place):
        files = sorted(group, key=lambda one: one.size_bytes)[:MOST_AT_ONCE]
        if len(files) >= COMPACTED_FROM:
            catalog.replace([_merged(folder, files)], files, time.time_ns())
            gone += len(files)
    return gone


def _merged(folder: Path, files: list[StoredFile]) -> StoredFile:
    first = files[0]
    path = Path(first.path).with_name(f"{uuid.uuid4().hex}.parquet")
    whole = folder / path
    sources = ", ".join(_literal(folder / one.path) for one in files)
    order = f"node, {time_column(first.name)}"
    choice = "*"
    if first.name in DICTIONARIES:
        choice, order = "DISTINCT ON (key) *", "key"
    connection = engine()
    spill = folder / "spill"
    spill.mkdir(mode=0o700, exist_ok=True)
    connection.execute(f"SET temp_directory = {_literal(spill)}")
    try:
        connection.execute(
            f"COPY (SELECT {choice} FROM read_parquet([{sources}], union_by_name = true,"
            f" hive_partitioning = false) ORDER BY {order})"
            f" TO {_literal(whole)} (FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE 65536)"
        )
        rows = connection.execute(f"SELECT count(*) FROM read_parquet({_literal(whole)})")
        found = rows.fetchone()
        with whole.open("rb") as file:
            os.fsync(file.fileno())
        sync_folder(whole.parent)
    except (OSError, duckdb.Error):
        whole.unlink(missing_ok=True)
        raise
    finally:
        connection.close()
    return StoredFile(
        str(path),
        first.tenant,
        first.name,
        first.day,
        first.hour,
        min(one.min_ns for one in files),
        max(one.max_ns for one in files),
        found[0] if found else 0,
        whole.stat().st_size,
        1 + max(one.level for one in files),
    )


def _literal(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"


def retain(folder: Path, catalog: Catalog, age_ns: int, size_bytes: int, now_ns: int) -> int:
    """Drop files older than `age_ns`, and the oldest beyond `size_bytes`; returns how many.

    Dictionaries go with the last rows of their day. 0: no limit.
    """
    files = sorted(catalog.files(), key=lambda one: one.max_ns)
    total = sum(one.size_bytes for one in files)
    expired = []
    for one in files:
        old = bool(age_ns) and one.max_ns < now_ns - age_ns
        too_much = bool(size_bytes) and total > size_bytes
        if one.name not in DICTIONARIES and (old or too_much):
            expired.append(one)
            total -= one.size_bytes
    if expired:
        gone = {one.path for one in expired}
        left = {
            (one.tenant, one.day)
            for one in files
            if one.path not in gone and one.name not in DICTIONARIES
        }
        expired += [
            one for one in files if one.name in DICTIONARIES and (one.tenant, one.day) not in left
        ]
        catalog.replace([], expired, now_ns, files_expired=len(expired))
    catalog.forget_chunks(now_ns - REMEMBERED_NS)
    return len(expired)


def sweep(folder: Path, catalog: Catalog, now_ns: int) -> int:
    """Remove files that no longer count, and those that a killed flush has left."""
    gone = catalog.removed(now_ns - GRACE_NS)
    for path in gone:
        (folder / path).unlink(missing_ok=True)
    catalog.forget(gone)
    return len(gone)


def sweep_orphans(folder: Path, catalog: Catalog) -> int:
    """Remove files in no catalog: a flush was killed before its commit. Call it with the lock."""
    known = {one.path for one in catalog.files()} | set(catalog.removed(1 << 62))
    orphans = [
        path
        for path in (folder / "data").glob("*/*/*/*/*.parquet")
        if str(path.relative_to(folder)) not in known
    ]
    for path in orphans:
        path.unlink(missing_ok=True)
    return len(orphans)
