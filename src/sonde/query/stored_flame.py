# SPDX-License-Identifier: Apache-2.0
"""The stacks of a flame graph and their code locations, which become Python objects as they are
used.

What a tenant stored decides how many there are and how long their texts are. All of it stays in
columns: the heaviest stacks are chosen that together have at most `MAX_FRAMES` code locations, and
texts are cut, before the first object is made. The others are one row, so that sums stay right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sonde.query import stored
from sonde.query.selection import Selection, StoreTables
from sonde.query.stored_objects import fitting, rows, values

MAX_FRAMES = 1 << 16
"""Distinct code locations of one flame graph: in the end each takes about a kilobyte."""
TEXTS_BYTES = 16 << 20
"""Of the names of a flame graph's frames, as Python objects, or of its boxes (UTF-8). As JSON it is
up to three times as much, of control characters six times, which the bound of an answer holds."""
SHORT_CHARS = 32
"""Texts of this length are never cut, and not counted in `TEXTS_BYTES`."""
OTHER = "[other stacks]"
"""What the stacks are called that have no room, as one."""
DEEPER = "[frames left out]"
"""In place of the frames in the middle of a stack that is too deep (`stored.CUT_KEY`)."""
UNKNOWN: dict[str, Any] = {
    "kind": "unknown", "function": "", "binary": "", "file": "", "line": 0,
}  # fmt: skip
WEIGHTS = ("n", "ns", "bytes")
_AT_ONCE = 1 << 16
"""Frames of stacks that are looked up together."""
_STACKS_AT_ONCE = 64
"""Stacks that become objects together: each has up to a thousand frames."""
_BLOCK, _BLOCKS = 512, 8
"""Code locations that become objects together, and how many such blocks are kept."""
_ROUNDING = 1e-9
"""Share of a sum below which a difference is none."""

Numbers = npt.NDArray[np.int64]


class FlameStacks:
    """Stacks, heaviest first, as rows that are made while they are read: `frame_keys` (numbers of
    code locations, leaf first), n, ns, bytes, and `group_name` where they are split."""

    def __init__(
        self,
        session: StoreTables,
        selection: Selection,
        by: str = "",
        total: Mapping[str, float] | None = None,
    ) -> None:
        """`total`: the sums of the selection. What the stacks lack of it is a row called `OTHER`,
        the last one; None: there is none. Raises CaptureError."""
        self.check = session.check
        table = stored.flame_graph(session, selection, by=by)
        lists = table.column("frame_keys")
        flat = _array(pc.list_flatten(lists))
        self._ends: Numbers = np.cumsum(_array(pc.list_value_length(lists)))
        count, self._keys = within(flat, self._ends, MAX_FRAMES, session.check)
        session.leave_out(table.num_rows - count)
        self._count = count
        self._flat = flat[: self._ends[count - 1] if count else 0]
        self._table = table.drop_columns(["frame_keys", "stack"]).slice(0, count)
        self._rest = self._lacking(total) if total else {}
        self.known = _of_keys(stored.frames(session, self._keys), self._keys)
        """Code locations by number: as `stored.frames`, null where nothing is known."""

    def __len__(self) -> int:
        return self._count + bool(self._rest)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for at in range(0, self._count, _STACKS_AT_ONCE):
            self.check()
            some = self._table.slice(at, _STACKS_AT_ONCE)
            edges = [self._begin(at + row) for row in range(some.num_rows + 1)]
            numbers = np.searchsorted(self._keys, self._flat[edges[0] : edges[-1]])
            for row, found in enumerate(rows(some)):
                own = numbers[edges[row] - edges[0] : edges[row + 1] - edges[0]]
                yield found | {"frame_keys": own.tolist()}
        if self._rest:
            yield {**self._rest, "frame_keys": [len(self._keys)]}

    @property
    def frame_count(self) -> int:
        """Frames of all stacks."""
        return len(self._flat)

    def columns(self, value: str) -> tuple[Numbers, Numbers, Numbers, npt.NDArray[np.float64]]:
        """All frames by number, where the frames of each stack begin and end in that, leaf first,
        and the weights of the stacks; without what they lack of a sum."""
        ends = self._ends[: self._count]
        begins = np.concatenate((np.zeros(1, np.int64), ends[:-1]))[: self._count]
        weights = self._table.column(value).to_numpy().astype(np.float64)
        return np.searchsorted(self._keys, self._flat), begins, ends, weights

    def numbered(self, groups: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The stacks as an answer has them: frames (numbers in `locations`, after which those of
        `groups` come), n, ns, bytes."""
        first = len(self._keys) + bool(self._rest)
        group_at = {name: first + at for at, name in enumerate(groups)}
        for row in self:
            number = group_at.get(row.get("group_name", ""))
            frames = row["frame_keys"] if number is None else [*row["frame_keys"], number]
            yield {"frames": frames} | {name: row[name] for name in WEIGHTS}

    def locations(self, *names: str) -> Iterator[dict[str, Any]]:
        """The code locations by number, as objects without their keys: all columns, or these."""
        known = self.known.select(["key", *names]) if names else self.known
        for number, found in enumerate(rows(known, self.check)):
            key = found.pop("key")
            yield self._other(number) if key is None else found
        if self._rest:
            yield self._other(len(self._keys))

    def frames(self) -> Frames:
        """The code locations by number; they are made when they are asked for."""
        order = _first_use(np.searchsorted(self._keys, self._flat), len(self._keys))
        other = (self._number(stored.CUT_KEY), len(self._keys))
        return Frames(self.known, order, {at: self._other(at) for at in other if at >= 0})

    def groups(self) -> list[str]:
        """The different values of `group_name`, sorted."""
        return sorted(values(pa.chunked_array([pc.unique(self._table.column("group_name"))])))

    def _number(self, key: int) -> int:
        """The number of a code location; -1 where no stack has it."""
        at = int(np.searchsorted(self._keys, key))
        return at if at < len(self._keys) and self._keys[at] == key else -1

    def _other(self, number: int) -> dict[str, Any]:
        """A code location that is none, or is not known."""
        if number == len(self._keys):
            return UNKNOWN | {"function": OTHER}
        return UNKNOWN | {"function": DEEPER if self._keys[number] == stored.CUT_KEY else ""}

    def _begin(self, at: int) -> int:
        return int(self._ends[at - 1]) if at else 0

    def _lacking(self, total: Mapping[str, float]) -> dict[str, float]:
        """What the rows lack of the sums; {} where that is nothing."""
        sums = {name: float(pc.sum(self._table.column(name)).as_py() or 0) for name in WEIGHTS}
        rest = {name: max(0.0, total[name] - sums[name]) for name in WEIGHTS}
        return rest if any(rest[it] > _ROUNDING * total[it] for it in WEIGHTS) else {}


