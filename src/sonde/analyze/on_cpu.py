# SPDX-License-Identifier: Apache-2.0
"""What a thread of a traced process did on a CPU between its calls, by a capture beside the trace.

A trace has no function of the program. The samples of the capture are summed up over longer times
than a stall, so they give parts of the whole record, not of one stall.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from sonde.model.causes import Cause
from sonde.model.timeline import Activity, Timeline, TotalKind

_CODE: Final[Mapping[Activity, Cause]] = {
    Activity.SPIN: Cause.SPIN,
    Activity.CODE: Cause.HOST,
    Activity.PAGE_FAULT: Cause.PAGE_FAULT,
    Activity.FILE: Cause.IO,
    Activity.INPUT: Cause.INPUT,
    Activity.BUILD: Cause.BUILD,
}
"""Activities that no call of the trace shows."""
_LEAST: Final = 10
"""Fewer samples show no parts."""


def on_cpu(timeline: Timeline, track: int) -> dict[Cause, float]:
    """By cause, its part of the thread's time on a CPU outside of device calls and of the launch
    path; what they leave of 1 is other code. Empty where no capture shows it."""
    capture = timeline.beside
    if capture is None:
        return {}
    thread = timeline.tracks[track]
    ns: dict[Cause, int] = defaultdict(int)
    samples = 0
    for one in capture.totals:
        here = capture.tracks[one.track]
        if one.kind != TotalKind.SAMPLED or (here.pid, here.number) != (thread.pid, thread.number):
            continue
        cause = _CODE.get(Activity(one.name))
        if cause is not None:
            ns[cause] += one.ns
            samples += one.samples
    whole = sum(ns.values())
    if samples < _LEAST or not whole:
        return {}
    return {cause: part / whole for cause, part in ns.items() if cause != Cause.HOST and part}
