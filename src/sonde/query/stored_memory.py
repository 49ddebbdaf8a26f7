# SPDX-License-Identifier: Apache-2.0
"""Host memory of processes over a store: what they mapped, unmapped and touched."""

from __future__ import annotations

import pyarrow as pa

from sonde.query.bounded import count_beyond
from sonde.query.selection import SUMS_VIEW, Selection, StoreTables
from sonde.query.stored import MAX_ROWS, one_of

_OWNERS = ("comm", "exe", "command", "user", "pod", "namespace", "job", "container", "unit")
"""Columns of `process` in an answer."""


def memory(session: StoreTables, selection: Selection, limit: int = 50) -> pa.Table:
    """Processes by what they mapped and touched, at most `limit`: node, pid, start_ns, mapped,
    unmapped, grown (mapped less unmapped, within the selected time), faulted, reserved (all in
    bytes), and the columns `_OWNERS`.

    Mappings without access rights only reserve addresses: they count as `reserved` alone.
    """
    clause, parameters = selection.sql(kind=False)
    if selection.names:
        clause += f" AND name IN ({', '.join('?' * len(selection.names))})"
        parameters = [*parameters, *selection.names]
    who = ", ".join(f"{one_of(name)} AS {name}" for name in _OWNERS)
    found = session.arrow(
        "WITH w AS (SELECT node, pid, start_ns,"
        " coalesce(sum(weight_bytes) FILTER (kind = 'mapped' AND name <> 'reserved'), 0) AS mapped,"
        " coalesce(sum(weight_bytes) FILTER (kind = 'unmapped' AND name <> 'reserved'), 0)"
        " AS unmapped,"
        " coalesce(sum(weight_bytes) FILTER (kind = 'faulted'), 0) AS faulted,"
        " coalesce(sum(weight_bytes) FILTER (kind = 'mapped' AND name = 'reserved'), 0) AS reserved"
        f" FROM {SUMS_VIEW} {clause} AND kind IN ('mapped', 'unmapped', 'faulted') GROUP BY ALL"
        f" ORDER BY mapped + faulted DESC, node, pid LIMIT {min(int(limit), MAX_ROWS)}), "
        f"p AS (SELECT node, pid, start_ns, {who} FROM process"
        " WHERE (node, pid, start_ns) IN (SELECT node, pid, start_ns FROM w) GROUP BY ALL) "
        "SELECT w.*, w.mapped - w.unmapped AS grown, p.* EXCLUDE (node, pid, start_ns) FROM w"
        " LEFT JOIN p USING (node, pid, start_ns) ORDER BY mapped + faulted DESC, node, pid",
        parameters,
    )
    if limit > MAX_ROWS and found.num_rows >= MAX_ROWS:
        each = (
            f"SELECT DISTINCT node, pid, start_ns FROM {SUMS_VIEW} {clause}"
            " AND kind IN ('mapped', 'unmapped', 'faulted')"
        )
        count_beyond(session, each, parameters, MAX_ROWS, limit)
    return found
