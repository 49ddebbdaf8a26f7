# SPDX-License-Identifier: Apache-2.0
"""What changed between two whole runs of the same program: wall time, CPU time, functions.

All times are for the whole run, so a program that does more work is slower by exactly that work.
Wall and CPU times are the kernel's own counters. How long a program waited for a CPU depends on
what else ran: wall time counts as changed only by more than that can explain. Times of functions
are estimated from samples; a change of those is certain if it exceeds the Poisson error of both
counts (for all comparisons together: 5 %, Bonferroni).

How much runs of a program differ from one another is not known from one run of each side; then the
allowed change has to be larger than that. With several runs a change is certain only if each run
after lies on the same side of each run before (for three and three, by chance in 1 of 20 cases).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

from sonde.analyze.difference import LEAST_SHARE, Change, ChangeKind, Difference, Unit
from sonde.model.answers import FunctionUse
from sonde.model.program_run import ProgramRun

_ERROR = 0.05
"""Chance that any of the compared functions is called changed where none is."""

CPU_TIME = "CPU time"
"""Name of the change of the whole run's CPU time."""

_Use = dict[str, tuple[float, int]]
"""By name of the function: (ns, samples)."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """One side of the comparison."""

    program: ProgramRun
    functions: Sequence[FunctionUse]
    """On-CPU time of the run's processes."""
    runqueue_ns: int = 0
    """How long its threads were ready and had no CPU, together."""


def compare_runs(before: Sequence[RecordedRun], after: Sequence[RecordedRun]) -> Difference:
    """The changes between the medians of some runs (at least one) and of later ones.

    Wall and CPU time come first, then functions: the certain changes, the costliest first.
    """
    wall = _wall(before, after)
    cpu = _exact(CPU_TIME, *([run.program.cpu_ns for run in side] for side in (before, after)))
    cpu_ns = max(1.0, cpu.before)
    functions = [
        change
        for kind, uses in ((ChangeKind.FUNCTION, _own), (ChangeKind.INCLUSIVE, _inclusive))
        for change in _functions(
            kind,
            [uses(run.functions) for run in before],
            [uses(run.functions) for run in after],
            cpu_ns,
        )
    ]
    functions.sort(key=lambda change: (not change.certain, -abs(change.weight)))
    return Difference(Unit.RUN, wall.before, wall.after, (wall, cpu, *functions))


def _exact(name: str, before: Sequence[float], after: Sequence[float]) -> Change:
    was, now = median(before), median(after)
    weight = now / was - 1 if was else 0.0
    return Change(ChangeKind.RUN, name, was, now, weight, certain=_separate(before, after))


def _wall(before: Sequence[RecordedRun], after: Sequence[RecordedRun]) -> Change:
    """Wall time, changed for certain only if no wait for a CPU makes the sides overlap."""
    most = [[run.program.wall_ns for run in side] for side in (before, after)]
    least = [
        [run.program.wall_ns - min(run.runqueue_ns, run.program.wall_ns) for run in side]
        for side in (before, after)
    ]
    was, now = (median(side) for side in most)
    certain = max(most[0]) < min(least[1]) or max(most[1]) < min(least[0])
    weight = now / was - 1 if was else 0.0
    return Change(ChangeKind.RUN, "wall time", was, now, weight, certain)


def _separate(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether every run after lies on the same side of every run before."""
    return max(before) < min(after) or max(after) < min(before)


def _own(functions: Sequence[FunctionUse]) -> _Use:
    return _summed((use.function, use.self_ns, use.self_count) for use in functions)


def _inclusive(functions: Sequence[FunctionUse]) -> _Use:
    return _summed((use.function, use.total_ns, use.total_count) for use in functions)


def _summed(rows: Iterable[tuple[str, int, int]]) -> _Use:
    """By name: one function may have moved to another file or line."""
    found: _Use = {}
    for name, ns, count in rows:
        if name and count:
            ns_so_far, count_so_far = found.get(name, (0.0, 0))
            found[name] = (ns_so_far + ns, count_so_far + count)
    return found


def _functions(
    kind: ChangeKind, before: Sequence[_Use], after: Sequence[_Use], cpu_ns: float
) -> list[Change]:
    nothing = (0.0, 0)
    names = {
        name
        for use in (*before, *after)
        for name, (ns, _) in use.items()
        if ns >= LEAST_SHARE * cpu_ns
    }
    least = NormalDist().inv_cdf(1 - _ERROR / 2 / max(1, len(names)))
    changes = []
    for name in sorted(names):
        old, new = ([use.get(name, nothing) for use in side] for side in (before, after))
        was, now = (median(ns for ns, _ in side) for side in (old, new))
        sampled = abs(now - was) > least * math.hypot(_deviation(old), _deviation(new))
        certain = sampled and _separate([ns for ns, _ in old], [ns for ns, _ in new])
        changes.append(Change(kind, name, was, now, (now - was) / cpu_ns, certain))
    return changes


def _deviation(uses: Sequence[tuple[float, int]]) -> float:
    """Standard deviation of the mean: that of a Poisson count is its square root."""
    ns, count = (float(sum(column)) for column in zip(*uses, strict=True))
    return ns / math.sqrt(count) / len(uses) if count else 0.0
