# SPDX-License-Identifier: Apache-2.0
"""The SQLite file of an aggregator: transactions that are synced to disk before any answer is sent.

`store` defines the contents. This module provides transactions, deferred counting of refusals, and
secure deletion: deleted data does not remain in the file, nor in its write-ahead log (here: the
log).

Its two tables: `refusal` has a count by reason, `mark` the file's metadata by name.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sonde.errors import SinkError
from sonde.fleet.party_files import STATE_OPEN_FLAGS, open_state_directory
from sonde.private_files import is_ours

_SCHEMA = """
CREATE TABLE IF NOT EXISTS refusal (
    reason TEXT PRIMARY KEY, count INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS mark (
    name TEXT PRIMARY KEY, value BLOB NOT NULL);
"""


class Database:
    """One SQLite file. Thread-safe."""

    def __init__(
        self, path: Path, schema: str, on_open: Callable[[sqlite3.Connection], None]
    ) -> None:
        """Opens or creates the file, and calls `on_open` with it.

        Raises SinkError; UsageError where other users could change its directory.
        """
        self._lock = threading.Lock()
        self._unwritten_lock = threading.Lock()
        self._unwritten: Counter[str] = Counter()  # refusals that no transaction has written yet
        self._log_needs_erasing = True  # a crash may have left data in it
        try:
            _create_private_files(path)
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("PRAGMA secure_delete=ON")  # no old sum remains in a free page
            self._db.executescript(_SCHEMA + schema)
            on_open(self._db)
        except (sqlite3.Error, OSError) as error:
            raise SinkError(
                f"cannot open the state at {path}: {error}",
                "repair its disk or permissions; do not replace a damaged state by an older copy",
            ) from error

    def close(self) -> None:
        """Writes deferred counts, then closes the file."""
        self.write_refusals()
        self._db.close()

    @contextmanager
    def transaction(
        self, erase: bool = False, on_commit: Callable[[], None] = lambda: None
    ) -> Iterator[sqlite3.Connection]:
        """A transaction: committed as a whole, or rolled back.

        With `erase`, the log is emptied at the end, or, while another process reads the file, by a
        later `erase_log`. `on_commit` runs after the commit, before any other transaction.
        """
        with self._lock:
            with self._unwritten_lock:
                unwritten = self._unwritten.copy()
            self._db.execute("BEGIN IMMEDIATE")
            try:
                count_refusals(self._db, unwritten)
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk may have rolled it back already
                    self._db.execute("ROLLBACK")
                raise
            with self._unwritten_lock:
                self._unwritten -= unwritten
            on_commit()
            if erase:
                self._log_needs_erasing = True
                self._truncate_log()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Read access, under the lock."""
        with self._lock:
            yield self._db

    @contextmanager
    def rolled_back(self) -> Iterator[sqlite3.Connection]:
        """A transaction that is rolled back at the end, to see its effect."""
        with self._lock:
            self._db.execute("BEGIN")
            try:
                yield self._db
            finally:
                self._db.execute("ROLLBACK")

    def erase_log(self) -> None:
        """Truncates the write-ahead log if deleted data may remain in it."""
        with self._lock:
            if self._log_needs_erasing:
                self._truncate_log()

    def _truncate_log(self) -> None:
        """Empties the log. Another process that reads the file prevents that; then `erase_log` does
        it.
        """
        (busy, *_) = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        self._log_needs_erasing = bool(busy)

    def note_refusals(self, reasons: Counter[str]) -> None:
        """Counts refusals in memory; they are written with the next transaction. Otherwise a
        stranger could cause a disk sync at will.
        """
        with self._unwritten_lock:  # never waits for a transaction that syncs
            self._unwritten += reasons

    def write_refusals(self) -> None:
        """Writes the counts that are only in memory; nothing if there are none."""
        if self._unwritten:
            with self.transaction():
                pass

    def refusals(self) -> dict[str, int]:
        """Counts by reason, including those not yet written."""
        with self._lock:
            stored = Counter(dict(self._db.execute("SELECT reason, count FROM refusal")))
            with self._unwritten_lock:
                return dict(sorted((stored + self._unwritten).items()))


def _create_private_files(path: Path) -> None:
    """Creates the file, or checks the existing one, with permissions for its owner only.

    SQLite opens it and its side files by name, so nobody else may be able to create files there.
    Raises OSError, UsageError.
    """
    folder = open_state_directory(path.parent)
    try:
        for suffix in ("", "-wal", "-shm", "-journal"):
            create = 0 if suffix else os.O_CREAT
            try:
                file = os.open(
                    f"{path.name}{suffix}",
                    os.O_RDWR | create | STATE_OPEN_FLAGS,
                    0o600,
                    dir_fd=folder,
                )
            except FileNotFoundError:
                continue
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode) or not is_ours(file):
                    raise OSError(f"{path.name}{suffix} is not a regular file of this party")
                os.fchmod(file, 0o600)  # a party's state is readable by its owner only
            finally:
                os.close(file)
    finally:
        os.close(folder)


def get_metadata(db: sqlite3.Connection, name: str) -> Any:
    """A value of the file's metadata; None if it is not set."""
    row = db.execute("SELECT value FROM mark WHERE name = ?", (name,)).fetchone()
    return None if row is None else row[0]


def set_metadata(db: sqlite3.Connection, name: str, value: bytes | int) -> None:
    """Sets a value of the file's metadata, within a transaction."""
    db.execute("INSERT OR REPLACE INTO mark VALUES (?, ?)", (name, value))


def count_refusals(db: sqlite3.Connection, reasons: Counter[str]) -> None:
    """Adds to the counts of refusals, within a transaction."""
    db.executemany(
        "INSERT INTO refusal VALUES (?, ?) "
        "ON CONFLICT (reason) DO UPDATE SET count = count + excluded.count",
        list(reasons.items()),
    )
