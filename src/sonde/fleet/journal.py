# SPDX-License-Identifier: Apache-2.0
"""The file that an aggregator remembers in: SQLite, one step at a time, synced before any answer.

What is in it is `store`'s; here is how a step is made, what is counted on the way, and that nothing
of what was forgotten stays readable.
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
from sonde.fleet.party_files import STATE_FLAGS, hold_state
from sonde.private_files import is_ours

_SCHEMA = """
CREATE TABLE IF NOT EXISTS refusal (
    reason TEXT PRIMARY KEY, count INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS mark (
    name TEXT PRIMARY KEY, value BLOB NOT NULL);
"""


class Journal:
    """One SQLite file. Threads may share it."""

    def __init__(self, path: Path, schema: str, look: Callable[[sqlite3.Connection], None]) -> None:
        """Opens or makes it; `look` reads first. Raises SinkError where any of it fails."""
        self._lock = threading.Lock()
        self._noting = threading.Lock()
        self._noted: Counter[str] = Counter()
        self._untidy = True  # what a crash has left in the log
        try:
            _claim(path)
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("PRAGMA secure_delete=ON")  # no sum of before in a page that is free
            self._db.executescript(_SCHEMA + schema)
            look(self._db)
        except (sqlite3.Error, OSError) as error:
            raise SinkError(
                f"cannot open the state at {path}: {error}",
                "mend its disk and rights; a damaged state is not to be replaced by an older copy",
            ) from error

    def close(self) -> None:
        """What was noted is written first."""
        if self._noted:
            with self.step():
                pass
        self._db.close()

    @contextmanager
    def step(
        self, thorough: bool = False, then: Callable[[], None] = lambda: None
    ) -> Iterator[sqlite3.Connection]:
        """One step: all of it, or nothing. A thorough one leaves nothing of it in the log; `then`
        is done once it is committed, before anyone else comes.
        """
        with self._lock:
            with self._noting:
                noted = self._noted.copy()
            self._db.execute("BEGIN IMMEDIATE")
            try:
                count_refusals(self._db, noted)
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk may have ended it
                    self._db.execute("ROLLBACK")
                raise
            with self._noting:
                self._noted -= noted
            then()
            if thorough:
                self._untidy = True
                self._tidy()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Alone with the file, to look at it."""
        with self._lock:
            yield self._db

    @contextmanager
    def trying(self) -> Iterator[sqlite3.Connection]:
        """A step that is taken back at its end, to see what it would come to."""
        with self._lock:
            self._db.execute("BEGIN")
            try:
                yield self._db
            finally:
                self._db.execute("ROLLBACK")

    def tidy(self) -> None:
        """Cut off the log if something of before may still be in it."""
        with self._lock:
            if self._untidy:
                self._tidy()

    def _tidy(self) -> None:
        """While someone else reads the file that cannot be, and is done later."""
        (busy, *_) = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        self._untidy = bool(busy)

    def note(self, reasons: Counter[str]) -> None:
        """Counts refusals that took nothing; written with the next step, or a stranger could have
        the disk synced as often as he likes.
        """
        with self._noting:  # never behind a step that waits for the disk
            self._noted += reasons

    def refusals(self) -> dict[str, int]:
        """By reason, those not yet written too."""
        with self._lock:
            stored = Counter(dict(self._db.execute("SELECT reason, count FROM refusal")))
            with self._noting:
                return dict(sorted((stored + self._noted).items()))


def _claim(path: Path) -> None:
    """Makes the file, or takes the one that is there, for our eyes only; SQLite opens it and those
    beside it by name, so nobody else may be able to put anything there. Raises OSError, UsageError.
    """
    folder = hold_state(path.parent)
    try:
        for suffix in ("", "-wal", "-shm", "-journal"):
            made = os.O_CREAT if not suffix else 0
            try:
                file = os.open(
                    f"{path.name}{suffix}", os.O_RDWR | made | STATE_FLAGS, 0o600, dir_fd=folder
                )
            except FileNotFoundError:
                continue
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode) or not is_ours(file):
                    raise OSError(f"{path.name}{suffix} is no file of this party's own")
                os.fchmod(file, 0o600)  # what a party holds is nobody else's to read
            finally:
                os.close(file)
    finally:
        os.close(folder)


def mark(db: sqlite3.Connection, name: str) -> Any:
    """What is known of the file as a whole under this name; None: nothing."""
    row = db.execute("SELECT value FROM mark WHERE name = ?", (name,)).fetchone()
    return None if row is None else row[0]


def set_mark(db: sqlite3.Connection, name: str, value: bytes | int) -> None:
    """As part of a step."""
    db.execute("INSERT OR REPLACE INTO mark VALUES (?, ?)", (name, value))


def count_refusals(db: sqlite3.Connection, reasons: Counter[str]) -> None:
    """Refusals, as part of a step."""
    db.executemany(
        "INSERT INTO refusal VALUES (?, ?) "
        "ON CONFLICT (reason) DO UPDATE SET count = count + excluded.count",
        list(reasons.items()),
    )
