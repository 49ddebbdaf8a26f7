# SPDX-License-Identifier: Apache-2.0
"""What changed between two records of the same work: steps, kernels, causes, functions.

Of devices the first one of each record is compared. Times are per step if both records have steps
and device tracing for half of the time, or no totals for the rest of it. Otherwise, if both count
the same call that waits for the device, they are per call, without the start-up before the first
call; otherwise per second. A change is certain if the 95 % intervals of the two medians (order
statistics) do not overlap; for causes, if it exceeds the variation between parts of the time; for
functions and counts of calls, if it exceeds the Poisson error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist

import numpy as np

from sonde.analyze.blame import blame_device
from sonde.analyze.bound import verdict_of
from sonde.analyze.causes import CAUSES
from sonde.analyze.intervals import Coverage, Intervals
from sonde.analyze.sampling import half_width
from sonde.analyze.stalls import devices_of, stalls_of
from sonde.model.timeline import F64, I64, CallKind, DeviceKind, Timeline, TotalKind, TrackKind
from sonde.model.verdict import Verdict

LEAST_SHARE = 0.01
"""Smaller shares of the whole, in both records, are not compared."""
FEW_CALLS = 20
"""Fewer calls give no rate."""
_SHOWS = ": a difference shows what was recorded, not what changed"
LENGTHS = 2.0
"""Records of which one is longer by this factor may show different phases of the work."""
_Z = 1.96
"""Of a 95 % interval of the normal distribution."""
BLOCKS = 20
"""Equal parts of a record, whose variance gives the interval of a cause's share."""


class ChangeKind(StrEnum):
    """What a change is about."""

    STEP = "step"
    """The length of a step, or the time from one call to the next."""
    KERNEL = "kernel"
    CAUSE = "cause"
    FUNCTION = "function"
    """CPU time in the function itself."""
    INCLUSIVE = "with callees"
    """CPU time in the function and in what it called."""
    RUN = "run"
    """Wall time or CPU time of the whole run."""
    WAIT = "wait"
    """Time in which threads were blocked, all together, for one reason in one function."""


class Unit(StrEnum):
    """What times in a difference are per: ns per step, per call, per run or per second."""

    STEP = "step"
    CALL = "call"
    RUN = "run"
    """The program's whole run, from its start to its end (analyze/run_difference.py)."""
    SECOND = "second"
    """Nothing else is comparable. Shares of a second do not show the cost of the same work:
    a program that does more of everything has the same shares."""


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both records."""

    kind: ChangeKind
    name: str
    before: float
    """ns per unit."""
    after: float
    cost: float
    """The change as a share of the whole unit before; negative where it got faster."""
    certain: bool
    """It is larger than what two recordings of the same program differ by (the noise)."""

    @property
    def relative(self) -> float:
        """The change as a share of the figure before; infinite where that was 0."""
        if not self.before:
            return math.inf if self.after else 0.0
        return self.after / self.before - 1


@dataclass(frozen=True, slots=True)
class Spent:
    """The time of one record, all its threads together; of several, the median."""

    wall_ns: int
    cpu_ns: int
    blocked_ns: int
    """In waits that are compared: without those for requests."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The changes: those of the whole unit (step, or wall and CPU time) first, then the costliest;
    of whole runs, certain ones before others."""

    per: Unit
    before_ns: float
    """The length of one unit."""
    after_ns: float
    changes: tuple[Change, ...]
    waits: tuple[Change, ...] = ()
    """Those of waits (`wait_difference`), certain ones first, then the largest."""
    spent: tuple[Spent, Spent] | None = None
    """The time before and after; None: not asked for."""


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two records, in figures per unit."""

    unit_ns: float
    """The length of a unit."""
    steps: F64
    """The length of each step in ns; empty where times are not per step."""
    kernels: dict[str, tuple[float, tuple[float, float]]]
    """ns per unit, and the 95 % interval of that."""
    causes: dict[str, tuple[float, float]]
    """ns per unit, and half the width of its 95 % interval."""
    functions: dict[str, tuple[float, int]]
    """ns per unit, samples."""


