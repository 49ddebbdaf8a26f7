# SPDX-License-Identifier: Apache-2.0
"""The child of a server that flushes, compacts and removes: `python -m sonde.store.flusher`.

It is a separate process so that its memory and its time are not the server's. Several servers of
one directory each have one; the lock `flush.lock` lets one at a time work, and goes to another when
its holder dies. It ends when its standard input does, that is with its server.
"""

from __future__ import annotations

import fcntl
import gc
import json
import math
import os
import select
import sqlite3
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import duckdb
import pyarrow as pa

from sonde.store.bucket import BucketError
from sonde.store.catalog import Catalog
from sonde.store.compaction import compact, retain, sweep, sweep_orphans
from sonde.store.flush import Flusher
from sonde.store.storage import BucketSettings, BucketStorage, DirectoryStorage

PERIOD_S = 1.0
"""Between flushes, and between tries to get the lock."""
_FAILURES = (
    OSError,  # BucketError among them
    sqlite3.Error,
    duckdb.Error,
    pa.ArrowException,
    MemoryError,
    # Raised for damaged objects and files.
    ValueError,
    LookupError,
    ArithmeticError,
    RecursionError,
    zlib.error,
)
"""After one of these the work goes on."""
TIDY_S = 30.0
"""Between expiring, deleting and compacting files."""
COMPACT_S = 10.0
"""After this long of compaction chunks are stored again. What is left is compacted the next time,
that of other tenants first."""
BEHIND_S = 120.0
"""For this long compaction is put off while each flush finds as many segments as it takes at a
time, so that more may wait: chunks are stored first."""
MAX_PAUSE_S = 30.0
"""Longest pause between attempts while the bucket fails. The pause doubles each time, since an
attempt decodes a batch."""
SEGMENTS = 4
"""Segments of the log that one flush takes at most."""


def main() -> None:
    """`FOLDER AGE_NS SIZE_BYTES [BUCKET SERVER CACHE_BYTES]`: work until standard input ends.

    SERVER: this server's name, under which its files are in the bucket.
    """
    folder, age_ns, size_bytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    bucket = None
    if len(sys.argv) > 4:
        bucket = BucketSettings(sys.argv[4], sys.argv[5], int(sys.argv[6]))
    os.nice(5)
    # Batches allocate and free large blocks on three threads. malloc maps and clears memory for
    # them half as often as Arrow's own allocator, and keeps a tenth less resident.
    pa.set_memory_pool(pa.system_memory_pool())
    gc.freeze()  # modules and what they refer to are never freed
    gc.set_threshold(50_000)  # a chunk makes a thousand objects, none in a reference cycle
    lock = os.open(folder / "flush.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    while not _acquired(lock):
        _report(leads=False)
        if _ended(PERIOD_S):
            return
    catalog = Catalog(folder)
    sweep_orphans(folder, catalog)
    storage = BucketStorage(folder, catalog, bucket) if bucket else DirectoryStorage(folder)
    flusher = Flusher(folder, catalog, storage)
    tidied = compacted = time.monotonic()
    compaction = _Compaction(folder, catalog, storage)
    pause_s = PERIOD_S
    while True:
        is_bucket_there = True
        try:
            storage.join()
            done = flusher.flush(SEGMENTS)
            is_behind, pause_s = done.segments >= SEGMENTS, PERIOD_S
            _report(leads=True, chunks=done.chunks, error="", bucket_error="")
        except _FAILURES as failed:
            is_behind = False
            # Without the bucket the server still accepts chunks, as long as the log has room.
            is_bucket_there = not isinstance(failed, BucketError)
            _report(
                leads=True,
                chunks=0,
                error=_text(failed) if is_bucket_there else "",
                bucket_error="" if is_bucket_there else _text(failed),
            )
            # The old one may know keys of rows that were not committed.
            flusher = Flusher(folder, catalog, storage)
            pause_s = PERIOD_S if is_bucket_there else min(2 * pause_s, MAX_PAUSE_S)
            tidied = -math.inf  # files that are too old may fill the disk
        if time.monotonic() - tidied > TIDY_S:
            tidied = time.monotonic()
            # DuckDB allocates by itself: memory that flushes have freed is given back first.
            pa.default_memory_pool().release_unused()
            with_bucket: tuple[Callable[[], object], ...] = ()
            if is_bucket_there and not (is_behind and tidied - compacted < BEHIND_S):
                compacted = tidied
                with_bucket = (
                    lambda: sweep(folder, catalog, time.time_ns(), storage),
                    compaction.do,
                )
            _tidy(
                lambda: retain(folder, catalog, age_ns, size_bytes, time.time_ns()),
                *with_bucket,
                storage.shrink_cache,
            )
        if _ended(0 if is_behind else pause_s):
            return


class _Compaction:
    """Compaction, for COMPACT_S at a time."""

    def __init__(self, folder: Path, catalog: Catalog, storage: DirectoryStorage) -> None:
        self._folder, self._catalog, self._storage = folder, catalog, storage
        self._last = ""
        """The tenant whose files were compacted last."""

    def do(self) -> None:
        """Compact files, those of other tenants than the last time first."""
        done = compact(self._folder, self._catalog, self._storage, COMPACT_S, self._last)
        self._last = done.last


def _tidy(*works: Callable[[], object]) -> None:
    """Do each of the works; one that fails is reported and stops no other."""
    for work in works:
        try:
            work()
        except _FAILURES as failed:
            _report(leads=True, tidying=_text(failed))


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def _acquired(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _report(**status: object) -> None:
    """Write a line of JSON for the server. `leads`: whether this process has the lock."""
    sys.stdout.write(json.dumps(status) + "\n")
    sys.stdout.flush()


def _ended(seconds: float) -> bool:
    """Wait; returns whether the server has ended meanwhile."""
    ready, _, _ = select.select([0], [], [], seconds)
    return bool(ready) and not os.read(0, 1)


if __name__ == "__main__":
    main()
