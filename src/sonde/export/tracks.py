# SPDX-License-Identifier: Apache-2.0
"""A timeline as tracks of slices, the model that timeline viewers share.

Slices of a track nest or follow one another. So a thread has separate tracks for functions, calls
and states, and intervals of one table that overlap without nesting (Python functions of coroutines)
are spread over several tracks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sonde.model.timeline import Events, Timeline

TABLES = ("device", "calls", "host", "states")
"""Tables of `Timeline` whose rows are intervals."""
MAX_LEVELS = 32
"""Tracks that overlapping intervals of one table and thread are spread over at most; coroutines
need about ten."""


@dataclass(frozen=True, slots=True)
class Track:
    """One row of a timeline viewer."""

    number: int
    """Unique, from 1."""
    name: str
    table: str
    """One of `TABLES`."""
    index: int
    """Of the thread or stream in `Timeline.tracks`."""
    parent: str
    """The group that it is shown in, a device or a process: 'GPU0', 'python (4121)'."""
    pid: int
    tid: int
    slices: Sequence[tuple[int, int, int, int]]
    """(start_ns, end_ns, name, flow) by start, longer ones first; flow joins a call and the run
    on the device that it launched, 0 none."""


def tracks_of(timeline: Timeline) -> Iterator[Track]:
    """Every track that is not empty."""
    number = 0
    for table in TABLES:
        events: Events = getattr(timeline, table)
        if not len(events):
            continue
        order = np.lexsort((-events.end_ns, events.start_ns, events.track))
        indices, first = np.unique(events.track[order], return_index=True)
        columns = [
            column[order]
            for column in (events.start_ns, events.end_ns, events.name, events.correlation)
        ]
        bounds = [*first.tolist(), len(order)]
        for index, begin, end in zip(indices.tolist(), bounds, bounds[1:], strict=False):
            slices_here = (column[begin:end].tolist() for column in columns)
            here = timeline.tracks[index]
            process = f"{here.process or 'process'} ({here.pid})"
            parent = f"GPU{here.device}" if here.kind == "stream" else process
            levels, left_out = _nested(zip(*slices_here, strict=True))
            for level, slices in enumerate(levels):
                number += 1
                more = f" #{level + 1}" if level else ""
                if left_out and level + 1 == len(levels):
                    more += f", {left_out:,} that overlap with all of these left out"
                yield Track(
                    number, f"{_title(table, here.label)}{more}", table, index, parent,
                    here.pid, here.number, slices,
                )  # fmt: skip


def _title(table: str, label: str) -> str:
    return {"calls": f"{label} device calls", "states": f"{label} off CPU"}.get(table, label)


def _nested(
    slices: Iterable[tuple[int, int, int, int]],
) -> tuple[list[list[tuple[int, int, int, int]]], int]:
    """(the slices, spread over levels within which they nest; number of slices beyond the last
    level)."""
    left_out = 0
    levels: list[list[tuple[int, int, int, int]]] = []
    open_ends: list[list[int]] = []
    for one in slices:
        start, end = one[:2]
        level = _level_of(open_ends, start, end)
        if level == MAX_LEVELS:
            left_out += 1
            continue
        if level == len(levels):
            levels.append([])
            open_ends.append([])
        levels[level].append(one)
        open_ends[level].append(end)
    return levels, left_out


def _level_of(open_ends: list[list[int]], start: int, end: int) -> int:
    """The first level where the interval nests in the open ones; the number of levels if none."""
    for level, ends in enumerate(open_ends):
        while ends and ends[-1] <= start:
            ends.pop()
        if not ends or end <= ends[-1]:
            return level
    return len(open_ends)
