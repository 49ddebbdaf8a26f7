# SPDX-License-Identifier: Apache-2.0
"""What a program called again and again, from its own functions and named ranges.

Traces with Python functions know the loop that its author wrote. A function that is still running
is no repetition, so it is looked through, level by level, from the outside: at each level the
functions that nothing else at this level encloses, as owners of what was asked of devices in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from sonde.model.timeline import I32, I64, HostKind, Timeline, is_one_of

DEPTH = 64
"""Levels looked through."""
_NUMBERED = re.compile(r"[#\s_:.-]*\d+$")
"""Ranges that count: ProfilerStep#12."""


def levels(timeline: Timeline, asked: I64) -> Iterator[tuple[I64, I64]]:
    """(owner of each request, -1 none; a number for its name, -1 none), from the outside inwards.

    `asked`: when each request was made, in order. The functions are those of the thread that
    launches most of those that have any; what others launch meanwhile (a backward pass) counts as
    asked by what that thread was in.
    """
    host, rows = timeline.host, _functions(timeline)
    before = np.searchsorted(asked, host.start_ns[rows], "left")
    behind = np.searchsorted(asked, host.end_ns[rows], "left")
    rows = rows[behind > before]
    start, end = host.start_ns[rows], host.end_ns[rows]
    names = _numbers(timeline, host.name[rows])
    left = np.arange(len(rows))
    for _ in range(DEPTH):
        if not len(left):
            return
        reach = np.maximum.accumulate(end[left])
        outer = np.ones(len(left), bool)
        outer[1:] = start[left[1:]] >= reach[:-1]
        top = left[outer]
        left = left[~outer]
        at = np.maximum(np.searchsorted(start[top], asked, "right") - 1, 0)
        inside = (asked >= start[top[at]]) & (asked < end[top[at]])
        yield np.where(inside, at, -1), np.where(inside, names[top[at]], -1)


def _functions(timeline: Timeline) -> I64:
    """Rows of `host` that are functions or ranges of the thread that launches most."""
    host = timeline.host
    told = is_one_of(host.kind, HostKind.PYTHON, HostKind.RANGE)
    count = len(timeline.lanes) + 1
    launches = np.bincount(timeline.calls.lane, minlength=count)
    launches[np.bincount(host.lane[told], minlength=count) == 0] = 0
    if not launches.any():
        return np.zeros(0, np.int64)
    return np.flatnonzero(told & (host.lane == int(launches.argmax())))


def _numbers(timeline: Timeline, name: I32) -> I64:
    """A number for each name, the same for ranges that differ by a count at their end alone."""
    known: dict[str, int] = {}
    values, inverse = np.unique(name, return_inverse=True)
    same = [
        known.setdefault(_without_number(timeline.names[value]), value) for value in values.tolist()
    ]
    return np.array(same or [0], np.int64)[inverse]


def _without_number(name: str) -> str:
    """The name without a number at its end; only there is it looked for, as names may be long."""
    return name[:-64] + _NUMBERED.sub("", name[-64:])
