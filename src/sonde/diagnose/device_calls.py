# SPDX-License-Identifier: Apache-2.0
"""What a process asks of its devices, before and after: how often, how long, how many bytes.

A step of such a program makes the same calls each time. So a function whose calls come steadily is
a clock of its steps, and one whose single calls take longer shows that the device is slower, or has
more to do.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sonde.diagnose.moments import Call, Moment, ProcessMoment

Function = tuple[str, str]
"""Name, and direction of a copy."""
BUILDS = frozenset(("build",))
MEMORY = frozenset(("alloc", "free", "map", "unmap", "pin", "unpin"))
OF_STEPS = frozenset(("copy", "sync", "graph-launch", "launch", "set", "flush", "prefetch"))
"""Operations of which steps consist."""
LEAST_RATE = 6.0
"""Fewer calls a second are no clock."""
LEAST_TIME = 0.05
"""A function that takes fewer seconds a second shows nothing by the time of single calls."""
STEADY = 0.25
"""Median absolute deviation, as a part of the median, up to which a rate is steady."""
MOST_FUNCTIONS = 16
"""Of a process that are compared: those with most calls."""


@dataclass(slots=True)
class Rate:
    """Calls of one function, each number a second."""

    op: str
    count: float = 0.0
    seconds: float = 0.0
    bytes: float = 0.0

    @property
    def each_s(self) -> float:
        """How long one takes."""
        return self.seconds / self.count if self.count else 0.0


def functions_of(one: ProcessMoment) -> dict[Function, list[Call]]:
    """The calls of a moment by function."""
    found: dict[Function, list[Call]] = defaultdict(list)
    for call in one.calls:
        if call.op:
            found[call.name, call.direction].append(call)
    return found


def rates(moments: Iterable[Moment], pid: int) -> dict[Function, Rate]:
    """Rates of a process over some moments."""
    found: dict[Function, Rate] = {}
    seconds = 0.0
    for moment in moments:
        seconds += moment.seconds
        one = moment.processes.get(pid)
        for call in one.calls if one is not None else ():
            if not call.op:
                continue
            rate = found.setdefault((call.name, call.direction), Rate(call.op))
            rate.count += call.count
            rate.seconds += call.ns / 1e9
            rate.bytes += call.bytes
    for rate in found.values():
        rate.count /= seconds
        rate.seconds /= seconds
        rate.bytes /= seconds
    return found


def pace(before: Sequence[Moment], after: Sequence[Moment], pid: int) -> float | None:
    """How fast steps follow each other, as a part of what was usual: by the function whose calls
    fell most, of those that came steadily. None where none did."""
    clocks = steady([_counts(moment, pid) for moment in before])
    if not clocks:
        return None
    now = rates(after, pid)
    ratios = [now[it].count / usual if it in now else 0.0 for it, usual in clocks.items()]
    return min(ratios)


def _counts(moment: Moment, pid: int) -> dict[Function, float]:
    one = moment.processes.get(pid)
    return counts(one, moment.seconds) if one is not None else {}


def counts(one: ProcessMoment, seconds: float) -> dict[Function, float]:
    """Calls a second by function, of those that steps consist of."""
    return {
        function: sum(call.count for call in calls) / seconds
        for function, calls in functions_of(one).items()
        if calls[0].op in OF_STEPS
    }


def steady(ticks: Sequence[Mapping[Function, float]]) -> dict[Function, float]:
    """The usual rate of the functions that are called steadily; `ticks`: calls a second."""
    sums: dict[Function, float] = defaultdict(float)
    for tick in ticks:
        for function, rate in tick.items():
            sums[function] += rate
    found = {}
    for function in sorted(sums, key=lambda it: -sums[it])[:MOST_FUNCTIONS]:
        if sums[function] < LEAST_RATE * len(ticks):
            continue
        row = [tick.get(function, 0.0) for tick in ticks]
        usual = statistics.median(row)
        spread = statistics.median(abs(it - usual) for it in row)
        if usual >= LEAST_RATE and spread <= STEADY * usual:
            found[function] = usual
    return found


def stretched_s(before: Mapping[Function, Rate], after: Mapping[Function, Rate]) -> float:
    """Seconds a second by which calls take longer than as many took before, without those that
    build something or take and give memory."""
    found = 0.0
    for function, now in after.items():
        was = before.get(function)
        if was is None or now.op not in OF_STEPS or was.count < 1:
            continue
        if now.seconds < LEAST_TIME:
            continue
        found += max(0.0, now.seconds - now.count * was.each_s)
    return found


def more_s(
    before: Mapping[Function, Rate], after: Mapping[Function, Rate], ops: frozenset[str]
) -> float:
    """Seconds a second that calls of these operations take more than before."""
    return max(0.0, _seconds(after, ops) - _seconds(before, ops))


def _seconds(of: Mapping[Function, Rate], ops: frozenset[str]) -> float:
    return sum(it.seconds for it in of.values() if it.op in ops)


def calls(of: Mapping[Function, Rate], ops: frozenset[str]) -> float:
    """Calls a second of these operations."""
    return sum(it.count for it in of.values() if it.op in ops)


def waits_for_device(of: Mapping[Function, Rate]) -> float:
    """Times a second that the host waits for the device: synchronizations, and copies to the
    host."""
    return sum(
        it.count for (_, direction), it in of.items()
        if it.op == "sync" or (it.op == "copy" and direction == "d2h")
    )  # fmt: skip


def copied(of: Mapping[Function, Rate]) -> float:
    """Bytes a second between host and device."""
    return sum(
        it.bytes for (_, direction), it in of.items()
        if it.op == "copy" and direction in ("h2d", "d2h", "unknown")
    )  # fmt: skip
