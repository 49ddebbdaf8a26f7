# SPDX-License-Identifier: Apache-2.0
"""Fewer rows of waits, for an agent that always sends: what is small is thinned or put together.

A thread's waits of a tick for one reason are as many rows as they had stacks, most of them
microseconds. Below `least_ns` a row of `sample` is kept by chance, and then stands for `least_ns`:
systematic sampling with probability proportional to size, so that sums of a kind stay right to
`least_ns` at any time, not only on average. A row of `activity` without a sample is added to the
rest of its thread and reason, which becomes a row in the tick in which it reaches `least_ns`, at
the latest at the end of the chunk: no time and no wait is left out of it.

Source: Horvitz and Thompson 1952; Madow 1949 (systematic, by size).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

MAX_RESTS: Final = 32_768
"""Threads and reasons that are added up; where there are more, the oldest become rows at once."""


class RestKey(NamedTuple):
    """Whose waits are added up."""

    kind: str
    name: str
    call: str
    pid: int
    start_ns: int
    tid: int


class Rest:
    """The waits of one key that have become no row yet."""

    __slots__ = ("count", "max_ns", "ns", "waker")

    def __init__(self) -> None:
        self.count = self.ns = self.max_ns = 0
        self.waker = (0, 0)
        """(pid, tid) of the longest of them."""

    def add(self, count: int, ns: int, max_ns: int, waker: tuple[int, int]) -> None:
        """Add waits: how many, how long together, the longest, who ended the last of them."""
        self.count += count
        self.ns += ns
        if max_ns >= self.max_ns:
            self.max_ns, self.waker = max_ns, waker


class SmallWaits:
    """What of a collector's waits is small."""

    def __init__(self, least_ns: int) -> None:
        """`least_ns`: what a row stands for at least; 0: every row is kept as it is."""
        self.least_ns = least_ns
        self._passed: dict[str, float] = {}
        """By kind: the time (ns) of small samples since the last one that was kept."""
        self._rests: dict[RestKey, Rest] = {}

    def factor(self, kind: str, weight_ns: int) -> float:
        """By what the weights of a sample are to be multiplied; 0: it is left out."""
        if weight_ns >= self.least_ns:
            return 1.0
        if weight_ns <= 0:
            return 0.0
        passed = self._passed.get(kind)
        if passed is None:
            passed = random.uniform(0, self.least_ns)
        passed += weight_ns
        kept = passed >= self.least_ns
        self._passed[kind] = passed - self.least_ns if kept else passed
        return self.least_ns / weight_ns if kept else 0.0

    def add(self, key: RestKey, count: int, ns: int, max_ns: int, waker: tuple[int, int]) -> None:
        """Waits without a sample; see `Rest.add`."""
        self._rests.setdefault(key, Rest()).add(count, ns, max_ns, waker)

    def due(self, everything: bool) -> Iterator[tuple[RestKey, Rest]]:
        """Take out what becomes rows now: what has reached `least_ns`, or everything."""
        if everything:
            taken, self._rests = self._rests, {}
            yield from taken.items()
            return
        for key in [key for key, rest in self._rests.items() if rest.ns >= self.least_ns]:
            yield key, self._rests.pop(key)
        for key in list(islice(self._rests, max(0, len(self._rests) - MAX_RESTS))):
            yield key, self._rests.pop(key)
