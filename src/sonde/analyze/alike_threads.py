# SPDX-License-Identifier: Apache-2.0
"""Threads of a process that do the same: a pool of clients, of workers. One verdict is on all of
them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from sonde.model.timeline import Timeline, Total, TotalKind
from sonde.model.user_code import function_of

ALIKE = 0.8
"""Of their time, by what they do and in which function, for threads that do the same."""
_THEIRS = (TotalKind.BLOCKED, TotalKind.RUNQUEUE, TotalKind.SAMPLED)

Doing = Mapping[tuple[TotalKind, str, str], float]
"""Part of a thread's time by what it is: the kind, the reason of a wait or what runs on a CPU, and
the program's function."""


def doing(totals: Iterable[Total]) -> Doing:
    """What a thread does, of its time (0..1). In a run queue it does what it did before it."""
    sums: dict[tuple[TotalKind, str, str], int] = defaultdict(int)
    for one in totals:
        if one.kind in _THEIRS:
            reason = "" if one.kind == TotalKind.RUNQUEUE else one.name
            sums[one.kind, reason, function_of(one.location)] += one.ns
    whole = max(1, sum(sums.values()))
    return {key: ns / whole for key, ns in sums.items()}


def are_alike(one: Doing, other: Doing) -> bool:
    """Whether two threads do the same for most of their time."""
    return sum(min(part, other.get(key, 0.0)) for key, part in one.items()) >= ALIKE


def by_likeness(
    timeline: Timeline, by_track: Mapping[int, Sequence[Total]], ranked: Iterable[int], most: int
) -> list[list[int]]:
    """Threads (by their tracks) as groups of those that do the same in one process, in the order of
    the first of each: `most` groups at most. Threads that are like none of them are left out."""
    groups: list[list[int]] = []
    firsts: list[tuple[int, Doing]] = []
    for track in ranked:
        pid, mine = timeline.tracks[track].pid, doing(by_track[track])
        like = (
            group
            for group, (of, other) in zip(groups, firsts, strict=True)
            if of == pid and are_alike(other, mine)
        )
        if (group := next(like, None)) is not None:
            group.append(track)
        elif len(groups) < most:
            groups.append([track])
            firsts.append((pid, mine))
    return groups
