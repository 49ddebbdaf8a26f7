# SPDX-License-Identifier: Apache-2.0
"""Sets of disjoint, sorted, half-open intervals, as two columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sonde.model.timeline import I64, Mask


@dataclass(frozen=True, slots=True)
class Intervals:
    """Disjoint and sorted; none is empty."""

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
    """The union of any intervals that are sorted by start."""
    if not len(start):
        return none()
    reach = np.maximum.accumulate(end)
    first = np.ones(len(start), bool)
    first[1:] = start[1:] > reach[:-1]
    last = np.append(first[1:], True)
    made = Intervals(start[first], reach[last])
    keep = made.end > made.start
    return made if keep.all() else Intervals(made.start[keep], made.end[keep])


def joined(*sets: Intervals) -> Intervals:
    """The union of sets."""
    start = np.concatenate([one.start for one in sets])
    end = np.concatenate([one.end for one in sets])
    order = np.argsort(start, kind="stable")
    return union(start[order], end[order])


def complement(of: Intervals, window: Intervals) -> Intervals:
    """What of `window` is not in `of`."""
    return subtract(window, of)


def contains(of: Intervals, times: I64) -> Mask:
    """Whether each time lies in the set."""
    if not len(of):
        return np.zeros(len(times), bool)
    at = np.searchsorted(of.start, times, "right") - 1
    inside: Mask = (at >= 0) & (times < of.end[np.maximum(at, 0)])
    return inside


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """What lies in both."""
    return _where(a, b, True)


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """What lies in `a` and not in `b`."""
    return _where(a, b, False)


def _where(a: Intervals, b: Intervals, in_b: bool) -> Intervals:
    if not len(a) or (in_b and not len(b)):
        return none()
    if not len(b):
        return a
    if in_b and len(b) == 1:
        return _clipped(a, int(b.start[0]), int(b.end[0]))
    # Sorted, not made unique: that is far slower, and what is doubled is empty and falls out.
    edges = np.concatenate([a.start, a.end, b.start, b.end])
    edges.sort()
    begin, end = edges[:-1], edges[1:]
    keep = end > begin
    for low in range(0, len(keep), _AT_ONCE):  # what that takes beside would be several times all
        part = slice(low, low + _AT_ONCE)
        keep[part] &= contains(a, begin[part])
        keep[part] &= contains(b, begin[part]) == in_b
    return union(begin[keep], end[keep])


_AT_ONCE = 1 << 18


def _clipped(a: Intervals, low: int, high: int) -> Intervals:
    if a.start[0] >= low and a.end[-1] <= high:
        return a
    start, end = np.maximum(a.start, low), np.minimum(a.end, high)
    keep = end > start
    return Intervals(start[keep], end[keep])


class Coverage:
    """How much of a set lies before any time; so, how much lies in any interval."""

    def __init__(self, of: Intervals) -> None:
        self._of = of
        self._before = np.concatenate([[0], np.cumsum(of.end - of.start)]).astype(np.int64)

    def before(self, times: I64) -> I64:
        """Length of the set before each time."""
        if not len(self._of):
            return np.zeros(len(times), np.int64)
        at = np.searchsorted(self._of.start, times, "right")
        past = np.maximum(self._of.end[np.maximum(at - 1, 0)] - times, 0)
        covered: I64 = self._before[at] - np.where(at > 0, past, 0)
        return covered

    def within(self, start: I64, end: I64) -> I64:
        """Length of the set within each interval; 0 for one that ends before it starts."""
        inside: I64 = np.where(end > start, self.before(end) - self.before(start), 0)
        return inside
