# SPDX-License-Identifier: Apache-2.0
"""Shares of the time of kernels within replayed graphs, from a trace and from how often the program
replayed before it.

A trace slows the program, and a launch-bound one most, so a kernel's share of the trace is not that
of the program without it. What a kernel takes in a replay is the same in both, and replays are
counted before the trace (`sonde.collect.tracing.Tracer.rates`): the product is the share.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sonde.model.confidence import student_t_quantile
from sonde.model.device_trace import DeviceTrace, Kind
from sonde.model.timeline import F64, I64

MOST_LEFT_OUT = 0.05
"""Replays that are not whole in a trace, of all: if more are, nothing is stated of them."""
RATE_ERROR = 0.02
"""Error of the count of replays in a second, of it."""
LEAST_REPLAYS = 5
"""Of fewer whole replays nothing is stated."""
MOST_KERNELS = 10_000
"""Kernels that are listed one by one; the others are one row."""


@dataclass(frozen=True, slots=True)
class ReplayKernel:
    """A kernel within replays."""

    name: str
    launches: float
    """In a replay; the mean over all graphs that were replayed."""
    ns: float
    """In a replay, all its launches together."""
    share: float
    """Of the time, before the trace."""
    half_width: float
    """Of its 95 % interval: how replays differ, and how well they are counted."""


def replay_kernels(trace: DeviceTrace, replays_per_s: float) -> list[ReplayKernel]:
    """Kernels within replays, those with the most time first; beyond MOST_KERNELS one row more, of
    all the others together, whose interval is the sum of theirs.

    Raises ValueError with the reason where a trace does not show them.
    """
    rows = trace.of(Kind.KERNEL)
    rows = rows[rows["graph"] > 0]
    if not len(rows):
        raise ValueError("no kernel of a replayed graph is in the trace")
    if not replays_per_s:
        raise ValueError("no replay was seen in the second before the trace")
    calls, replay = np.unique(rows["correlation"], return_inverse=True)
    kernels = np.bincount(replay)
    graph = np.zeros(len(calls), np.int64)
    graph[replay] = rows["graph"]
    whole = kernels >= _usual(kernels, graph)
    count = int(whole.sum())
    if count < LEAST_REPLAYS:
        raise ValueError(f"the trace has {count} whole replays; make it longer")
    if count < (1 - MOST_LEFT_OUT) * len(calls):
        raise ValueError(f"of {len(calls)} replays in the trace only {count} are whole")
    length = (rows["end_ns"] - rows["start_ns"]).astype(np.float64)
    # A row for each kernel and replay that has it: the other replays count as 0. A program may give
    # every launch another name, so nothing here is done by name over all rows.
    names, number = np.unique(rows["name"], return_inverse=True)
    pairs, pair = np.unique(number * len(calls) + replay, return_inverse=True)
    kept = whole[pairs % len(calls)]
    kernel = (pairs // len(calls))[kept]
    each = np.bincount(pair, length)[kept]
    mean_ns = np.bincount(kernel, each, len(names)) / count
    launches = np.bincount(kernel, np.bincount(pair)[kept], len(names)) / count
    absent = count - np.bincount(kernel, minlength=len(names))
    squares = np.bincount(kernel, (each - mean_ns[kernel]) ** 2, len(names)) + absent * mean_ns**2
    spread = np.sqrt(squares / (count - 1) / count)
    share = mean_ns * replays_per_s / 1e9
    quantile = student_t_quantile(0.975, count - 1)
    half = share * RATE_ERROR + quantile * spread * replays_per_s / 1e9
    order = np.argsort(-mean_ns, kind="stable")
    most, rest = order[:MOST_KERNELS], order[MOST_KERNELS:]
    columns = (launches, mean_ns, share, half)
    rows_of = zip(names[most].tolist(), *(it[most].tolist() for it in columns), strict=True)
    found = [ReplayKernel(trace.names.get(name, ""), *numbers) for name, *numbers in rows_of]
    if len(rest):
        others = f"{len(rest):,} other kernels"
        found.append(ReplayKernel(others, *(float(it[rest].sum()) for it in columns)))
    return found


def _usual(kernels: I64, graph: I64) -> F64:
    """By replay, how many kernels replays of its graph have: the median."""
    _, which, many = np.unique(graph, return_inverse=True, return_counts=True)
    sizes = kernels[np.lexsort((kernels, graph))]
    first = np.cumsum(many) - many
    median: F64 = (sizes[first + (many - 1) // 2] + sizes[first + many // 2]) / 2
    return median[which]
