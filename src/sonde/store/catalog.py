# SPDX-License-Identifier: Apache-2.0
"""Which files hold what, and which chunks are in them: one SQLite database.

A batch of chunks becomes visible by one transaction: its files, the digests of its chunks, and how
far its log has been read. So after a kill at any moment a chunk is either in the files that count,
or in a part of the log that will be read again, never in both. SQLite's own log gives the
durability (synchronous=FULL) and lets several servers of one machine share the directory.

Tables: `file` (`StoredFile`; `removed_ns` is 0 while it counts), `chunk` (digests of stored chunks;
`end_ns` is when they came), `segment` (how far segments of the log were read), `attempt` (who tries
to store what follows, and how many crashed over it), `secret`, `counter` (of events, by name).
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sonde.store.database import Database

NAME = "catalog.sqlite"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS file (
  path TEXT PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, day TEXT NOT NULL,
  hour INTEGER NOT NULL, min_ns INTEGER NOT NULL, max_ns INTEGER NOT NULL,
  row_count INTEGER NOT NULL, size_bytes INTEGER NOT NULL, level INTEGER NOT NULL,
  removed_ns INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS file_by_time ON file (tenant, name, removed_ns, max_ns);
CREATE TABLE IF NOT EXISTS chunk (digest BLOB PRIMARY KEY, end_ns INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS chunk_by_end ON chunk (end_ns);
CREATE TABLE IF NOT EXISTS segment (path TEXT PRIMARY KEY, read_bytes INTEGER NOT NULL)
  WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS attempt (path TEXT PRIMARY KEY, read_bytes INTEGER NOT NULL,
  flusher TEXT NOT NULL, deaths INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS secret (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counter (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """An immutable Parquet file of one table of one tenant in one hour."""

    path: str
    """Relative to the store's directory."""
    tenant: str
    name: str
    """Of the table."""
    day: str
    hour: int
    min_ns: int
    """Of the times in it, ns since 1970, as `max_ns`."""
    max_ns: int
    row_count: int
    size_bytes: int
    level: int
    """0: as flushed; above: compacted; below: cannot be compacted."""

    @property
    def is_compactable(self) -> bool:
        """Whether it may be merged with others."""
        return self.level >= 0


_NOT_COMPACTABLE = -1
"""The level of files that could not be merged with others."""
_COLUMNS = "path, tenant, name, day, hour, min_ns, max_ns, row_count, size_bytes, level"


