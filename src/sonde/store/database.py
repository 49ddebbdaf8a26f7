# SPDX-License-Identifier: Apache-2.0
"""The SQLite files of a store's directory: how each of them is opened, read and changed.

A file is its owner's alone, nobody else can change or replace it, and a transaction that has ended
is on the disk (synchronous=FULL). Servers of one machine may share the directory.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sonde.errors import UsageError
from sonde.ownership import only_ours

BUSY_S = 30.0
"""How long a transaction waits for that of another process."""


class Database:
    """One SQLite file. Thread-safe; processes may share it."""

    def __init__(self, folder: Path, name: str, schema: str) -> None:
        """`schema`: statements that may be repeated. Raises UsageError where other users could
        change the file, sqlite3.Error, OSError."""
        if not only_ours(folder):
            raise UsageError(f"other users can write into {folder}", "give a directory of your own")
        path = folder / name
        _make_private(path)
        self._mutex = threading.Lock()
        self._db = sqlite3.connect(
            path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(schema)
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Close the file."""
        with self._mutex:
            self._db.close()

    @contextmanager
    def held(self) -> Iterator[sqlite3.Connection]:
        """For single statements, each a transaction by itself; nobody else of this process has the
        connection meanwhile."""
        with self._mutex:
            yield self._db

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A transaction that writes: committed as a whole, or rolled back."""
        with self._mutex:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk may have rolled it back already
                    self._db.execute("ROLLBACK")
                raise


def _make_private(path: Path) -> None:
    """Make the file if there is none, for its owner's eyes alone.

    A file that is there is not opened: to close it would drop the locks that another connection of
    this process has on it.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or not only_ours(path):
            raise UsageError(
                f"{path} is no file that you alone can change", "move it away, or correct its owner"
            ) from None
        if found.st_mode & 0o077:
            path.chmod(0o600)
