# SPDX-License-Identifier: Apache-2.0
"""Device time by the function that launched the work: the innermost Python function; in a stack
without Python the innermost function outside of device API libraries, which may be one of a library
of kernels such as cuBLAS.

The share R = Y / T of a function is a ratio of two estimates from the same sample, each run of
which was sampled with probability 1 / weight. Its variance is that of the sum of
weight * d * ([launched by the function] - R), divided by T * T (Taylor linearisation;
Sarndal, Swensson, Wretman, Model Assisted Survey Sampling, 1992, section 5.6).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from sonde.model.answers import DeviceCaller
from sonde.model.code import HIDDEN, Frame, Stacks
from sonde.query.device_runs import NORMAL_95
from sonde.query.own_frames import own_frame
from sonde.query.queries import EVERYTHING, Where
from sonde.query.session import Session

K = TypeVar("K", bound=Hashable)

DEVICE_LIBRARIES = ("libcuda.", "libcudart", "libOpenCL", "libpocl", "libamdhip", "libze_")
"""Device API libraries, by the beginning of their file names: never reported as the caller."""


@dataclass(slots=True)
class _Sum:
    """Of the runs that one function launched; d is the duration of a timed run in ns."""

    timed: int = 0
    count: float = 0.0
    ns: float = 0.0
    variance: float = 0.0
    """Sum of weight * (weight - 1) * d * d: the variance of `ns`."""


def device_callers(session: Session, where: Where = EVERYTHING) -> list[DeviceCaller]:
    """Device time by process and calling function, longest first; without host waits."""
    clause, parameters = where.sql("kind <> 'sync'")
    # `Where` filters by `time_ns`, which rows of `device_run` do not have.
    clause = clause.replace("time_ns", "start_time_ns")
    rows = session.rows(
        "WITH run AS (SELECT process, stack, weight AS w,"
        f" CAST(end_time_ns - start_time_ns AS DOUBLE) AS d FROM device_run {clause}) "
        "SELECT process, stack, count(*), sum(w), sum(w * d), sum(w * (w - 1) * d * d) "
        "FROM run GROUP BY process, stack",
        parameters,
    )
    sums: dict[tuple[int, str, str, str], _Sum] = defaultdict(_Sum)
    known: dict[int, tuple[str, str, str]] = {}
    for process, stack, timed, count, ns, variance in rows:
        if stack not in known:
            known[stack] = _caller_key(caller(session.stacks, stack))
        it = sums[process, *known[stack]]
        it.timed += timed
        it.count += count
        it.ns += ns
        it.variance += variance
    shares = shares_of({key: (it.ns, it.variance) for key, it in sums.items()})
    found = []
    for key, it in sums.items():
        process, function, file, binary = key
        share, error = shares[key]
        found.append(
            DeviceCaller(
                process=session.processes[process],
                function=function,
                file=file,
                binary=binary,
                timed=it.timed,
                count=round(it.count),
                ns=round(it.ns),
                share=share,
                share_error=error,
            )
        )
    return sorted(found, key=lambda it: (-it.ns, it.process.pid, it.function, it.file))


def shares_of(sums: Mapping[K, tuple[float, float]]) -> dict[K, tuple[float, float]]:
    """By key: (its share of the total, half the width of the share's 95 % confidence interval).

    `sums`: (sum of weight * d, sum of weight * (weight - 1) * d * d), with durations d in ns.
    """
    all_ns = sum(ns for ns, _ in sums.values()) or 1.0
    all_variance = sum(variance for _, variance in sums.values())
    found = {}
    for key, (ns, variance) in sums.items():
        share = ns / all_ns
        of_share = (1 - 2 * share) * variance + share * share * all_variance
        found[key] = share, NORMAL_95 * max(of_share, 0.0) ** 0.5 / all_ns
    return found


def caller(stacks: Stacks, stack: int) -> Frame | None:
    """The innermost Python function; else the innermost function outside device API libraries; else
    the own frame (`own_frame`); `HIDDEN` where a report leaves out all frames."""
    frames = [stacks.frames[i] for i in stacks.indices(stack)]
    if frames == [HIDDEN]:
        return HIDDEN
    python = next((frame for frame in frames if frame.kind == "python"), None)
    if python:
        return python
    outside = (
        frame
        for frame in frames
        if frame.kind == "user" and frame.function and not frame.binary.startswith(DEVICE_LIBRARIES)
    )
    return next(outside, None) or own_frame(stacks, stack)


def _caller_key(frame: Frame | None) -> tuple[str, str, str]:
    return (frame.name, frame.file, frame.binary) if frame else ("", "", "")
