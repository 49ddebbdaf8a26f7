# SPDX-License-Identifier: Apache-2.0
"""Who had the CPUs that a thread waited for: first the program itself, then others, as groups by
what they run, with their share of the CPUs over the whole record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from sonde.analyze.own_threads import OwnThreads, own_threads
from sonde.analyze.thread_time import locations
from sonde.model.timeline import I64, ThreadOwner, Timeline, TotalKind
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
"""Of programs beside the one that waits, at most this many are named."""
MOST = 0.5
"""The next step names the programs that together had this part of what others had."""
MINOR = 0.1
"""Threads that ran for a smaller part of the time of the one that ran most are not counted."""
LEAST_CPUS = 0.05
"""Others that had fewer CPUs are not named: who waits so long waits for somebody else."""


@dataclass(slots=True)
class _Program:
    """Processes of one program whose threads are short of a CPU, too."""

    name: str
    pids: set[int] = field(default_factory=set)
    ns: int = 0

    def add(self, pid: int, ns: int) -> None:
        """Adds what a thread ran."""
        self.pids.add(pid)
        self.ns += ns

    @property
    def label(self) -> str:
        """'pytest (20 processes)', 'train.py (31)'."""
        if len(self.pids) > 1:
            return f"{self.name} ({len(self.pids):,} processes)"
        return f"{self.name or 'process'} ({min(self.pids)})"


def contention_for_cpus(
    timeline: Timeline, turns: Collection[int], waited: int
) -> tuple[list[str], Culprit | None]:
    """(lines on who had the CPUs, whom the next step is about); none if that is not known.

    `turns`: the threads that waited; `waited`: for how long, in ns. That a thread ran meanwhile is
    no evidence: it may have had another CPU. That it had to wait for one, too, is.
    """
    length = max(1, timeline.end_ns - timeline.start_ns)
    own = own_threads(timeline, turns)
    recorded, theirs = _recorded(timeline, own, turns, waited, length)
    others, not_recorded = _not_recorded(timeline, waited, length)
    lines = [*own.facts(length), *recorded, *others]
    who = not_recorded or theirs
    pool, crowded = own.pool, own.is_crowded(length)
    if not who and pool is None and not crowded and not own.nice > 0:
        return lines, None
    return lines, Culprit(
        who,
        "",
        "on a CPU",
        pool="" if pool is None else str(pool),
        crowded=crowded and pool is None,
        nice=max(0, own.nice),
    )


def _recorded(
    timeline: Timeline, own: OwnThreads, turns: Collection[int], waited: int, length: int
) -> tuple[list[str], str]:
    """(a line on the other threads that were recorded, ran, and were short of a CPU, too; who the
    most of them are); none where they had few. Threads of the program itself count, and of what it
    started, where nothing else is known of them."""
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
    if own.pool is not None or own.is_crowded(length):  # what is known of them is stated already
        short = [track for track in short if timeline.tracks[track].pid not in own.pids]
    small = timeline.other_threads
    rows = np.flatnonzero(small.queued_ns >= QUEUED * small.ran_ns)
    whole = sum(ran[track] for track in short) + round(float(small.ran_ns[rows].sum()))
    if not short or whole < HAD * waited or whole < LEAST_CPUS * length:
        return [], ""
    short.sort(key=lambda track: -ran[track])
    least = MINOR * ran[short[0]]
    short = [track for track in short if ran[track] >= least]
    rows = rows[small.ran_ns[rows] >= least]
    programs = _programs(timeline, {track: ran[track] for track in short}, rows)
    code: dict[str, int] = defaultdict(int)
    for track in short:
        for place, ns in places[track].items():
            code[place] += ns
    at = [one.text for one in locations(code, whole, timeline.callers)[:1] if one.function]
    mine = {timeline.tracks[track].pid for track in turns}
    pids = {pid for one in programs for pid in one.pids}
    started = ", in processes that the program started" if pids & own.pids - mine else ""
    started = ", of the program itself" if pids <= mine else started
    who = f"{timeline.tracks[short[0]].label}"
    if len(pids) > 1:
        named = ", ".join(one.label for one in programs[:NAMED])
        which = f"of {len(programs):,} programs: {named}" + ", …" * (len(programs) > NAMED)
        who = f"{len(pids):,} processes" + (
            f" ({which})" if len(programs) > 1 else f" of {programs[0].name}"
        )
    elif more := len(short) + len(rows) - 1:
        who += f" and {more:,} more"
    shares = ", ".join(f"{one.label} {one.ns / length:.2f}" for one in programs[:NAMED])
    line = (
        f"{who}{started}, short of a CPU, too, had {whole / length:.1f} CPUs meanwhile"
        + f": {shares}" * (len(programs) > 1)
        + "".join(f", mostly in {function}" for function in at)
    )
    return [line], who


def _programs(timeline: Timeline, ran: Mapping[int, int], rows: I64) -> list[_Program]:
    """The programs that these threads belong to, those first that ran most in all. `ran`: by track;
    `rows`: of `Timeline.other_threads`."""
    found: dict[str, _Program] = {}
    for track, ns in ran.items():
        one = timeline.tracks[track]
        found.setdefault(one.process, _Program(one.process or one.name)).add(one.pid, ns)
    small = timeline.other_threads
    for pid, ns in zip(small.pid[rows].tolist(), small.ran_ns[rows].tolist(), strict=True):
        name = small.processes.get(pid, "")
        found.setdefault(name, _Program(name)).add(pid, round(ns))
    return sorted(found.values(), key=lambda one: -one.ns)


def _not_recorded(timeline: Timeline, waited: int, length: int) -> tuple[list[str], str]:
    """(a line on the processes that were not recorded and had the CPUs, those of them that had
    most of that); none where they had few, or CPUs were free. `waited`, and `length` of the record,
    in ns."""
    whole = sum(ns for _, ns in timeline.others_on_cpu)
    if whole < max(HAD * waited, LEAST_CPUS * length):
        return [], ""
    recorded = sum(one.ns for one in timeline.totals if one.kind == TotalKind.SAMPLED)
    if recorded + whole < FULL * timeline.cpus * length:
        return [], ""
    first, *rest = timeline.others_on_cpu[:NAMED]
    shown = [first, *(one for one in rest if one[1] >= LEAST_CPUS * length)]
    line = (
        f"not recorded, with {whole / length:.1f} of {timeline.cpus} CPUs meanwhile: "
        + ", ".join(f"{who} {ns / length:.2f}" for who, ns in shown)
        + "; sonde top shows them live"
    )
    named, had = [], 0
    for who, ns in shown:
        named.append(who)
        had += ns
        if had >= MOST * whole:
            break
    others = " and others" if had < MOST * whole else ""
    return [line], ", ".join(named) + others
