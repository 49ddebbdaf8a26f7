# SPDX-License-Identifier: Apache-2.0
"""Which tenants' agents collect nothing for now: the operator's kill switch.

An agent learns it from the answer to each upload, and asks every few seconds while it is paused.
Servers of one directory share the switches, which take effect with the next request.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path

from sonde.errors import UsageError
from sonde.ownership import only_ours
from sonde.server.tokens import TENANT

NAME = "collection.sqlite"
_SCHEMA = """CREATE TABLE IF NOT EXISTS paused (
  tenant TEXT PRIMARY KEY, since_s INTEGER NOT NULL) WITHOUT ROWID"""


class Collection:
    """The switches of a store. Thread-safe; processes may share it."""

    def __init__(self, folder: Path) -> None:
        """Raises sqlite3.Error; UsageError where others could turn a switch."""
        if not only_ours(folder):
            raise UsageError(f"other users can write into {folder}", "give a directory of your own")
        path = folder / NAME
        path.touch(mode=0o600, exist_ok=True)
        self._mutex = threading.Lock()
        self._db = sqlite3.connect(path, timeout=10, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute(_SCHEMA)

    def close(self) -> None:
        """Close the file."""
        with self._mutex:
            self._db.close()

    def pause(self, tenant: str) -> None:
        """The agents of a tenant stop collecting. Raises UsageError for what names no tenant."""
        if not TENANT.fullmatch(tenant):
            raise UsageError(f"{tenant!r} cannot be the name of a tenant", "see `sonde token list`")
        with self._mutex:
            self._db.execute("INSERT OR IGNORE INTO paused VALUES (?, ?)", [tenant, _now_s()])

    def resume(self, tenant: str) -> bool:
        """They collect again; whether they had been paused."""
        with self._mutex:
            done = self._db.execute("DELETE FROM paused WHERE tenant = ?", [tenant])
            return done.rowcount > 0

    def is_paused(self, tenant: str) -> bool:
        """Whether the agents of a tenant are to collect nothing."""
        with self._mutex:
            found = self._db.execute("SELECT 1 FROM paused WHERE tenant = ?", [tenant]).fetchone()
        return found is not None

    def paused(self) -> dict[str, int]:
        """Since when, in seconds since 1970, by tenant."""
        with self._mutex:
            return dict(self._db.execute("SELECT tenant, since_s FROM paused ORDER BY tenant"))


def _now_s() -> int:
    return int(time.time())
