# SPDX-License-Identifier: Apache-2.0
"""Files of SQLite that a server keeps beside its store: its tokens, switches and alerts."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from sonde.errors import UsageError
from sonde.ownership import only_ours


def open_state(
    folder: Path, name: str, schema: str, *, is_synced: bool = False
) -> sqlite3.Connection:
    """The file `name` of a server's directory, made where it is not there yet; statements commit by
    themselves, and threads share it under a lock of the caller's. `is_synced`: what was written
    survives a loss of power. Raises sqlite3.Error; UsageError where others can change the file."""
    if not only_ours(folder):
        raise UsageError(f"other users can write into {folder}", "give a directory of your own")
    path = folder / name
    path.touch(mode=0o600, exist_ok=True)
    database = sqlite3.connect(path, timeout=10, isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA journal_mode=WAL")
    if is_synced:
        database.execute("PRAGMA synchronous=FULL")
    database.execute(schema)
    return database
