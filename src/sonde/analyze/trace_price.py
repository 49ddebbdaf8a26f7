# SPDX-License-Identifier: Apache-2.0
"""By how much a trace slows a program: from what it launched before, in a short trace, and after.

A program that goes on with the same work launches the same things in the same proportions, only
less often a second. So what is compared is the pace of launches: of kernels, replays, copies and
sets each, where there are enough of them; by their names it is known whether it is the same work.
Pace is the slope of the count over time: a program that launches in bursts is off by a part of a
burst then, not by all of one.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.model.confidence import student_t_quantile
from sonde.model.device_trace import DeviceTrace, Kind
from sonde.model.launches import COPY, REPLAY, SET, CountedLaunch
from sonde.model.timeline import F64

PARTS: Final = 4
"""Parts of a time, whose paces differ by the error of its pace."""
LEAST_IN_PART: Final = 3
"""Launches that a part needs: else there is no figure."""
LEAST_COMMON: Final = 0.5
"""Of the launches of either time, that must be of names which the other has, too: else it does
other work."""
LEAST_PART: Final = 0.05
"""Of the launches before: rarer kinds (kernels, replays, copies, sets) are not counted."""
SETTLED: Final = 0.5
"""Part of a trace at its begin that is left out: the program stands still while CUPTI is switched
on, and its first steps after that take longer than those of a long trace."""
LEAST_ALIKE: Final = 0.97
"""Of the launches, that are of the same kind as those a lag later: then it repeats itself."""
_MOST_COMPARED: Final = 65_536
"""Launches of a trace."""
_MOST_KINDS: Final = 32
"""Kinds that are compared; some names share one where there are more."""
_COMPARED: Final = 100
"""Characters of a kernel's name: longer ones are shortened here and there."""
_KINDS: Final = {Kind.COPY: COPY, Kind.SET: SET}


@dataclass(frozen=True, slots=True)
class Slowdown:
    """By which part of their time steps take longer: 0.02 is 2 %; negative: shorter."""

    share: float
    half_width: float
    """Of its 95 % interval, by how the pace varied within each of the two times."""


def in_trace(before: Sequence[CountedLaunch], trace: DeviceTrace) -> Slowdown | None:
    """How much slower than `before` the program was in a trace; None where that is not known: too
    few launches, or others than before."""
    begin_ns = trace.start_ns + int(SETTLED * (trace.end_ns - trace.start_ns))
    rows = trace.of(Kind.KERNEL, Kind.COPY, Kind.SET)
    replayed = rows[rows["graph"] > 0]
    _, first = np.unique(replayed["correlation"], return_index=True)
    singles = rows[rows["graph"] == 0]
    during = [CountedLaunch(int(at), 1.0, REPLAY) for at in replayed["start_ns"][first]]
    for at, kind, name in zip(
        *(singles[field].tolist() for field in ("start_ns", "kind", "name")), strict=True
    ):
        during.append(CountedLaunch(at, 1.0, _KINDS.get(kind) or trace.names.get(name, "")))
    during = [one for one in during if begin_ns <= one.start_ns <= trace.end_ns]
    return _slowdown(before, during, whole=True)


def afterwards(before: Sequence[CountedLaunch], after: Sequence[CountedLaunch]) -> Slowdown | None:
    """How much slower than `before` the program was later; None where that is not known."""
    return _slowdown(before, after)


def _slowdown(
    before: Sequence[CountedLaunch], later: Sequence[CountedLaunch], *, whole: bool = False
) -> Slowdown | None:
    """`whole`: `later` has every launch, in order."""
    kinds = {_kind(one) for one in later} & _main_kinds(before)
    usual = [one for one in before if _kind(one) in kinds]
    rest = [one for one in later if _kind(one) in kinds]
    if min(_known(usual, rest), _known(rest, usual)) < LEAST_COMMON:
        return None
    paces = [_pace(usual), (_pace_of_all(rest) if whole else None) or _pace(rest)]
    if paces[0] is None or paces[1] is None:
        return None
    (was, was_error), (now, now_error) = paces[0], paces[1]
    ratio = was / now
    error = float(np.hypot(was_error / was, now_error / now))
    return Slowdown(ratio - 1, ratio * student_t_quantile(0.975, PARTS - 1) * error)


