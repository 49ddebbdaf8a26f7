# SPDX-License-Identifier: Apache-2.0
"""Answers that have room for a number of rows; what has no room is counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import pyarrow as pa


class _Counting(Protocol):
    """Of `sonde.query.selection.StoreTables`, what is needed here."""

    def arrow(self, sql: str, parameters: Sequence[Any] = ()) -> pa.Table:
        """Rows of a query as columns."""

    def leave_out(self, rows: int) -> None:
        """Count rows that an answer has no room for."""


def bounded(
    session: _Counting, sql: str, parameters: Sequence[Any], room: int, limit: int = 1 << 62
) -> pa.Table:
    """The first `limit` rows of an ordered query, as many as are asked for, but at most `room`;
    `session` counts those that were asked for and have no room."""
    table = session.arrow(f"{sql} LIMIT {max(0, min(int(limit), room))}", parameters)
    if limit > room and table.num_rows >= room:
        count_beyond(session, sql, parameters, room, limit)
    return table


def count_beyond(
    session: _Counting, sql: str, parameters: Sequence[Any], room: int, limit: int = 1 << 62
) -> None:
    """Have `session` count the first `limit` rows of a query beyond `room`."""
    found = session.arrow(f"SELECT count(*) AS n FROM ({sql}) AS counted", parameters)
    there = int(found.column("n")[0].as_py())
    session.leave_out(max(0, min(there, limit) - room))
