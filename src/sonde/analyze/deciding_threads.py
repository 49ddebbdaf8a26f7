# SPDX-License-Identifier: Apache-2.0
"""Which threads a capture is about in which nothing called a device: the one choice between those
that work most and those that others hold up (`sonde.analyze.held_up`)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from sonde.analyze.alike_threads import by_likeness
from sonde.analyze.causes import GENERATIONS, QUEUE_REASONS
from sonde.analyze.held_up import LEAST_WAITS, held_up
from sonde.analyze.single_rows import add_single_rows
from sonde.model.timeline import (
    ThreadOwner,
    Timeline,
    Total,
    TotalKind,
)

THREADS = 3
"""At most this many groups of threads get a verdict."""
LEAST_ACTIVE = 0.05
"""Threads with a smaller fraction of the busiest one's time are left out."""
FIRST_THREAD = 0.5
"""A process's first thread comes first if it has this fraction of the busiest one's time, or waits
for other threads for this part of the record."""
_BUSY = (TotalKind.SAMPLED, TotalKind.RUNQUEUE)


@dataclass(frozen=True, slots=True)
class Deciding:
    """Threads that decide together how fast a program is."""

    tracks: list[int]
    are_held_up: bool = False
    """They wait for the same; else each of them does the same."""


def deciding_threads(
    timeline: Timeline, by_track: dict[int, list[Total]], window: int
) -> list[Deciding]:
    """The threads that decide how fast a program is, `THREADS` groups at most: the busiest ones,
    with those that do the same, and those that wait for the same. Totals known only by single waits
    or samples are added to `by_track`; `window`: the length of the record in ns.

    A program works in the thread that is busiest. If the first thread of its process, or of one
    that started this one, is about as busy, or is woken by others again and again, it is the one
    that the program waits for. Threads that wait for a lock come before the busiest one where
    together they wait longer than it works, and before a first thread that hardly works: a server
    answers in them.
    """
    add_single_rows(timeline, by_track)
    active: dict[int, int] = defaultdict(int)
    waits: dict[int, int] = defaultdict(int)
    ended_by: dict[int, int] = defaultdict(int)
    for track, totals in by_track.items():
        if timeline.tracks[track].owner != ThreadOwner.PROGRAM:
            continue
        for one in totals:
            active[track] += one.ns if one.kind in _BUSY else 0
            if one.kind == TotalKind.BLOCKED:
                waits[track] += one.count
                handed = one.waker_track in by_track and one.name in QUEUE_REASONS
                handed &= not one.serves
                ended_by[track] += one.waker_ns if handed else 0
    ranked = sorted(active, key=lambda track: (active[track], waits[track]), reverse=True)
    ranked = [track for track in ranked if active[track] or waits[track] >= LEAST_WAITS]
    groups = held_up(timeline, by_track, window)
    if not ranked:
        return [Deciding([*one.tracks], are_held_up=True) for one in groups][:THREADS]
    most = active[ranked[0]]
    alike = by_likeness(timeline, by_track, ranked, THREADS)
    chosen = [one[0] for one in alike if active[one[0]] >= LEAST_ACTIVE * most]
    first_of_all: list[int] = []
    for first in _first_threads(timeline, ranked):
        is_woken = waits[first] >= LEAST_WAITS and ended_by[first] >= FIRST_THREAD * window
        if active[first] >= FIRST_THREAD * most or is_woken:
            chosen = [first, *(track for track in chosen if track != first)]
            if is_woken or active[first] >= FIRST_THREAD * window:
                first_of_all = [first]
            break
    if any(one.for_lock and one.ns >= most for one in groups):
        # Beside threads that wait for a lock, those that are hardly busy decide nothing.
        chosen = [track for track in chosen if active[track] >= FIRST_THREAD * window]
    before = [one.tracks for one in groups if one.for_lock and one.ns >= most]
    after = [one.tracks for one in groups if one.tracks not in before]
    found: list[Deciding] = []
    seen: set[int] = set()
    for tracks in (first_of_all, *before, *([track] for track in chosen), *after):
        if not tracks or tracks[0] in seen:
            continue
        # A thread of a group stands for the group.
        held = next((one.tracks for one in groups if tracks[0] in one.tracks), ())
        same = next((one for one in alike if tracks[0] in one), tracks)
        whole = [it for it in held or same if it not in seen]
        found.append(Deciding(whole, are_held_up=bool(held)))
        seen.update(whole)
    return found[:THREADS]


def _first_threads(timeline: Timeline, ranked: list[int]) -> list[int]:
    """The first threads of the busiest thread's process and of those that it descends from, the
    outermost first."""
    first = {timeline.tracks[t].pid: t for t in ranked
             if timeline.tracks[t].number == timeline.tracks[t].pid}  # fmt: skip
    pid, found = timeline.tracks[ranked[0]].pid, []
    for _ in range(GENERATIONS):
        if pid in first:
            found.append(first[pid])
        pid = timeline.parents.get(pid, 0)
    return found[::-1]
