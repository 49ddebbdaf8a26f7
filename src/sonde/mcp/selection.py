# SPDX-License-Identifier: Apache-2.0
"""What a call selects: a range of time, a node, owners; the address of the page that shows it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from sonde.mcp.untrusted import clean
from sonde.server import times
from sonde.server.client import ServerClient


@dataclass(frozen=True, slots=True)
class Selection:
    """A range in seconds since 1970, a node ('': all), and owners."""

    from_s: float
    to_s: float
    node: str = ""
    owners: dict[str, str] = field(default_factory=dict)
    """Parameters of the server: pid, job, user, pod, container, …"""

    @classmethod
    def of(cls, start: str, end: str, node: str = "", **owners: str | int) -> Selection:
        """From the arguments of a tool; owners that are '' or 0 select all. Raises UsageError."""
        now_s = time.time()
        to_s = times.seconds(end, now_s)
        given = {name: str(value) for name, value in owners.items() if value}
        return cls(times.seconds(start, now_s), to_s, node, given)

    def parameters(self, **more: Any) -> dict[str, Any]:
        """The parameters of a question over this selection."""
        found: dict[str, Any] = {"from": repr(self.from_s), "to": repr(self.to_s)}
        if self.node:
            found["node"] = self.node
        return found | self.owners | more

    def shown(self) -> dict[str, str]:
        """The selection as a part of an answer, cleaned."""
        named = {"node": self.node} if self.node else {}
        range_ = {"from": times.iso(self.from_s), "to": times.iso(self.to_s)}
        shown: dict[str, str] = clean(range_ | named | self.owners)
        return shown

    def page_url(self, base: str, view: str, **more: str) -> str:
        """The address of a view of the web page with this selection, percent-encoded.

        Views can select by process and job alone: other owners are not in the address.
        """
        owners = {name: self.owners[name] for name in ("pid", "job") if name in self.owners}
        query = {"view": view, "node": self.node, **owners, **more}
        query |= {"from": f"{self.from_s:.6f}", "to": f"{self.to_s:.6f}"}
        return f"{base}/?{urlencode({name: text for name, text in query.items() if text})}"


def observed(server: ServerClient, selection: Selection) -> dict[str, Any]:
    """What an answer rests on: nodes, chunks, seconds recorded, events lost; of all owners, since
    chunks are of a whole node. Where nothing was sent in the range, a note has when the newest data
    was. Raises SinkError."""
    only = {"from": repr(selection.from_s), "to": repr(selection.to_s)}
    if selection.node:
        only["node"] = selection.node
    rows = server.ask("overview", only)
    found: dict[str, Any] = {
        "nodes": len(rows),
        "chunks": sum(row["chunks"] for row in rows),
        "recorded_s": round(sum(row["seconds"] for row in rows), 3),
        "events_lost": sum(row["lost"] for row in rows),
    }
    if selection.owners:
        found["of"] = "all processes in the range, not only the selected ones"
    if not rows:
        every = server.ask("nodes", only | {"from": "1", "to": "4000000000"})
        last_ns = max((row["last_ns"] for row in every), default=0)
        found["note"] = (
            f"nothing was sent in this range; the newest data is of {times.iso(last_ns / 1e9)}"
            if last_ns
            else f"no node called {selection.node} has sent anything"
            if selection.node
            else "no node has sent anything"
        )
    return found