def _key(launch: CountedLaunch) -> str:
    return launch.what[:_COMPARED]


def _kind(launch: CountedLaunch) -> str:
    return launch.what if launch.what in (REPLAY, COPY, SET) else ""


def _main_kinds(launches: Sequence[CountedLaunch]) -> set[str]:
    """Of which there are enough to count: all kernels are one."""
    weights: dict[str, float] = defaultdict(float)
    for one in launches:
        weights[_kind(one)] += one.weight
    least = LEAST_PART * sum(weights.values())
    return {kind for kind, weight in weights.items() if weight >= least}


def _known(launches: Sequence[CountedLaunch], others: Sequence[CountedLaunch]) -> float:
    """Part of the launches whose names others have, too. Some launches stand for all, so that rare
    names are mostly missing: no figure is made of launches by their names."""
    names = {_key(one) for one in others}
    whole = sum(one.weight for one in launches)
    return sum(one.weight for one in launches if _key(one) in names) / whole if whole else 0.0


def _pace(launches: Sequence[CountedLaunch]) -> tuple[float, float] | None:
    """Launches a second, and the standard error of that; None: there are too few."""
    ordered = sorted(launches)
    if len(ordered) < PARTS * LEAST_IN_PART:
        return None
    at = np.array([one.start_ns - ordered[0].start_ns for one in ordered], np.float64) / 1e9
    weights = np.array([one.weight for one in ordered])
    count = np.cumsum(weights) - weights / 2
    whole = _slope(at, count)
    edges = np.linspace(0.0, at[-1], PARTS + 1)
    parts = []
    for low, high in itertools.pairwise(edges):
        chosen = (at >= low) & (at <= high)
        if chosen.sum() < LEAST_IN_PART:
            return None
        parts.append(_slope(at[chosen], count[chosen]))
    if not whole > 0:
        return None
    return whole, float(np.std(parts, ddof=1)) / PARTS**0.5


def _pace_of_all(launches: Sequence[CountedLaunch]) -> tuple[float, float] | None:
    """The same where every launch is there and the program repeats itself: from each launch to its
    like as many steps later as there are in half of the time, so that bursts do not count. None:
    it does not repeat itself, or all launches are alike."""
    ordered = sorted(launches)[:_MOST_COMPARED]
    _, number = np.unique([_key(one) for one in ordered], return_inverse=True)
    number %= _MOST_KINDS
    half = len(number) // 2
    if half < PARTS * LEAST_IN_PART or number.max() == 0:
        return None
    like = _alike(number)
    repeats = np.flatnonzero(like[1 : half + 1] >= LEAST_ALIKE) + 1
    if not len(repeats) or like[1 : half + 1].min() >= LEAST_ALIKE:
        return None
    lag = int(repeats[-1])
    at = np.array([one.start_ns for one in ordered], np.float64)
    apart = (at[lag:] - at[:-lag]) / 1e9
    pace = lag / apart.mean()
    parts = [lag / part.mean() for part in np.array_split(apart, PARTS)]
    return float(pace), float(np.std(parts, ddof=1)) / PARTS**0.5


def _alike(number: NDArray[np.intp]) -> F64:
    """By lag: the share of launches that are of the same kind as the one a lag later."""
    size = len(number)
    room = 1 << (2 * size - 1).bit_length()
    same = np.zeros(size)
    for kind in range(int(number.max()) + 1):
        power = np.abs(np.fft.rfft(number == kind, room)) ** 2
        same += np.fft.irfft(power, room)[:size]
    alike: F64 = same / np.arange(size, 0, -1)
    return alike


def _slope(at: F64, count: NDArray[np.float64]) -> float:
    """Of a straight line through the counts, by the time they were reached."""
    away = at - at.mean()
    square = float((away**2).sum())
    return float((away * count).sum()) / square if square else 0.0
