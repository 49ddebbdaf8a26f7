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
RATE_ERROR = 0.08
"""Error of the count of replays in a second, of it."""
LEAST_REPLAYS = 5
"""Of fewer whole replays nothing is stated."""


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
    """Kernels within replays, those with the most time first.

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
    quantile = student_t_quantile(0.975, count - 1)
    found = []
    for name in np.unique(rows["name"]).tolist():
        mine = rows["name"] == name
        each = np.bincount(replay[mine], length[mine], len(calls))[whole]
        launches = np.bincount(replay[mine], minlength=len(calls))[whole]
        ns, spread = float(each.mean()), float(each.std(ddof=1)) / count**0.5
        share = ns * replays_per_s / 1e9
        half = share * RATE_ERROR + quantile * spread * replays_per_s / 1e9
        text = trace.names.get(name, "")
        found.append(ReplayKernel(text, float(launches.mean()), ns, share, half))
    return sorted(found, key=lambda one: -one.ns)


def _usual(kernels: I64, graph: I64) -> F64:
    """By replay, how many kernels replays of its graph have."""
    usual = np.zeros(len(kernels))
    for one in np.unique(graph).tolist():
        mine = graph == one
        usual[mine] = np.median(kernels[mine])
    return usual
