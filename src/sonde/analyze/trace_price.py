# SPDX-License-Identifier: Apache-2.0
"""By how much a trace slows a program: from what it launched before, in a short trace, and after.

A program that goes on with the same work launches the same things in the same proportions, only
less often a second. So what is compared is the pace of launches of kinds that were seen both times;
of kernels, by their names. Pace is the slope of the count over time: a program that launches in
bursts is off by a part of a burst then, not by all of one.
"""

from __future__ import annotations

import itertools
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
"""Of the launches before, that must be of kinds which the other time has, too."""
SETTLED: Final = 0.2
"""Part of a trace at its begin that is left out: the program stands still while CUPTI is switched
on."""
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
    return _slowdown(before, during)


def afterwards(before: Sequence[CountedLaunch], after: Sequence[CountedLaunch]) -> Slowdown | None:
    """How much slower than `before` the program was later; None where that is not known."""
    return _slowdown(before, after)


def _slowdown(before: Sequence[CountedLaunch], later: Sequence[CountedLaunch]) -> Slowdown | None:
    common = {_key(one) for one in before} & {_key(one) for one in later}
    usual = [one for one in before if _key(one) in common]
    if not usual or sum(one.weight for one in usual) < LEAST_COMMON * sum(
        one.weight for one in before
    ):
        return None
    paces = [_pace(usual), _pace([one for one in later if _key(one) in common])]
    if paces[0] is None or paces[1] is None:
        return None
    (was, was_error), (now, now_error) = paces[0], paces[1]
    ratio = was / now
    error = float(np.hypot(was_error / was, now_error / now))
    return Slowdown(ratio - 1, ratio * student_t_quantile(0.975, PARTS - 1) * error)


def _key(launch: CountedLaunch) -> str:
    return launch.what[:_COMPARED]


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


def _slope(at: F64, count: NDArray[np.float64]) -> float:
    """Of a straight line through the counts, by the time they were reached."""
    away = at - at.mean()
    square = float((away**2).sum())
    return float((away * count).sum()) / square if square else 0.0