class Frames(Mapping[int, Mapping[str, Any]]):
    """Code locations by their number, made some at a time, of which those last used are kept."""

    def __init__(
        self, table: pa.Table, order: Numbers, added: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """`table`: rows by number, null where nothing is known; `order`: the numbers in about the
        order in which they are asked for; `added`: others."""
        self._table = table.take(pa.array(order))
        self._place = np.zeros(table.num_rows, np.int64)
        self._place[order] = np.arange(len(order))
        self._added = added
        self._blocks: dict[int, list[dict[str, Any]]] = {}

    def __len__(self) -> int:
        return len(self._place)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._place)))

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        if number in self._added:
            return self._added[number]
        block, at = divmod(int(self._place[number]), _BLOCK)
        made = self._blocks.pop(block, None)
        if made is None:
            made = list(rows(self._table.slice(block * _BLOCK, _BLOCK)))
            if len(self._blocks) >= _BLOCKS:
                del self._blocks[next(iter(self._blocks))]
        self._blocks[block] = made
        if made[at]["key"] is None:
            raise KeyError(number)
        return made[at]


def within(
    flat: Numbers, ends: Numbers, most: int, check: Callable[[], object]
) -> tuple[int, Numbers]:
    """(how many of the first lists have at most `most` different keys together, these keys in
    order). `flat`: the keys of all lists; `ends`: where each list ends in it."""
    keys = np.zeros(0, np.int64)
    row = begin = 0
    while row < len(ends):
        check()
        stop = max(row + 1, int(np.searchsorted(ends, begin + _AT_ONCE, "right")))
        some, first = np.unique(flat[begin : ends[stop - 1]], return_index=True)
        is_new = np.isin(some, keys, assume_unique=True, invert=True)
        room = most - len(keys)
        if int(is_new.sum()) > room:
            beyond = begin + int(np.sort(first[is_new])[room])
            stop = int(np.searchsorted(ends, beyond, "right"))
            if stop > row:
                keys = np.union1d(keys, flat[begin : ends[stop - 1]])
            return stop, keys
        keys = np.union1d(keys, some)
        row, begin = stop, int(ends[stop - 1])
    return len(ends), keys


def _first_use(numbers: Numbers, count: int) -> Numbers:
    """The numbers below `count`, all of which occur, in the order in which they do so first."""
    is_seen = np.zeros(count, bool)
    found = [np.zeros(0, np.int64)]
    for begin in range(0, len(numbers), _AT_ONCE):
        some, first = np.unique(numbers[begin : begin + _AT_ONCE], return_index=True)
        is_new = ~is_seen[some]
        found.append(some[is_new][np.argsort(first[is_new])])
        is_seen[some] = True
    return np.concatenate(found)


def _of_keys(found: pa.Table, keys: Numbers) -> pa.Table:
    """The rows of these keys (both are sorted), null where there is none, with texts cut."""
    there = _array(found.column("key"))
    place = np.searchsorted(there, keys)
    is_there = np.isin(keys, there, assume_unique=True)
    cut = fitting(found, TEXTS_BYTES, SHORT_CHARS)
    return cut.take(pa.array(place, pa.int64(), mask=~is_there))


def _array(column: pa.ChunkedArray) -> Numbers:
    found: Numbers = column.to_numpy().astype(np.int64, copy=False)
    return found
