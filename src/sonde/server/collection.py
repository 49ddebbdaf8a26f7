# SPDX-License-Identifier: Apache-2.0
"""Which agents collect nothing for now: the kill switches; and which agents were seen.

An agent learns it from the answer to each upload, and asks every few seconds where it sends nothing
or is kept away. Servers of one directory share the switches, which take effect with the next
request. The operator, who may write to the store, pauses a tenant or everybody; a tenant's token
for `admin` pauses that tenant, and does not lift what the operator ordered.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sonde.errors import UsageError
from sonde.server.tokens import TENANT
from sonde.store.database import Database

NAME = "collection.sqlite"
EVERYBODY = ""
"""In place of a tenant."""
SILENT_S = 30.0
"""An agent that was not seen for so long is called silent; it asks every 8 to 12 s."""
_SCHEMA = """CREATE TABLE IF NOT EXISTS pause (
  tenant TEXT NOT NULL, authority TEXT NOT NULL, since_s INTEGER NOT NULL,
  PRIMARY KEY (tenant, authority)) WITHOUT ROWID"""


class Authority(StrEnum):
    """Who turned a switch."""

    OPERATOR = "operator"
    TENANT = "tenant"


@dataclass(frozen=True, slots=True)
class Pause:
    """Agents of a tenant, or EVERYBODY's, that collect nothing."""

    tenant: str
    authority: Authority
    since_s: int
    """Seconds since 1970."""


class Collection:
    """The switches of a store. Thread-safe; processes may share it."""

    def __init__(self, folder: Path) -> None:
        """Raises sqlite3.Error, OSError; UsageError where others could turn a switch."""
        self._db = Database(folder, NAME, _SCHEMA)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def pause(self, tenant: str, authority: Authority) -> None:
        """The agents of a tenant stop collecting. Raises UsageError for what names no tenant."""
        if tenant != EVERYBODY and not TENANT.fullmatch(tenant):
            raise UsageError(f"{tenant!r} cannot be the name of a tenant", "see `sonde token list`")
        with self._db.held() as db:
            db.execute(
                "INSERT OR IGNORE INTO pause VALUES (?, ?, ?)", [tenant, authority, _now_s()]
            )

    def resume(self, tenant: str, authority: Authority) -> bool:
        """Lift the pauses of a tenant, EVERYBODY: all; whether there were any. A tenant lifts only
        what it ordered."""
        with self._db.held() as db:
            done = db.execute(
                "DELETE FROM pause WHERE (? = '' OR tenant = ?)"
                " AND (? = 'operator' OR authority = ?)",
                [tenant, tenant, authority, authority],
            )
            return done.rowcount > 0

    def is_paused(self, tenant: str) -> bool:
        """Whether the agents of a tenant are to collect nothing."""
        with self._db.held() as db:
            found = db.execute("SELECT 1 FROM pause WHERE tenant IN ('', ?)", [tenant]).fetchone()
        return found is not None

    def paused(self, tenant: str = EVERYBODY) -> list[Pause]:
        """All pauses; those that the agents of a tenant heed."""
        with self._db.held() as db:
            rows = db.execute(
                "SELECT tenant, authority, since_s FROM pause WHERE ? = '' OR tenant IN ('', ?)"
                " ORDER BY tenant, authority",
                [tenant, tenant],
            ).fetchall()
        return [Pause(name, Authority(authority), since_s) for name, authority, since_s in rows]


def _now_s() -> int:
    return int(time.time())


class AgentState(StrEnum):
    """What an agent does, as it reports; `silent`: it reports nothing."""

    COLLECTING = "collecting"
    PAUSED = "paused"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class SeenAgent:
    """When an agent was seen last."""

    node: str
    seen_s: float
    """Seconds since 1970."""
    state: AgentState


class SeenAgents:
    """The agents that sent or asked something since this server started."""

    def __init__(self, nodes_a_tenant: int) -> None:
        self._most = nodes_a_tenant
        self._seen: dict[str, OrderedDict[str, SeenAgent]] = {}

    def note(self, tenant: str, node: str, reported: str) -> None:
        """A request came; `reported`: the agent's word for its state."""
        state = AgentState.PAUSED if reported == AgentState.PAUSED else AgentState.COLLECTING
        nodes = self._seen.setdefault(tenant, OrderedDict())
        nodes[node] = SeenAgent(node, time.time(), state)
        nodes.move_to_end(node)
        if len(nodes) > self._most:
            nodes.popitem(last=False)

    def of(self, tenant: str) -> Sequence[SeenAgent]:
        """Those of a tenant, by name; who went silent is marked."""
        silent_s = time.time() - SILENT_S
        return [
            one if one.seen_s >= silent_s else SeenAgent(one.node, one.seen_s, AgentState.SILENT)
            for _, one in sorted(self._seen.get(tenant, {}).items())
        ]

    def counts(self) -> dict[AgentState, int]:
        """Of all tenants, by state."""
        found = dict.fromkeys(AgentState, 0)
        for tenant in self._seen:
            for one in self.of(tenant):
                found[one.state] += 1
        return found
