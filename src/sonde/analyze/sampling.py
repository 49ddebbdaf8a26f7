# SPDX-License-Identifier: Apache-2.0
"""Confidence intervals of a verdict from sampled windows, and what windows cannot show.

A share is the ratio of two sums over windows; its interval comes from how windows differ (Cochran,
Sampling Techniques, 3rd ed., section 6.4), with Student's quantile, as windows are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from sonde.analyze.blamed_stalls import BlamedStalls
from sonde.analyze.causes import CAUSES
from sonde.analyze.intervals import Coverage, Intervals
from sonde.model.confidence import student_t_quantile
from sonde.model.timeline import I64, Timeline
from sonde.model.verdict import BoundShare, Sampling, StepTable

TRACED_ALL = 0.95
"""From this share of traced time on, a record counts as traced all the time."""
_student = cache(student_t_quantile)


def sampling_of(
    timeline: Timeline, blamed: BlamedStalls, bounds: Sequence[BoundShare], steps: StepTable | None
) -> Sampling | None:
    """The sampling error of the verdict; None where all of the time was traced."""
    stalls = blamed.stalls
    window = stalls.window
    extent = timeline.extent_ns
    whole = int(window.end[-1] - window.start[0]) if len(window) else 0
    if extent is not None and timeline.windows_ns:
        whole = max(whole, extent[1] - extent[0])
    if not len(window) or stalls.window_ns >= TRACED_ALL * whole:
        return None
    length = window.end - window.start
    computing = Coverage(stalls.computing).within(window.start, window.end)
    half = {"computing": half_width(computing, length)}
    for bound in bounds:
        ours = np.array([cause.bound == bound.key for cause in CAUSES])[blamed.cause]
        stalled = Intervals(stalls.start[ours], stalls.end[ours])
        if len(stalled):
            half[bound.key] = half_width(Coverage(stalled).within(window.start, window.end), length)
    return Sampling(
        windows=len(window),
        traced_ns=stalls.window_ns,
        whole_ns=whole,
        half_width=half,
        cannot=_cannot(timeline, window, whole, steps),
    )


def half_width(part: I64, length: I64) -> float:
    """Half width of the 95 % interval of sum(part) / sum(length) over windows; 1 for one window."""
    count = len(length)
    if count < 2:
        return 1.0
    rest = part - length * (part.sum() / length.sum())
    spread = float(np.sqrt(count / (count - 1) * (rest**2).sum()) / length.sum())
    return min(1.0, _student(0.975, count - 1) * spread)


def _cannot(
    timeline: Timeline, window: Intervals, whole: int, steps: StepTable | None
) -> list[str]:
    length = float(np.median(window.end - window.start)) / 1e6
    found = [
        f"what happens less often than every {whole / len(window) / 1e6:,.0f} ms may lie "
        "between the windows"
    ]
    if steps is None or steps.median_ns > 0.5e6 * length:
        found.append(f"steps longer than half a window ({length / 2:,.0f} ms) cannot be found")
    calls = timeline.calls
    asked = calls.correlation != 0
    # A record without launch times has a call for each run, with the time of the run. So if the
    # calls begin exactly when the runs do, launch times are not known.
    if asked.any() and np.array_equal(np.sort(calls.start_ns[asked]), timeline.device.start_ns):
        found.append(
            "launch times are not known, so launch overhead and host code are distinguished by the "
            "length of each stall"
        )
    return found
