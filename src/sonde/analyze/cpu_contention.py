# SPDX-License-Identifier: Apache-2.0
"""Which threads had the CPUs that a thread waited for, as far as they are in the record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from sonde.analyze.causes import descends
from sonde.analyze.thread_time import locations
from sonde.model.timeline import ThreadOwner, Timeline, TotalKind
from sonde.model.verdict import Culprit

QUEUED = 0.1
"""A thread is short of a CPU if it waits for one at least this part of the time that it has one."""
HAD = 0.25
"""Co-tenants are named if they had CPUs for at least this part of the time that the thread
waited."""
FULL = 0.8
"""CPUs that are busy for a smaller part of the time are free now and then: who has to wait all the
same may not use all of them."""
NAMED = 4
"""Of processes that were not recorded, at most this many are named."""
MINOR = 0.1
"""Threads that ran for a smaller part of the time of the one that ran most are not counted."""
LEAST_CPUS = 0.05
"""Others that had fewer CPUs are not named: who waits so long waits for somebody else."""


def contention_for_cpus(
    timeline: Timeline, turns: Collection[int], waited: int
) -> tuple[list[str], Culprit | None]:
    """(a line on the other threads that ran and were short of a CPU, too, the first of them); none
    if there are none.

    `turns`: the threads that waited; `waited`: for how long, in ns. That a thread ran meanwhile is
    no evidence: it may have had another CPU. That it had to wait for one, too, is.
    """
    ran: dict[int, int] = defaultdict(int)
    queued: dict[int, int] = defaultdict(int)
    places: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for one in timeline.totals:
        if one.track in turns or timeline.tracks[one.track].owner == ThreadOwner.SONDE:
            continue
        if one.kind == TotalKind.SAMPLED:
            ran[one.track] += one.ns
            places[one.track][one.location] += one.ns
        elif one.kind == TotalKind.RUNQUEUE:
            queued[one.track] += one.ns
    short = [track for track, ns in ran.items() if queued[track] >= QUEUED * ns]
    small = timeline.other_threads
    small_ran = small.ran_ns[small.queued_ns >= QUEUED * small.ran_ns]
    whole = sum(ran[track] for track in short) + round(float(small_ran.sum()))
    length = max(1, timeline.end_ns - timeline.start_ns)
    lines, culprit = _not_recorded(timeline, waited, length)
    if not short or whole < HAD * waited or whole < LEAST_CPUS * length:
        return lines, culprit
    short.sort(key=lambda track: -ran[track])
    short = [track for track in short if ran[track] >= MINOR * ran[short[0]]]
    code: dict[str, int] = defaultdict(int)
    for track in short:
        for place, ns in places[track].items():
            code[place] += ns
    named = [one.text for one in locations(code, whole, timeline.callers)[:1] if one.function]
    label = timeline.tracks[short[0]].label
    more = len(short) - 1 + int((small_ran >= MINOR * ran[short[0]]).sum())
    others = f" and {more:,} more" if more else ""
    mine = {timeline.tracks[track].pid for track in turns}
    theirs = {timeline.tracks[track].pid for track in short}
    started = any(all(it != me and descends(timeline, it, me) for it in theirs) for me in mine)
    whose = ", in processes that the program started" if started else ""
    line = (
        f"{label}{others}{whose}, short of a CPU, too, had {whole / length:.1f} CPUs meanwhile"
        + "".join(f", mostly in {function}" for function in named)
    )
    return [line, *lines], culprit or Culprit(f"{label}{others}", "", "on a CPU")


def _not_recorded(timeline: Timeline, waited: int, length: int) -> tuple[list[str], Culprit | None]:
    """(a line on the processes that were not recorded and had the CPUs, the first of them); none
    where they had few, or CPUs were free. `waited`, and `length` of the record, in ns."""
    whole = sum(ns for _, ns in timeline.others_on_cpu)
    if whole < max(HAD * waited, LEAST_CPUS * length):
        return [], None
    recorded = sum(one.ns for one in timeline.totals if one.kind == TotalKind.SAMPLED)
    if recorded + whole < FULL * timeline.cpus * length:
        return [], None
    first, *rest = timeline.others_on_cpu[:NAMED]
    shown = [first, *(one for one in rest if one[1] >= LEAST_CPUS * length)]
    line = (
        f"not recorded, with {whole / length:.1f} of {timeline.cpus} CPUs meanwhile: "
        + ", ".join(f"{who} {ns / length:.2f}" for who, ns in shown)
        + "; sonde top shows them live"
    )
    return [line], Culprit(first[0], "", "on a CPU")
