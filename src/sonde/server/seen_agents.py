# SPDX-License-Identifier: Apache-2.0
"""Which agents a server has seen since it started, and what they do."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

SILENT_S = 30.0
"""An agent that was not seen for this long is silent: an idle one asks every 8 to 12 s."""


class AgentState(StrEnum):
    """What an agent does, as it reports; `silent`: it reports nothing any more."""

    COLLECTING = "collecting"
    PAUSED = "paused"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class SeenAgent:
    """An agent, and when it last sent or asked something."""

    node: str
    seen_s: float
    """Seconds since 1970."""
    state: AgentState


class SeenAgents:
    """The agents that sent or asked something since this server started. Thread-safe."""

    def __init__(self, nodes_a_tenant: int) -> None:
        """`nodes_a_tenant`: beyond, the one that was seen least recently is dropped."""
        self._max_nodes = nodes_a_tenant
        self._seen: dict[str, OrderedDict[str, SeenAgent]] = {}
        self._lock = threading.Lock()

    def note(self, tenant: str, node: str, reported: str) -> None:
        """An agent sent or asked something; `reported`: the state that it names."""
        state = AgentState.PAUSED if reported == AgentState.PAUSED else AgentState.COLLECTING
        with self._lock:
            nodes = self._seen.setdefault(tenant, OrderedDict())
            nodes[node] = SeenAgent(node, time.time(), state)
            nodes.move_to_end(node)
            if len(nodes) > self._max_nodes:
                nodes.popitem(last=False)

    def of(self, tenant: str) -> Sequence[SeenAgent]:
        """The agents of a tenant, by name, with their present state."""
        silent_s = time.time() - SILENT_S
        with self._lock:
            nodes = list(self._seen.get(tenant, {}).values())
        nodes.sort(key=lambda one: one.node)
        return [
            one if one.seen_s >= silent_s else SeenAgent(one.node, one.seen_s, AgentState.SILENT)
            for one in nodes
        ]

    def counts(self) -> dict[AgentState, int]:
        """Number of agents of all tenants, by state."""
        found, silent_s = dict.fromkeys(AgentState, 0), time.time() - SILENT_S
        with self._lock:
            seen = [one for nodes in self._seen.values() for one in nodes.values()]
        for one in seen:
            found[one.state if one.seen_s >= silent_s else AgentState.SILENT] += 1
        return found
