# SPDX-License-Identifier: Apache-2.0
"""Which agents collect nothing for now: pauses that an operator or a tenant ordered.

An agent learns it from the answer to each upload, and asks every few seconds while it sends nothing
or is refused. Servers of one directory share the pauses, which take effect with the next
request. The operator, who may write to the store, pauses a tenant or all tenants; a tenant's token
for `admin` pauses that tenant, and does not lift what the operator ordered.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sonde.errors import UsageError
from sonde.server.tokens import TENANT
from sonde.store.database import Database

NAME = "collection.sqlite"
ALL_TENANTS = ""
"""Stands for all tenants in place of the name of one."""
_SCHEMA = """CREATE TABLE IF NOT EXISTS pause (
  tenant TEXT NOT NULL, authority TEXT NOT NULL, since_s INTEGER NOT NULL,
  PRIMARY KEY (tenant, authority)) WITHOUT ROWID"""


class PausedBy(StrEnum):
    """Who ordered a pause."""

    OPERATOR = "operator"
    TENANT = "tenant"


@dataclass(frozen=True, slots=True)
class Pause:
    """Agents of a tenant, or of ALL_TENANTS, that collect nothing."""

    tenant: str
    paused_by: PausedBy
    since_s: int
    """Seconds since 1970."""


class CollectionPauses:
    """The pauses of a store. Thread-safe; processes may share it."""

    def __init__(self, folder: Path) -> None:
        """Raises sqlite3.Error, OSError; UsageError where others could order a pause."""
        self._db = Database(folder, NAME, _SCHEMA)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def pause(self, tenant: str, paused_by: PausedBy) -> None:
        """The agents of a tenant stop collecting. Raises UsageError for what names no tenant."""
        if tenant != ALL_TENANTS and not TENANT.fullmatch(tenant):
            raise UsageError(f"{tenant!r} cannot be the name of a tenant", "see `sonde token list`")
        with self._db.held() as db:
            db.execute(
                "INSERT OR IGNORE INTO pause VALUES (?, ?, ?)", [tenant, paused_by, _now_s()]
            )

    def resume(self, tenant: str, paused_by: PausedBy) -> bool:
        """Lift the pauses of a tenant, ALL_TENANTS: all pauses; returns whether there were any. A
        tenant lifts only its own."""
        with self._db.held() as db:
            done = db.execute(
                "DELETE FROM pause WHERE (? = '' OR tenant = ?)"
                " AND (? = 'operator' OR authority = ?)",
                [tenant, tenant, paused_by, paused_by],
            )
            return done.rowcount > 0

    def is_paused(self, tenant: str) -> bool:
        """Whether the agents of a tenant are to collect nothing."""
        with self._db.held() as db:
            found = db.execute("SELECT 1 FROM pause WHERE tenant IN ('', ?)", [tenant]).fetchone()
        return found is not None

    def paused(self, tenant: str = ALL_TENANTS) -> list[Pause]:
        """All pauses; of one tenant: those that apply to its agents."""
        with self._db.held() as db:
            rows = db.execute(
                "SELECT tenant, authority, since_s FROM pause WHERE ? = '' OR tenant IN ('', ?)"
                " ORDER BY tenant, authority",
                [tenant, tenant],
            ).fetchall()
        return [Pause(name, PausedBy(by), since_s) for name, by, since_s in rows]


def _now_s() -> int:
    return int(time.time())
