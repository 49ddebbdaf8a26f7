# SPDX-License-Identifier: Apache-2.0
"""What changed between two whole runs of the same program: wall time, CPU time, functions.

All times are for the whole run, so a program that does more work is slower by exactly that work.
Wall and CPU times are the kernel's own counters. How long a program waited for a CPU depends on
what else ran: wall time counts as changed only by more than that can explain. Times of functions
are estimated from samples; a change of those is certain if it exceeds the Poisson error of both
counts (for all comparisons together: 5 %, Bonferroni).

How much runs of a program differ from one another is not known from one run of each side; then the
allowed change has to be larger than that. With several runs a change is certain only if each run
after lies on the same side of each run before (for three and three, by chance in 1 of 20 cases on
each of the two sides).

What else happens on a machine changes how much CPU time the same work takes, by several percent.
Runs of both sides that took place at the same time on one machine met the same (duet benchmarking:
Bulej et al., ICPE 2020); on one CPU, whose scheduler gives it to them in turns, all but the same:
the CPU time of two such runs differs by about 1 %, on a CPU each by 10 % and more. Where each run
before has such a run after, the ratios of the pairs are compared: a change is their geometric mean,
certain if Student's t finds it at 5 % on its side.

A function that no run before has may be a new name for old code. It counts as more time only if CPU
time as a whole grew by half of that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median, stdev

from sonde.analyze.difference import LEAST_SHARE, Change, ChangeKind, Difference, Unit
from sonde.model.answers import FunctionUse
from sonde.model.program_run import ProgramRun

_ERROR = 0.05
"""Chance that any of the compared functions is called changed where none is."""

_STUDENT_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
"""95 % quantile of Student's t for 1, 2, … degrees of freedom; the last for more of them."""
_BESIDE = 0.5
"""Runs took place at the same time if they overlap for more than this share of the longer one."""
_SAME_CLOCK_NS = 10**9
"""Clocks that differ by more, or machines that started at other times, are two machines."""
_NEW_NAME_GROWTH = 0.5
"""A new function is more work only if CPU time as a whole grew by this part of its time."""

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
    start_ns: int = 0
    """CLOCK_MONOTONIC, as `end_ns`."""
    end_ns: int = 0
    clock_ns: int = 0
    """Added to these times it gives nanoseconds since 1970."""

    def is_beside(self, other: RecordedRun) -> bool:
        """Whether both took place at the same time on one machine."""
        both_ns = min(self.end_ns, other.end_ns) - max(self.start_ns, other.start_ns)
        longer_ns = max(self.end_ns - self.start_ns, other.end_ns - other.start_ns)
        same_machine = abs(self.clock_ns - other.clock_ns) < _SAME_CLOCK_NS
        return same_machine and both_ns > _BESIDE * longer_ns


def compare_runs(before: Sequence[RecordedRun], after: Sequence[RecordedRun]) -> Difference:
    """The changes between some runs (at least one) and later ones, or ones of the same time.

    Wall and CPU time come first, then functions: the certain changes, the costliest first.
    """
    wall = _wall(before, after)
    paired = are_pairs(before, after)
    was, now = ([run.program.cpu_ns for run in side] for side in (before, after))
    cpu = _paired(CPU_TIME, was, now) if paired else _exact(CPU_TIME, was, now)
    functions = [
        change
        for kind, uses in ((ChangeKind.FUNCTION, _own), (ChangeKind.INCLUSIVE, _inclusive))
        for change in _functions(
            kind,
            [uses(run.functions) for run in before],
            [uses(run.functions) for run in after],
            cpu,
            paired,
        )
    ]
    functions.sort(key=lambda change: (not change.certain, -abs(change.cost)))
    return Difference(Unit.RUN, wall.before, wall.after, (wall, cpu, *functions))


def are_pairs(before: Sequence[RecordedRun], after: Sequence[RecordedRun]) -> bool:
    """Whether each run before (two or more) has the run after that took place beside it."""
    if len(before) != len(after) or len(before) < 2:
        return False
    return all(one.is_beside(other) for one, other in zip(before, after, strict=True))


def _exact(name: str, before: Sequence[float], after: Sequence[float]) -> Change:
    was, now = median(before), median(after)
    cost = now / was - 1 if was else 0.0
    return Change(ChangeKind.RUN, name, was, now, cost, certain=separate(before, after))


def _paired(name: str, before: Sequence[float], after: Sequence[float]) -> Change:
    """By the ratios of runs that took place at the same time."""
    pairs = list(zip(before, after, strict=True))
    was = median(before)
    if not all(one > 0 and other > 0 for one, other in pairs):
        return _exact(name, before, after)
    ratios = [math.log(other / one) for one, other in pairs]
    cost = math.expm1(fmean(ratios))
    return Change(ChangeKind.RUN, name, was, was * (1 + cost), cost, differ(ratios))


def differ(differences: Sequence[float]) -> bool:
    """Whether the mean of two or more differences is on one side of zero, by Student's t."""
    freedom = len(differences) - 1
    error = stdev(differences) / math.sqrt(len(differences))
    return abs(fmean(differences)) > _STUDENT_95[min(freedom, len(_STUDENT_95)) - 1] * error


def _wall(before: Sequence[RecordedRun], after: Sequence[RecordedRun]) -> Change:
    """Wall time, changed for certain only if no wait for a CPU makes the sides overlap."""
    most = [[run.program.wall_ns for run in side] for side in (before, after)]
    least = [
        [run.program.wall_ns - min(run.runqueue_ns, run.program.wall_ns) for run in side]
        for side in (before, after)
    ]
    was, now = (median(side) for side in most)
    certain = max(most[0]) < min(least[1]) or max(most[1]) < min(least[0])
    cost = now / was - 1 if was else 0.0
    return Change(ChangeKind.RUN, "wall time", was, now, cost, certain)


def separate(before: Sequence[float], after: Sequence[float]) -> bool:
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
    kind: ChangeKind, before: Sequence[_Use], after: Sequence[_Use], cpu: Change, paired: bool
) -> list[Change]:
    """Changes of functions. `cpu`: that of the whole CPU time; `paired`: as `are_pairs` has it."""
    nothing = (0.0, 0)
    cpu_ns = max(1.0, cpu.before)
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
        olds, news = ([ns for ns, _ in side] for side in (old, new))
        if paired:
            apart = [other - one for one, other in zip(olds, news, strict=True)]
            was, change_ns, differs = median(olds), fmean(apart), differ(apart)
        else:
            was, differs = median(olds), separate(olds, news)
            change_ns = median(news) - was
        sampled = abs(change_ns) > least * math.hypot(_deviation(old), _deviation(new))
        cost = change_ns / cpu_ns
        is_old_code = not any(olds) and cpu.cost < _NEW_NAME_GROWTH * cost
        certain = sampled and differs and not is_old_code
        changes.append(Change(kind, name, was, max(0.0, was + change_ns), cost, certain))
    return changes


def _deviation(uses: Sequence[tuple[float, int]]) -> float:
    """Standard deviation of the mean: that of a Poisson count is its square root."""
    ns, count = (float(sum(column)) for column in zip(*uses, strict=True))
    return ns / math.sqrt(count) / len(uses) if count else 0.0
