# SPDX-License-Identifier: Apache-2.0
"""Loops of a program, by its own functions and named ranges.

Traces with Python functions show the loop of the program. A function that encloses all others does
not repeat, so functions are examined level by level from the outside. A level has the functions
that no other one of those left encloses, and a request belongs to the function that it was made in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from sonde.model.timeline import I32, I64, HostKind, Timeline, is_one_of

DEPTH = 64
"""At most this many levels are examined."""
_NUMBERED = re.compile(r"[#\s_:.-]*\d+$")
"""The number at the end of a range: ProfilerStep#12."""


def levels(timeline: Timeline, asked: I64) -> Iterator[tuple[I64, I64]]:
    """(function of each request, -1 none; number of the function's name, -1 none), from the outside
    in.

    `asked`: the time of each request, ascending. The functions are those of the thread with
    functions that launches most. Launches of other threads (a backward pass) belong to the function
    that this thread was in meanwhile.
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
    functions = is_one_of(host.kind, HostKind.PYTHON, HostKind.RANGE)
    count = len(timeline.tracks) + 1
    launches = np.bincount(timeline.calls.track, minlength=count)
    launches[np.bincount(host.track[functions], minlength=count) == 0] = 0
    if not launches.any():
        return np.zeros(0, np.int64)
    return np.flatnonzero(functions & (host.track == int(launches.argmax())))


def _numbers(timeline: Timeline, name: I32) -> I64:
    """A number for each name; ranges that differ only by a number at their end have the same."""
    known: dict[str, int] = {}
    values, inverse = np.unique(name, return_inverse=True)
    same = [
        known.setdefault(_without_number(timeline.names[value]), value) for value in values.tolist()
    ]
    return np.array(same or [0], np.int64)[inverse]


def _without_number(name: str) -> str:
    """The name without a number at its end. Only 64 characters are searched: names may be long."""
    return name[:-64] + _NUMBERED.sub("", name[-64:])
