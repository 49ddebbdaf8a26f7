# SPDX-License-Identifier: Apache-2.0
"""Host memory of processes over a store: what they mapped, gave back and touched."""

from __future__ import annotations

import pyarrow as pa

from sonde.query.stored import MAX_ROWS, SUMS_VIEW, Selection, StoreTables

_OWNERS = ("comm", "exe", "user", "pod", "namespace", "job", "container", "unit")


def memory(session: StoreTables, wanted: Selection, limit: int = 50) -> pa.Table:
    """Processes by what they mapped and touched: node, pid, start_ns, mapped, unmapped, grown
    (mapped less unmapped, of this time), faulted, reserved (all bytes), and who they are.

    Mappings without access rights only reserve addresses: they count as `reserved` alone.
    """
    clause, parameters = wanted.sql(kind=False)
    if wanted.names:
        clause += f" AND name IN ({', '.join('?' * len(wanted.names))})"
        parameters = [*parameters, *wanted.names]
    who = ", ".join(f"any_value({name}) AS {name}" for name in _OWNERS)
    return session.arrow(
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
