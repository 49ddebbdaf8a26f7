# SPDX-License-Identifier: Apache-2.0
"""Shares of the time of what a device ran, with 95 % intervals, from runs that were timed singly.

Of each block of launches of a thread and kind one run is chosen at random and stands for the block:
the count of launches is known, and the error comes from how runs of a block differ. As one of each
block is chosen, that is estimated from neighbouring blocks (successive differences:
Wolter, Introduction to Variance Estimation, 2nd ed., section 8.2), which is too much rather than
too little where blocks themselves differ. Of copies the bytes are known, timed or not, so their
time follows from the speed of the timed ones (ratio estimate: Cochran, Sampling Techniques, 3rd
ed., section 6.4).

What timing adds to each run or leaves out (`sonde.analyze.timing_error`) is in no variance; its
bounds widen the interval. So does what is not known of streams: kernels of several may overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from sonde.analyze.timing_error import bounds_ns
from sonde.model.collectives import is_collective
from sonde.model.confidence import student_t_quantile
from sonde.model.single_runs import SingleRuns
from sonde.model.timeline import F64, CallKind, CopyDirection, Mask, Total, TotalKind
from sonde.model.verdict import DeviceShare

TOP = 5
"""At most this many kernels get a share, those with the most time."""
LEAST = 0.0005
"""Smaller shares are left out."""
_KERNELS = (CallKind.LAUNCH, CallKind.GRAPH_LAUNCH)
_student = cache(student_t_quantile)


@dataclass(frozen=True, slots=True)
class _Sum:
    """An estimated sum over runs. All in ns, but `timed`."""

    ns: float
    sampling: float
    """Half width of the 95 % interval of sampling."""
    less: float
    more: float
    """By how much the truth may be less or more because of how runs are timed."""
    timed: int
    """Runs that were timed."""

    def scaled(self, factor: float) -> _Sum:
        """The same of `factor` times the runs."""
        ns, sampling, less, more = (
            one * factor for one in (self.ns, self.sampling, self.less, self.more)
        )
        return _Sum(ns, sampling, less, more, self.timed)

    def share(self, kind: str, name: str, whole_ns: float) -> DeviceShare:
        """As a share of `whole_ns`, with what sampling and timing leave open."""
        share, sampling = self.ns / whole_ns, self.sampling / whole_ns
        less, more = self.less / whole_ns, self.more / whole_ns
        low, high = max(0.0, share - less - sampling), share + more + sampling
        return DeviceShare(kind, name, share, low, high, sampling, less, more, self.timed)


def device_shares(
    runs: SingleRuns,
    names: Sequence[str],
    calls: Sequence[Total],
    window_ns: int,
    timed_ns: int,
    reported: float | None = None,
) -> list[DeviceShare]:
    """What a device did for one process: all kernels, the largest ones, copies by direction, sets.

    `runs`: of the process; `names`: those that `runs.name` numbers; `calls`: totals of the
    process's threads, of which those of copies are read; `window_ns`: the time of `calls`;
    `timed_ns`: the time in which runs were timed; `reported`: share of the time with kernels of the
    process by its driver, an upper limit. Empty without runs.
    """
    if not len(runs):
        return []
    collective = np.array([is_collective(name) for name in names] or [False])[runs.name]
    kernels = np.isin(runs.call, _KERNELS) & ~collective
    has_one_stream = len(np.unique(runs.stream)) == 1
    computing = _computing(runs, kernels, timed_ns, reported)
    found = _largest(runs, names, np.isin(runs.call, _KERNELS), timed_ns)
    for direction in np.unique(runs.direction[runs.call == CallKind.COPY]).tolist():
        found.append(_copies(runs, CopyDirection(direction), calls, window_ns, timed_ns))
    sets = runs.call == CallKind.SET
    if sets.any():
        found.append(_total(runs, sets).share("set", "", timed_ns))
    if has_one_stream:
        found = [_beside(one, computing) for one in found]
    return [computing, *(one for one in found if one.share >= LEAST)]


def _computing(
    runs: SingleRuns, kernels: Mask, timed_ns: int, reported: float | None
) -> DeviceShare:
    """The share of the time with a kernel running: at least that of the stream with the most, at
    most the sum over streams."""
    whole = _total(runs, kernels).share("computing", "", timed_ns)
    streams = np.unique(runs.stream[kernels]).tolist()
    low = whole.low
    if len(streams) > 1:
        each = [_total(runs, kernels & (runs.stream == one)) for one in streams]
        low = max(one.share("computing", "", timed_ns).low for one in each)
    share = min(1.0, whole.share if reported is None else min(whole.share, reported))
    low = min(low, max(0.0, share - whole.less - whole.sampling))
    return replace(whole, share=share, low=low, high=max(share, min(1.0, whole.high)))


def _largest(
    runs: SingleRuns, names: Sequence[str], kernels: Mask, timed_ns: int
) -> list[DeviceShare]:
    """The shares of the kernels with the most time, overlapping ones each."""
    weighted = np.bincount(runs.name[kernels], (runs.weight * runs.length_ns)[kernels])
    ranked = np.argsort(-weighted, kind="stable")[:TOP].tolist()
    return [
        _total(runs, kernels & (runs.name == name)).share("kernel", names[name], timed_ns)
        for name in ranked
        if weighted[name] > 0
    ]


def _copies(
    runs: SingleRuns,
    direction: CopyDirection,
    calls: Sequence[Total],
    window_ns: int,
    timed_ns: int,
) -> DeviceShare:
    """The share of the time with copies of a direction.

    Calls may count copies within a device otherwise than runs do, so these follow from the runs
    alone.
    """
    mine = (runs.call == CallKind.COPY) & (runs.direction == direction)
    asked = [
        one
        for one in calls
        if one.kind == TotalKind.CALL and one.call == CallKind.COPY and one.direction == direction
    ]
    count = sum(one.count for one in asked)
    call_ns = sum(one.ns for one in asked) / count if count else np.inf
    asked_bytes = sum(one.bytes for one in asked)
    name = direction.name.lower()
    if not asked_bytes or not runs.bytes[mine].any() or direction == CopyDirection.D2D:
        return _total(runs, mine, call_ns).share("copy", name, timed_ns)
    weight, moved = runs.weight[mine], runs.bytes[mine].astype(np.float64)
    ns = runs.length_ns[mine].astype(np.float64)
    speed = (weight * ns).sum() / (weight * moved).sum()
    timed, rest = len(ns), weight * (ns - speed * moved)
    spread = float(np.sqrt(timed / (timed - 1) * (rest**2).sum())) if timed > 1 else np.inf
    half = min(float((weight * ns).sum()), _quantile(timed) * spread)
    factor = asked_bytes / float((weight * moved).sum())
    estimate = _sum(runs, mine, half, call_ns).scaled(factor)
    return estimate.share("copy", name, window_ns)


def _beside(one: DeviceShare, computing: DeviceShare) -> DeviceShare:
    """A share of a device with one stream, on which nothing overlaps."""
    most = 1.0 if one.kind == "kernel" else 1.0 - computing.low
    share = min(one.share, most if one.kind == "kernel" else max(0.0, 1.0 - computing.share))
    return replace(one, share=share, low=min(one.low, share), high=max(share, min(one.high, most)))


def _total(runs: SingleRuns, mine: Mask, call_ns: float = np.inf) -> _Sum:
    """The sum of the chosen runs, over threads and kinds of launches.

    `mine`: a mask of rows; `call_ns`: the mean time of the calls that asked for copies.
    """
    variance = 0.0
    number = runs.track.astype(np.int64) << 8 | runs.call
    for sequence in np.unique(number[mine]).tolist():
        rows = number == sequence
        length = np.where(mine[rows], runs.length_ns[rows], 0).astype(np.float64)
        variance += variance_of_sum(length, runs.weight[rows])
    sampling = _quantile(int(mine.sum())) * float(np.sqrt(variance))
    return _sum(runs, mine, sampling, call_ns)


def _sum(runs: SingleRuns, mine: Mask, sampling: float, call_ns: float) -> _Sum:
    """The same with a known error of sampling."""
    weight, length = runs.weight[mine], runs.length_ns[mine].astype(np.float64)
    less = more = 0.0
    for kind in np.unique(runs.call[mine]).tolist():
        rows = runs.call[mine] == kind
        known = call_ns if kind == CallKind.COPY else 0.0
        of_each = bounds_ns(CallKind(kind), length[rows], known)
        less += float((weight[rows] * of_each[0]).sum())
        more += float((weight[rows] * of_each[1]).sum())
    return _Sum(float((weight * length).sum()), sampling, less, more, len(length))


def variance_of_sum(value: F64, weight: F64) -> float:
    """The variance of sum(value * weight), where each row was chosen from a block of `weight`.

    Rows are in order of time, one for each block; a row that is not of what is summed has the value
    0. The first and the last block may lie half outside, by their own lengths: the first ones are
    as long as a guess of the rate makes them.
    """
    count = len(value)
    if not count:
        return 0.0
    whole = float(weight.sum())
    mean = float((value * weight).sum()) / max(whole, 1e-9)
    at_ends = float(weight[0] ** 2 + weight[-1] ** 2) / 2 * mean**2
    if count == 1:
        return float((weight[0] * value[0]) ** 2)
    # Of a block of one, all is known.
    open_part = np.sqrt(np.maximum(0.0, 1 - 1 / np.maximum(weight, 1.0)))
    rest = weight * open_part * (value - mean)
    return float((np.diff(rest) ** 2).sum()) * count / (2 * (count - 1)) + at_ends


def _quantile(timed: int) -> float:
    """97.5 % quantile of Student's t for a sum over this many timed runs; from 200 on it hardly
    changes."""
    return _student(0.975, max(1, min(timed, 200) - 1))