@dataclass(frozen=True, slots=True)
class _Rate:
    """How often a thread made a call, from its first to its last, by exact totals."""

    call: str
    count: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Unlike:
    """Why two records are not of the same work, in words; '' where they may be."""

    scope: str = ""
    """One is of the whole machine, the other of some processes."""
    names: str = ""
    """Processes with other names were recorded: the program may have been renamed."""
    length: str = ""
    """They are of very different length, which shares of a second do not show."""

    @property
    def notes(self) -> list[str]:
        """Those that there are."""
        return [one for one in (self.scope, self.names, self.length) if one]


def unlike(before: Timeline, after: Timeline) -> Unlike:
    """What speaks against comparing two records."""
    both = (before.whole_machine, after.whole_machine)
    scope = other = ""
    if None not in both and both[0] != both[1]:
        which = ["the whole machine" if whole else "chosen processes" for whole in both]
        scope = f"A is a record of {which[0]}, B of {which[1]}{_SHOWS}"
    elif both == (False, False):
        names = [_processes(one) for one in (before, after)]
        if all(names) and names[0].isdisjoint(names[1]):
            other = f"no process of A ({_few(names[0])}) is in B ({_few(names[1])}){_SHOWS}"
    lengths = sorted(max(1, one.end_ns - one.start_ns) for one in (before, after))
    ratio = lengths[1] / lengths[0]
    length = (
        f"one record is {ratio:.1f} times as long as the other: compared are averages over each"
    )
    return Unlike(scope, other, length if ratio >= LENGTHS else "")


def _processes(timeline: Timeline) -> set[str]:
    """What the processes of a record are called."""
    mine = {one.process or one.name for one in timeline.tracks if one.kind == TrackKind.THREAD}
    return mine - {""}


def _few(names: set[str]) -> str:
    shown = sorted(names)[:3]
    return ", ".join(shown) + f" and {len(names) - 3} more" * (len(names) > 3)


def compare(before: Timeline, after: Timeline) -> Difference:
    """The changes from one timeline to another."""
    sides = (before, after)
    verdicts = [_verdict(one) for one in sides]
    stepwise = all(_stepwise(one, v) for one, v in zip(sides, verdicts, strict=True))
    rates = None if stepwise else _rates(*sides)
    a, b = (
        _side(one, verdict, stepwise, rates[number] if rates else None)
        for number, (one, verdict) in enumerate(zip(sides, verdicts, strict=True))
    )
    whole = [*_steps(a, b, stepwise), *(_rate_change(a, b, *rates) if rates else [])]
    changes = [*whole, *_kernels(a, b), *_causes(a, b), *_functions(a, b)]
    changes.sort(key=lambda one: (one.kind != ChangeKind.STEP, -abs(one.cost)))
    per = Unit.STEP if stepwise else Unit.CALL if rates else Unit.SECOND
    return Difference(per, a.unit_ns, b.unit_ns, tuple(changes))


def _verdict(timeline: Timeline) -> Verdict | None:
    devices = devices_of(timeline) if len(timeline.device) else []
    return verdict_of(timeline, devices[0]) if devices else None


def _stepwise(timeline: Timeline, verdict: Verdict | None) -> bool:
    """Whether times of this record can be per step."""
    if verdict is None or verdict.steps is None:
        return False
    # If only some runs were timed, the steps in them are not representative.
    return verdict.window_ns >= 0.5 * (timeline.end_ns - timeline.start_ns) or not timeline.totals


def _rates(before: Timeline, after: Timeline) -> tuple[_Rate, _Rate] | None:
    """Rates of the same call in both: the most frequent one that waits, in the busiest threads."""
    counted = [_calls_of_busiest(one) for one in (before, after)]
    both = counted[0].keys() & counted[1].keys()
    if not both:
        return None
    call = max(both, key=lambda name: (counted[0][name].count, name))
    one, two = counted[0][call], counted[1][call]
    return (one, two) if min(one.count, two.count) >= FEW_CALLS else None


