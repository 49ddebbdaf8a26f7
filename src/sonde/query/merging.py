# SPDX-License-Identifier: Apache-2.0
"""Joins the tables of many chunks: each dictionary row once, in separate memory.

A dictionary is a table that other rows refer to by a key: stack, frame, process, thread.
Rows read from a chunk lie in the memory that the chunk was decompressed to. So chunks are merged in
groups: their rows are copied into joined tables, so that this memory is freed, and each check runs
once a group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sonde.limits import Budget
from sonde.query import validation
from sonde.query.schema import TABLES

U64s = npt.NDArray[np.uint64]

_COMPACT_ROWS = 20_000
"""Of process and thread: duplicate rows are dropped once there are this many more new rows than
were left the last time. In the other dictionaries duplicates are dropped when they are added."""

_KEYS: dict[str, tuple[str, ...]] = {
    "stack": ("stack_id",),
    "frame": ("frame_id",),
    "process": ("pid", "start_ns"),
    "thread": ("pid", "start_ns", "tid"),
}
_RENAMED = ("process", "thread")
"""Dictionaries of which the last row of a key counts: exec changes the name of a process, prctl
that of a thread. Rows of the other dictionaries never change."""
_UNCHANGING = tuple(name for name in _KEYS if name not in _RENAMED)


@dataclass(slots=True)
class _Seen:
    """Keys seen so far, in sorted arrays, each more than twice as long as the next.

    Sorted, because keys that a file chooses can make any hash table slow.
    """

    arrays: list[U64s] = field(default_factory=list)

    def first_rows(self, keys: U64s) -> npt.NDArray[np.int64]:
        """The rows whose key was not seen before, ascending; of equal keys the first row. Their
        keys count as seen from then on."""
        distinct, first = np.unique(keys, return_index=True)
        fresh = np.ones(len(distinct), bool)
        for known in self.arrays:
            at = np.minimum(np.searchsorted(known, distinct), len(known) - 1)
            fresh &= known[at] != distinct
        if fresh.any():
            self.arrays.append(distinct[fresh])
        while len(self.arrays) > 1 and len(self.arrays[-2]) <= 2 * len(self.arrays[-1]):
            last = self.arrays.pop()
            self.arrays[-1] = np.sort(np.concatenate((self.arrays[-1], last)))
        return np.sort(first[fresh])


@dataclass(slots=True)
class Merge:
    """The tables of the chunks read so far, merged."""

    budget: Budget
    parts: dict[str, list[pa.Table]] = field(default_factory=lambda: {n: [] for n in TABLES})
    seen: dict[str, _Seen] = field(default_factory=lambda: {n: _Seen() for n in _UNCHANGING})
    kept: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_RENAMED, 0))
    """Rows that were left when duplicates were last dropped."""
    pending: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_RENAMED, 0))
    """Rows added since."""

    def add(self, name: str, table: pa.Table) -> None:
        """Add rows of the table `name`, conformed. Raises CaptureTooLarge."""
        keys = _KEYS.get(name)
        if name in _RENAMED:
            table = _last_of_each(name, table)
        elif keys:
            fresh = self.seen[name].first_rows(table.column(keys[0]).to_numpy())
            if len(fresh) < table.num_rows:
                table = table.take(pa.array(fresh))
        if not table.num_rows:
            return
        self.budget.hold(table.num_rows * validation.ROW_BYTES[name] + validation.text_bytes(table))
        if name == "metric":
            self.budget.hold(validation.LABELS_BYTES * validation.label_set_count(table))
        if name == "stack":
            self.budget.hold(validation.FRAME_BYTES * validation.frame_count(table))
        self.parts[name].append(table)
        if name in _RENAMED:
            self.pending[name] += table.num_rows
            if self.pending[name] > self.kept[name] + _COMPACT_ROWS:
                self._compact(name)

    def _compact(self, name: str) -> None:
        """Drop duplicate rows: those of a process are in every chunk in which it ran."""
        former = pa.concat_tables(self.parts[name])
        table = _last_of_each(name, former)
        dropped = former.num_rows - table.num_rows
        text_bytes = validation.text_bytes(former) - validation.text_bytes(table)
        self.budget.hold(-dropped * validation.ROW_BYTES[name] - text_bytes)
        self.parts[name] = [table]
        self.kept[name], self.pending[name] = table.num_rows, 0

    def tables(self) -> dict[str, pa.Table]:
        """Every table of the schema. Can be called once: the parts are freed."""
        merged = {}
        for name, schema in TABLES.items():
            parts = self.parts.pop(name)
            table = pa.concat_tables(parts).unify_dictionaries() if parts else schema.empty_table()
            merged[name] = _last_of_each(name, table) if name in _RENAMED else table
        return merged


def _last_of_each(name: str, table: pa.Table) -> pa.Table:
    """The last row of each key, in the order of the first rows. Sorted, as in `_Seen`."""
    columns = [table.column(key).to_numpy() for key in _KEYS[name]]
    order = np.lexsort(columns[::-1])
    is_new = np.zeros(len(order), bool)
    is_new[:1] = True
    for column in columns:
        in_order = column[order]
        is_new[1:] |= in_order[1:] != in_order[:-1]
    starts = np.flatnonzero(is_new)
    if len(starts) == table.num_rows:
        return table
    last = order[np.append(starts[1:], len(order)) - 1]
    return table.take(pa.array(last[np.argsort(order[starts])]))
