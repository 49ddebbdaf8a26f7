# SPDX-License-Identifier: Apache-2.0
"""Sets of disjoint, sorted, half-open intervals, as two columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sonde.model.timeline import I64


@dataclass(frozen=True, slots=True)
class Intervals:
    """Disjoint, sorted, none of them empty."""

    start: I64
    end: I64

    def __len__(self) -> int:
        return len(self.start)

    @property
    def total(self) -> int:
        """Summed length."""
        return int((self.end - self.start).sum())


def none() -> Intervals:
    """The empty set."""
    return Intervals(np.zeros(0, np.int64), np.zeros(0, np.int64))


def union(start: I64, end: I64) -> Intervals:
    """The set from intervals that are sorted by start and may overlap."""
    if not len(start):
        return none()
    if (start[1:] > end[:-1]).all() and (end > start).all():
        return Intervals(start, end)  # the usual case: calls of one thread, kernels of one stream
    reach = np.maximum.accumulate(end)
    first = np.ones(len(start), bool)
    first[1:] = start[1:] > reach[:-1]
    last = np.append(first[1:], True)
    made = Intervals(start[first], reach[last])
    keep = made.end > made.start
    return made if keep.all() else Intervals(made.start[keep], made.end[keep])


def joined(*sets: Intervals) -> Intervals:
    """The union of several sets."""
    sets = tuple(one for one in sets if len(one)) or (none(),)
    if len(sets) == 1:
        return sets[0]
    start = np.concatenate([one.start for one in sets])
    end = np.concatenate([one.end for one in sets])
    order = np.argsort(start, kind="stable")
    return union(start[order], end[order])


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """The intersection of two sets."""
    if not len(a) or not len(b):
        return none()
    if len(b) > len(a):
        a, b = b, a
    if len(b) == 1:
        return _clipped(a, int(b.start[0]), int(b.end[0]))
    return _overlaps(b, a)


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """The part of `a` outside of `b`."""
    if not len(a) or not len(b):
        return a
    ends = np.iinfo(np.int64)
    start = np.concatenate([[ends.min], b.end])
    end = np.concatenate([b.start, [ends.max]])
    gaps = Intervals(start, end)
    return _overlaps(gaps, a) if len(gaps) < len(a) else _overlaps(a, gaps)


def _overlaps(few: Intervals, many: Intervals) -> Intervals:
    """The intersection: the overlaps of each of `few` with `many`, found by binary search."""
    parts = [
        _overlap_columns(Intervals(few.start[part], few.end[part]), many)
        for part in in_parts(len(few))
    ]
    return union(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


_AT_ONCE = 1 << 16
"""Rows processed at once, so that temporary columns stay in the CPU caches."""


def in_parts(count: int) -> Iterator[slice]:
    """Slices of `_AT_ONCE` rows that cover all rows."""
    for low in range(0, count, _AT_ONCE):
        yield slice(low, low + _AT_ONCE)


def _overlap_columns(few: Intervals, many: Intervals) -> tuple[I64, I64]:
    """(start, end) of the overlaps of each of `few` with `many`; some may be empty."""
    first = np.searchsorted(many.end, few.start, "right")
    count = np.searchsorted(many.start, few.end, "left") - first
    np.maximum(count, 0, out=count)  # an empty gap has no overlap
    before = np.cumsum(count) - count
    at = np.arange(int(count.sum())) - np.repeat(before - first, count)
    start = np.maximum(np.repeat(few.start, count), many.start[at])
    end = np.minimum(np.repeat(few.end, count), many.end[at])
    return start, end


def _clipped(a: Intervals, low: int, high: int) -> Intervals:
    if a.start[0] >= low and a.end[-1] <= high:
        return a
    start, end = np.maximum(a.start, low), np.minimum(a.end, high)
    keep = end > start
    return Intervals(start[keep], end[keep])


class Coverage:
    """Looks up how much of a set lies before a time, or within an interval."""

    def __init__(self, of: Intervals) -> None:
        self._of = of
        self._before = np.concatenate([[0], np.cumsum(of.end - of.start)]).astype(np.int64)

    def before(self, times: I64) -> I64:
        """The length of the set before each time."""
        if not len(self._of):
            return np.zeros(len(times), np.int64)
        covered = np.empty(len(times), np.int64)
        for part in in_parts(len(times)):
            some = times[part]
            at = np.searchsorted(self._of.start, some, "right")
            past = np.maximum(self._of.end[np.maximum(at - 1, 0)] - some, 0)
            covered[part] = self._before[at] - np.where(at > 0, past, 0)
        return covered

    def within(self, start: I64, end: I64) -> I64:
        """The length of the set within each interval; 0 if it ends before it starts."""
        inside = self.before(end)
        inside -= self.before(start)
        inside[end <= start] = 0
        return inside
