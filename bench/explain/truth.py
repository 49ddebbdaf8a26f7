# SPDX-License-Identifier: Apache-2.0
"""The truth about a run, from its raw trace and the program's own clock.

Nothing here is shared with Sonde: the trace is read as plain JSON, intervals are swept one by one,
and a step begins at the times that the program recorded. So mistakes in Sonde's readers, timelines
and steps show up in the comparison.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LEAST = 2


class NothingRanError(ValueError):
    """A trace holds nothing that a device did, so that nothing is known of the run."""


_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_TIMED = re.compile(r"explain/harness\.py\(\d+\): timed$")
_CLOCK = re.compile(r"perf_counter|time_ns|synchronize|append")
"""What the measuring loop calls besides the step."""


@dataclass(frozen=True)
class Truth:
    """Of the time from the first operation of a device to the end of the last."""

    idle: float
    """Share with neither kernel nor copy."""
    stalled: float
    """Share without a kernel."""
    begins_ns: np.ndarray
    """When the device began with each step of the program, on the trace's clock."""

    def step_ns(self, steps: int) -> float | None:
        """Mean length of the program's steps on the device; None unless all `steps` are known.

        From the first one's begin to the last one's: the ends of the loop are no part of a step.
        """
        if len(self.begins_ns) != steps or steps < LEAST:
            return None
        return float(self.begins_ns[-1] - self.begins_ns[0]) / (steps - 1)

    def step_error(self, begins_ns: Sequence[int], ends_ns: Sequence[int]) -> float | None:
        """How far the mean length of steps that were found is off that of the program's steps.

        Over the time that both have; in parts. None where that is less than two steps.
        """
        if len(self.begins_ns) < LEAST or not len(begins_ns):
            return None
        begin, end = np.array(begins_ns), np.array(ends_ns)
        both = (begin >= self.begins_ns[0]) & (end <= self.begins_ns[-1])
        if both.sum() < LEAST:
            return None
        begin, end = begin[both], end[both]
        number = np.arange(len(self.begins_ns))
        at = np.interp([begin[0], end[-1]], self.begins_ns, number)
        true_ns = float(end[-1] - begin[0]) / float(at[1] - at[0])
        return abs(float((end - begin).mean()) - true_ns) / true_ns

    def median_error(self, median_ns: float) -> float | None:
        """How far a usual length is off the median of the program's steps, in parts."""
        if len(self.begins_ns) < LEAST:
            return None
        true_ns = float(np.median(np.diff(self.begins_ns)))
        return abs(median_ns - true_ns) / true_ns


def of_trace(path: Path, stamps_ns: list[int] | None = None) -> Truth:
    """Read a trace. `stamps_ns`: when the program began each step and ended the last (time since
    1970); without, the calls of the measuring loop in the trace; none: no steps.

    Raises NothingRanError for a trace without an operation of a device.
    """
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        trace = json.load(file)
    events = [one for one in trace["traceEvents"] if one.get("ph") == "X"]
    ran = sorted(
        (
            one["ts"],
            one["ts"] + one.get("dur", 0),
            one["cat"] == "kernel",
            one.get("args", {}).get("correlation", 0),
        )
        for one in events
        if one.get("cat") in _ON_DEVICE and one["ts"] > 0
    )
    if not ran:
        raise NothingRanError(f"{path.parent.name}/{path.name} holds no operation of a device")
    whole_us = max(end for _, end, _, _ in ran) - ran[0][0]
    busy_us = _covered([(start, end) for start, end, _, _ in ran])
    computed_us = _covered([(start, end) for start, end, kernel, _ in ran if kernel])
    if stamps_ns is not None:
        base = int(trace.get("baseTimeNanoseconds") or 0)
        edges = [(stamp - base) / 1e3 for stamp in stamps_ns]
    else:
        edges = _steps_by_calls(events)[1:]  # a recording that was cut lacks a part of the first
    return Truth(1 - busy_us / whole_us, 1 - computed_us / whole_us, _begins(events, ran, edges))


def _covered(sorted_intervals: list[tuple[float, float]]) -> float:
    total, reach = 0.0, float("-inf")
    for start, end in sorted_intervals:
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


def _begins(
    events: list[dict[str, Any]], ran: list[tuple[float, float, bool, int]], edges: list[float]
) -> np.ndarray:
    """When the device began with what each step asked for."""
    asked = {
        one["args"]["correlation"]: one["ts"]
        for one in events
        if one.get("cat") in _CALLS and "correlation" in one.get("args", {})
    }
    first: dict[int, float] = {}
    for start, _, _, correlation in ran:
        if correlation in asked:
            step = int(np.searchsorted(edges, asked[correlation], "right")) - 1
            if 0 <= step < len(edges) - 1:
                first.setdefault(step, start)
    begins = [first[step] for step in sorted(first)]
    return np.maximum.accumulate(np.round(np.array(begins) * 1e3).astype(np.int64))


def _steps_by_calls(events: list[dict[str, Any]]) -> list[float]:
    """When the harness's loop called the step, and when the last one returned."""
    calls = [one for one in events if one.get("cat") == "python_function"]
    loop = max((one for one in calls if _TIMED.search(one["name"])), key=lambda one: one["dur"])
    end = loop["ts"] + loop["dur"]
    inside = sorted(
        (one["ts"], -one["dur"], one["name"])
        for one in calls
        if one["tid"] == loop["tid"] and one is not loop
        and one["ts"] >= loop["ts"] and one["ts"] + one["dur"] <= end
    )  # fmt: skip
    edges, reach = [], loop["ts"]
    for start, negative, name in inside:
        if start < reach:
            continue
        reach = start - negative
        if not _CLOCK.search(name):
            edges.append((start, reach))
    return [start for start, _ in edges] + [edges[-1][1]] if edges else []
