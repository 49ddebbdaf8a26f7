# SPDX-License-Identifier: Apache-2.0
"""What changed in the waits between two records of the same work: a program that waits less and
works more is no worse for it.

Compared is how long all threads together were blocked, by the innermost code of the program and by
the reason. Waits for the next request, and those of threads that wait all the time, are left out:
nobody waits for these. Per step, call and second they are of the whole record. How long waits are
is measured; how many there were, and for what, is chance: a sum of `count` waits has the deviation
of as many lengths that vary as much as their mean (exponential ones). A change is certain beyond
that (95 % for all comparisons together, Bonferroni), and if runs, where there are several, differ
as `run_difference` has it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, median

from sonde.analyze.difference import LEAST_SHARE, Change, ChangeKind, Difference, Spent, Unit
from sonde.analyze.run_difference import differ, separate
from sonde.model.timeline import ThreadOwner, Timeline, Total, TotalKind, WaitDetail
from sonde.model.user_code import function_of

IDLE_SHARE = 0.9
"""A thread that was blocked for this share of the record in one wait waited all the time."""
VARIANCE = 2.0
"""Mean square of the length of a wait, in squares of the mean: that of exponential lengths."""
_ERROR = 0.05
"""Chance that any of the compared waits is called changed where none is."""
_NOT_WAITED_FOR = ("kernel thread", "new thread", "preempted")
"""Reasons that are no waits of a program."""

Waited = Mapping[str, tuple[float, int]]
"""By code and reason: (ns blocked, number of waits)."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The time of one record."""

    wall_ns: int
    cpu_ns: int
    """On CPUs, estimated from samples."""
    waits: Waited


def recorded(timeline: Timeline) -> Recorded:
    """The time of a record: of all its threads, without idle ones."""
    wall_ns = timeline.end_ns - timeline.start_ns
    sums: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for one in timeline.totals:
        if one.kind == TotalKind.BLOCKED and not _is_idle(timeline, one, wall_ns):
            name = _name(timeline, one)
            ns, count = sums[name]
            sums[name] = ns + one.ns, count + one.count
    return Recorded(wall_ns, int(timeline.samples.weight_ns.sum()), dict(sums))


def _is_idle(timeline: Timeline, one: Total, wall_ns: int) -> bool:
    """Whether nobody waits for a thread's waits."""
    return (
        one.serves
        or one.wait_detail == WaitDetail.IDLE
        or one.name in _NOT_WAITED_FOR
        or timeline.tracks[one.track].owner != ThreadOwner.PROGRAM
        or (one.count <= 1 and one.ns >= IDLE_SHARE * wall_ns)
    )


def _name(timeline: Timeline, one: Total) -> str:
    """'socket in ask shop.py'; of code that is not known, the process."""
    track = timeline.tracks[one.track]
    return f"{one.name} in {function_of(one.location) or track.process or track.name or 'thread'}"


def with_waits(
    found: Difference, before: Sequence[Recorded], after: Sequence[Recorded], paired: bool
) -> Difference:
    """The difference with that of waits. `before`, `after`: of whole runs all runs, else one each;
    `paired`: as `are_pairs` has it."""
    old = [_per_unit(one, found, found.before_ns) for one in before]
    new = [_per_unit(one, found, found.after_ns) for one in after]
    spent = [
        Spent(*(round(median(column)) for column in zip(*map(_times, side), strict=True)))
        for side in (before, after)
    ]
    if found.per == Unit.RUN:  # by the kernel's counters, not from samples
        wall, cpu = found.changes[:2]
        spent = [
            replace(spent[0], wall_ns=round(wall.before), cpu_ns=round(cpu.before)),
            replace(spent[1], wall_ns=round(wall.after), cpu_ns=round(cpu.after)),
        ]
    changes = _changes(old, new, max(1.0, found.before_ns), paired)
    return replace(found, waits=tuple(changes), spent=(spent[0], spent[1]))


def _times(one: Recorded) -> tuple[float, float, float]:
    return one.wall_ns, one.cpu_ns, sum(ns for ns, _ in one.waits.values())


def _per_unit(one: Recorded, found: Difference, unit_ns: float) -> Waited:
    if found.per == Unit.RUN:
        return one.waits
    scale = unit_ns / max(1, one.wall_ns)
    return {name: (ns * scale, count) for name, (ns, count) in one.waits.items()}


def _changes(
    before: Sequence[Waited], after: Sequence[Waited], unit_ns: float, paired: bool
) -> list[Change]:
    """The changes, certain ones first, then the largest."""
    nothing = (0.0, 0)
    names = {
        name
        for side in (*before, *after)
        for name, (ns, _) in side.items()
        if ns >= LEAST_SHARE * unit_ns
    }
    least = NormalDist().inv_cdf(1 - _ERROR / 2 / max(1, len(names)))
    changes = []
    for name in sorted(names):
        old, new = ([one.get(name, nothing) for one in side] for side in (before, after))
        olds, news = ([ns for ns, _ in side] for side in (old, new))
        was = median(olds)
        if paired:
            apart = [other - one for one, other in zip(olds, news, strict=True)]
            change_ns, differs = fmean(apart), differ(apart)
        else:
            change_ns, differs = median(news) - was, separate(olds, news)
        noise = math.hypot(_deviation(old), _deviation(new))
        certain = differs and abs(change_ns) > least * noise
        cost = change_ns / unit_ns
        changes.append(Change(ChangeKind.WAIT, name, was, max(0.0, was + change_ns), cost, certain))
    return sorted(changes, key=lambda one: (not one.certain, -abs(one.cost), one.name))


def _deviation(waits: Sequence[tuple[float, int]]) -> float:
    """Standard deviation of the mean of some runs."""
    squares = sum(VARIANCE * ns * ns / max(1, count) for ns, count in waits)
    return math.sqrt(squares) / len(waits)