def _calls_of_busiest(timeline: Timeline) -> dict[str, _Rate]:
    device = [one for one in timeline.totals if one.kind == TotalKind.CALL]
    counts: dict[int, int] = {}
    for one in device:
        counts[one.track] = counts.get(one.track, 0) + one.count
    if not counts:
        return {}
    track = max(counts, key=lambda number: counts[number])
    times = timeline.calls.start_ns[timeline.calls.track == track]
    if len(times) < 2:
        return {}
    start, end = int(times.min()), int(times.max())
    found: dict[str, _Rate] = {}
    for one in device:
        if one.track == track and one.call == CallKind.SYNC:
            count = one.count + (found[one.name].count if one.name in found else 0)
            found[one.name] = _Rate(one.name, count, start, end)
    return found


def _rate_change(a: _Side, b: _Side, before: _Rate, after: _Rate) -> list[Change]:
    cost = b.unit_ns / a.unit_ns - 1
    spread = math.sqrt(1 / before.count + 1 / after.count)
    name = f"from one {before.call} to the next"
    return [Change(ChangeKind.STEP, name, a.unit_ns, b.unit_ns, cost, abs(cost) > _Z * spread)]


def _side(timeline: Timeline, verdict: Verdict | None, stepwise: bool, rate: _Rate | None) -> _Side:
    """The figures of one record: per step, per call of `rate`, or per second."""
    steps = np.zeros(0)
    kernels: dict[str, tuple[float, tuple[float, float]]] = {}
    causes: dict[str, tuple[float, float]] = {}
    unit_ns = 1e9
    units = max(1e-9, (timeline.end_ns - timeline.start_ns) / 1e9)
    samples = timeline.samples
    rows = np.ones(len(samples), bool)
    if rate is not None:
        unit_ns = max(1.0, (rate.end_ns - rate.start_ns) / rate.count)
        units = float(rate.count)
        rows = (samples.time_ns >= rate.start_ns) & (samples.time_ns < rate.end_ns)
    elif verdict is not None:
        units = max(1e-9, verdict.window_ns / 1e9)
        if stepwise and verdict.steps is not None:
            steps = np.asarray(verdict.steps.duration_ns, float)
            unit_ns = float(np.median(steps))
            units = max(1.0, verdict.window_ns / max(1.0, float(steps.mean())))
        kernels = _kernel_times(timeline, verdict, units)
        causes = _cause_times(timeline, verdict, units)
    ns = np.bincount(samples.name[rows], samples.weight_ns[rows], len(timeline.names))
    count = np.bincount(samples.name[rows], minlength=len(timeline.names))
    functions = {
        timeline.names[i]: (float(ns[i]) / units, int(count[i]))
        for i in np.flatnonzero(ns).tolist()
        if timeline.names[i]
    }
    return _Side(unit_ns, steps, kernels, causes, functions)


def _kernel_times(
    timeline: Timeline, verdict: Verdict, units: float
) -> dict[str, tuple[float, tuple[float, float]]]:
    """By name: (ns per unit, its 95 % interval). `units`: how many there are in the traced time."""
    events = stalls_of(timeline, verdict.device).events
    rows = np.flatnonzero(events.kind != DeviceKind.SET)
    duration: I64 = events.duration_ns[rows]
    order = np.argsort(events.name[rows], kind="stable")
    names, first, count = np.unique(events.name[rows][order], return_index=True, return_counts=True)
    found = {}
    for name, begin, often in zip(names.tolist(), first.tolist(), count.tolist(), strict=True):
        mine = np.sort(duration[order[begin : begin + often]]).astype(float)
        low, high = median_interval(mine)
        scale = often / units
        found[timeline.names[name]] = (float(mine.sum()) / units, (low * scale, high * scale))
    return found