class Catalog:
    """The catalog of a store. Thread-safe; processes may share it."""

    def __init__(self, folder: Path) -> None:
        """Raises UsageError where other users could change it, sqlite3.Error, OSError."""
        self._db = Database(folder, NAME, _SCHEMA)

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def known(self, digests: Sequence[bytes]) -> set[bytes]:
        """Those of the digests whose chunks are in the files."""
        marks = ",".join("?" * len(digests))
        with self._db.held() as db:
            rows = db.execute(f"SELECT digest FROM chunk WHERE digest IN ({marks})", digests)
            return {row[0] for row in rows}

    def read_bytes(self, segment: str) -> int:
        """How many bytes of a segment of the log are stored."""
        with self._db.held() as db:
            row = db.execute("SELECT read_bytes FROM segment WHERE path = ?", [segment]).fetchone()
        return row[0] if row else 0

    def secret(self) -> bytes:
        """The store's secret, 32 bytes, with which keys of stacks and frames are computed: it stays
        the same as long as the store exists."""
        with self._db.held() as db:
            db.execute("INSERT OR IGNORE INTO secret VALUES ('keys', ?)", [secrets.token_bytes(32)])
            row = db.execute("SELECT value FROM secret WHERE name = 'keys'").fetchone()
        return bytes(row[0])

    def attempt(self, segment: str, read_bytes: int, flusher: str) -> int:
        """Note that `flusher` (an id) begins to store what follows an offset of a segment; returns
        how many others crashed while they did. One that reports an error and goes on has not
        crashed."""
        with self._db.transaction() as db:
            row = db.execute(
                "SELECT read_bytes, flusher, deaths FROM attempt WHERE path = ?", [segment]
            ).fetchone()
            crashes = row[2] + (row[1] != flusher) if row and row[0] == read_bytes else 0
            if row != (read_bytes, flusher, crashes):
                db.execute(
                    "INSERT OR REPLACE INTO attempt VALUES (?, ?, ?, ?)",
                    [segment, read_bytes, flusher, crashes],
                )
        return int(crashes)

    def commit(
        self,
        files: Iterable[StoredFile],
        chunks: Iterable[tuple[bytes, int]],
        segment: str,
        read_bytes: int,
        counted: dict[str, int],
    ) -> None:
        """Make a batch visible. `chunks`: (digest, when it came, ns since 1970); `read_bytes`: of
        the segment, up to the end of the batch; `counted`: what is added to counters."""
        with self._db.transaction() as db:
            _add(db, files)
            db.executemany("INSERT OR IGNORE INTO chunk VALUES (?, ?)", chunks)
            db.execute("INSERT OR REPLACE INTO segment VALUES (?, ?)", [segment, read_bytes])
            _count(db, counted)

    def replace(
        self, new: Iterable[StoredFile], old: Iterable[StoredFile], now_ns: int, **counted: int
    ) -> None:
        """Exchange files in one transaction; the old ones are marked as removed at `now_ns`."""
        with self._db.transaction() as db:
            _add(db, new)
            db.executemany(
                "UPDATE file SET removed_ns = ? WHERE path = ?",
                [(now_ns, one.path) for one in old],
            )
            _count(db, counted)

    def exclude_from_compaction(self, files: Iterable[StoredFile]) -> None:
        """Note that files cannot be compacted."""
        with self._db.transaction() as db:
            db.executemany(
                "UPDATE file SET level = ? WHERE path = ?",
                [(_NOT_COMPACTABLE, one.path) for one in files],
            )
            _count(db, {"compactions_failed": 1})

    def adopt(
        self,
        files: Iterable[StoredFile],
        chunks: Iterable[tuple[bytes, int]],
        gone: Iterable[str],
        **counted: int,
    ) -> None:
        """Add files that the bucket has and this catalog lacks, and their chunks; drop the entries
        `gone` (paths) of files that neither the bucket nor the directory has."""
        with self._db.transaction() as db:
            _add(db, files)
            db.executemany("INSERT OR IGNORE INTO chunk VALUES (?, ?)", chunks)
            db.executemany("DELETE FROM file WHERE path = ?", [(one,) for one in gone])
            _count(db, counted)

    def count(self, **counted: int) -> None:
        """Add to counters."""
        with self._db.transaction() as db:
            _count(db, counted)

    def files(
        self,
        tenant: str | None = None,
        name: str | None = None,
        start_ns: int = 0,
        end_ns: int = (1 << 63) - 1,
    ) -> list[StoredFile]:
        """The files that count, with a time in [start_ns, end_ns); oldest first."""
        condition = "removed_ns = 0 AND max_ns >= ? AND min_ns < ?"
        parameters: list[object] = [start_ns, end_ns]
        for column, value in (("tenant", tenant), ("name", name)):
            if value is not None:
                condition += f" AND {column} = ?"
                parameters.append(value)
        with self._db.held() as db:
            rows = db.execute(
                f"SELECT {_COLUMNS} FROM file WHERE {condition} ORDER BY day, hour, path",
                parameters,
            ).fetchall()
        return [StoredFile(*row) for row in rows]

    def removed(self, before_ns: int) -> list[str]:
        """Paths of files that were exchanged or expired before a time."""
        with self._db.held() as db:
            rows = db.execute(
                "SELECT path FROM file WHERE removed_ns > 0 AND removed_ns < ?", [before_ns]
            )
            return [row[0] for row in rows]

    def forget(self, paths: Iterable[str]) -> None:
        """Drop the entries of files that are gone."""
        with self._db.transaction() as db:
            db.executemany("DELETE FROM file WHERE path = ?", [(path,) for path in paths])

    def forget_segment(self, path: str) -> None:
        """Drop how far a segment was read that is gone."""
        with self._db.transaction() as db:
            db.execute("DELETE FROM segment WHERE path = ?", [path])
            db.execute("DELETE FROM attempt WHERE path = ?", [path])

    def forget_chunks(self, before_ns: int) -> None:
        """Drop the digests of chunks that came before a time: the files of the table `chunk` have
        them, too (`stored_digests.py`)."""
        with self._db.held() as db:
            db.execute("DELETE FROM chunk WHERE end_ns < ?", [before_ns])

    def counters(self) -> dict[str, int]:
        """What all flushes have counted."""
        with self._db.held() as db:
            return dict(db.execute("SELECT name, value FROM counter").fetchall())


def _add(db: sqlite3.Connection, files: Iterable[StoredFile]) -> None:
    db.executemany(
        f"INSERT INTO file ({_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?)",
        [tuple(getattr(one, name) for name in _COLUMNS.split(", ")) for one in files],
    )


def _count(db: sqlite3.Connection, counted: dict[str, int]) -> None:
    db.executemany(
        "INSERT INTO counter VALUES (?, ?) "
        "ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
        [(name, value) for name, value in counted.items() if value],
    )
