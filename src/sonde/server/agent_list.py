# SPDX-License-Identifier: Apache-2.0
"""What a tenant's agents do, as JSON of a bounded size: the names of nodes are the tenant's."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sonde.server.collection_pauses import Pause
from sonde.server.seen_agents import SeenAgent

LIST_BYTES = 1 << 20
"""Of the agents in one answer: some ten thousand with names of usual length."""


def listed(agents: Sequence[SeenAgent], pauses: Sequence[Pause], after: str = "") -> bytes:
    """The agents, which are sorted by name, with names behind `after`; and the pauses. `not_shown`:
    how many further agents there are, which are asked for after the last that is shown."""
    rows: list[str] = []
    left_bytes = LIST_BYTES
    waiting = [one for one in agents if one.node > after]
    for one in waiting:
        row = {"node": one.node, "seen_s": round(one.seen_s, 3), "state": one.state}
        text = json.dumps(row, separators=(",", ":"))
        left_bytes -= len(text) + 1
        if left_bytes < 0:
            break
        rows.append(text)
    not_shown = len(waiting) - len(rows)
    paused = json.dumps([{"authority": one.paused_by, "since_s": one.since_s} for one in pauses])
    whole = f'{{"agents":[{",".join(rows)}],"not_shown":{not_shown},"paused":{paused}}}'
    return whole.encode()