def _cause_times(
    timeline: Timeline, verdict: Verdict, units: float
) -> dict[str, tuple[float, float]]:
    """By title of the cause: (ns per unit, half the width of its 95 % interval)."""
    blamed = blame_device(timeline, verdict.device)
    window = blamed.stalls.window
    edges = np.linspace(window.start[0], window.end[-1], BLOCKS + 1).astype(np.int64)
    length = Coverage(window).within(edges[:-1], edges[1:])
    found = {}
    for number, cause in enumerate(CAUSES):
        rows = blamed.cause == number
        if not rows.any():
            continue
        stalled = Intervals(blamed.stalls.start[rows], blamed.stalls.end[rows])
        part = Coverage(stalled).within(edges[:-1], edges[1:])
        half = half_width(part[length > 0], length[length > 0]) * float(length.sum())
        found[cause.description] = (float(part.sum()) / units, half / units)
    return found


def median_interval(ordered: F64) -> tuple[float, float]:
    """The 95 % interval of the median of sorted values, by order statistics."""
    count = len(ordered)
    if count < 6:
        return (float(ordered[0]), float(ordered[-1])) if count else (0.0, 0.0)
    half = _Z / 2 * math.sqrt(count)  # ranks: the standard deviation is half the root
    low = max(0, math.floor(count / 2 - half))
    high = min(count - 1, math.ceil(count / 2 + half))
    return float(ordered[low]), float(ordered[high])


def _disjoint(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return a[1] < b[0] or b[1] < a[0]


def _steps(a: _Side, b: _Side, stepwise: bool) -> list[Change]:
    if not stepwise:
        return []
    intervals = [median_interval(np.sort(side.steps)) for side in (a, b)]
    cost = b.unit_ns / a.unit_ns - 1 if a.unit_ns else 0.0
    return [Change(ChangeKind.STEP, "step time", a.unit_ns, b.unit_ns, cost, _disjoint(*intervals))]


def _kernels(a: _Side, b: _Side) -> list[Change]:
    nothing = (0.0, (0.0, 0.0))
    changes = []
    for name in a.kernels.keys() | b.kernels.keys():
        before, was = a.kernels.get(name, nothing)
        after, now = b.kernels.get(name, nothing)
        if max(before / a.unit_ns, after / b.unit_ns) >= LEAST_SHARE:
            cost = (after - before) / a.unit_ns
            certain = _disjoint(was, now)
            changes.append(Change(ChangeKind.KERNEL, name, before, after, cost, certain))
    return changes


def _causes(a: _Side, b: _Side) -> list[Change]:
    changes = []
    for name in a.causes.keys() | b.causes.keys():
        before, spread = a.causes.get(name, (0.0, 0.0))
        after, spread_after = b.causes.get(name, (0.0, 0.0))
        if max(before / a.unit_ns, after / b.unit_ns) >= LEAST_SHARE:
            cost = (after - before) / a.unit_ns
            certain = abs(after - before) > math.hypot(spread, spread_after)
            changes.append(Change(ChangeKind.CAUSE, name, before, after, cost, certain))
    return changes


def _functions(a: _Side, b: _Side) -> list[Change]:
    changes = []
    nothing = (0.0, 0)
    whole = next(filter(None, (sum(ns for ns, _ in one.functions.values()) for one in (a, b))), 1.0)
    compared = [
        name
        for name in a.functions.keys() | b.functions.keys()
        if max(side.functions.get(name, nothing)[0] for side in (a, b)) >= LEAST_SHARE * whole
    ]
    # An error of 5 % for all comparisons together (Bonferroni).
    least = NormalDist().inv_cdf(1 - 0.025 / max(1, len(compared)))
    for name in compared:
        before, few = a.functions.get(name, nothing)
        after, many = b.functions.get(name, nothing)
        # Numbers of samples are Poisson: the standard deviation is the square root.
        spread = math.hypot(
            before / math.sqrt(few) if few else 0.0, after / math.sqrt(many) if many else 0.0
        )
        certain = abs(after - before) > least * spread
        changes.append(
            Change(ChangeKind.FUNCTION, name, before, after, (after - before) / whole, certain)
        )
    return changes


def regressions(difference: Difference, above: float, waits: bool = False) -> list[Change]:
    """Certain changes that cost more than `above` of the whole (0.03: 3 %); with `waits` those of
    waits, too."""
    every = (*difference.changes, *(difference.waits if waits else ()))
    return [one for one in every if one.certain and one.cost > above and one.after > 0]
