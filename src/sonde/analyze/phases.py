# SPDX-License-Identifier: Apache-2.0
"""Phases of the work: its steps, and longer stretches of other work before, between and after them.

A stretch between two steps is a phase if it takes `SHARE` of the time and `STEPS` times the step
length: an evaluation, a checkpoint, a warm-up. Shorter stretches belong to the steps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sonde.analyze import intervals as sets
from sonde.analyze.blamed_stalls import BlamedStalls
from sonde.analyze.causes import CAUSES
from sonde.analyze.intervals import Coverage, Intervals
from sonde.analyze.kernels import classes_of
from sonde.model.causes import CauseDetail, PhaseName
from sonde.model.timeline import Timeline
from sonde.model.verdict import BoundShare, CauseShare, KernelClassShare, Phase, StepTable

SHARE = 0.05
"""Of the traced time."""
STEPS = 3
"""Times the median step."""
MOST = 6
"""At most this many phases beside the steps: the longest."""

Judge = Callable[[list[CauseShare], list[KernelClassShare], float], list[BoundShare]]
"""Returns the bounds for causes, kernel classes, and the share of computing time."""


def phases_of(
    timeline: Timeline, blamed: BlamedStalls, steps: StepTable | None, judge: Judge
) -> list[Phase]:
    """The phases in the order of time; none without other work than the steps."""
    stalls = blamed.stalls
    if steps is None or not steps.count or not len(stalls.window):
        return []
    begin, end = int(stalls.window.start[0]), int(stalls.window.end[-1])
    least = max(SHARE * (end - begin), STEPS * steps.median_ns)
    first = steps.start_ns[0]
    last = steps.start_ns[-1] + steps.duration_ns[-1]
    stretches = [(PhaseName.BEFORE, begin, first)] if first - begin >= least else []
    for start, length, like in zip(steps.start_ns, steps.duration_ns, steps.like, strict=True):
        # Also an unusual piece begins with a step.
        if not like and length - steps.median_ns >= least:
            stretches.append((PhaseName.BETWEEN, start + steps.median_ns, start + length))
    if end - last >= least + steps.median_ns:
        stretches.append((PhaseName.AFTER, last + steps.median_ns, end))
    if not stretches:
        return []
    stretches = sorted(sorted(stretches, key=lambda one: one[1] - one[2])[:MOST])
    stretches.sort(key=lambda one: one[1])
    others = Intervals(
        np.array([one[1] for one in stretches], np.int64),
        np.array([one[2] for one in stretches], np.int64),
    )
    usual = sets.subtract(stalls.window, others)
    classes = classes_of(timeline, stalls)
    found = [_phase(blamed, PhaseName.STEPS, usual, classes, judge)]
    for name, start, stop in stretches:
        part = Intervals(np.array([start], np.int64), np.array([stop], np.int64))
        found.append(_phase(blamed, name, sets.intersect(stalls.window, part), classes, judge))
    return sorted((one for one in found if one.window_ns), key=lambda one: one.start_ns)


def _phase(
    blamed: BlamedStalls,
    name: PhaseName,
    part: Intervals,
    classes: list[KernelClassShare],
    judge: Judge,
) -> Phase:
    stalls = blamed.stalls
    window = part.total
    within = Coverage(part).within(stalls.start, stalls.end)
    ns = np.bincount(blamed.cause, within, len(CAUSES))
    causes = [
        CauseShare(cause, cause.description, cause.bound, CauseDetail.NONE, int(ns[code]),
                   float(ns[code] / max(1, window)), 0, 0, "", (), ())
        for code, cause in enumerate(CAUSES) if ns[code]
    ]  # fmt: skip
    computing = Coverage(stalls.computing).within(part.start, part.end).sum() / max(1, window)
    return Phase(
        name=name,
        start_ns=int(part.start[0]) if len(part) else 0,
        end_ns=int(part.end[-1]) if len(part) else 0,
        window_ns=window,
        computing=float(computing),
        bounds=judge(causes, classes, float(computing)),
    )
