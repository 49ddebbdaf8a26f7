# SPDX-License-Identifier: Apache-2.0
"""How much a device's clocks were held down while it computed, by its own counters.

What a device lost is the time that it computed with clocks held down, times the share of its
highest clock that was missing. Idle clocks are low for another reason: only what its driver says
it throttles counts. Kernels that stream through memory lose less; those of a known kind are told.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sonde.analyze.idle import Stalls
from sonde.analyze.intervals import Coverage
from sonde.model.timeline import F64, I64, Counter, Timeline

CLOCK, LIMIT, THROTTLED = "sonde.gpu.clock", "sonde.gpu.clock.limit", "sonde.gpu.throttled"
MOST_REASONS = 32
"""Drivers know some ten."""
_HEAT = ("thermal", "hardware_slowdown")


@dataclass(frozen=True, slots=True)
class Throttling:
    """Of one device, over its traced time."""

    share: float
    """Of the traced time in which clocks were held down."""
    lost: float
    """Of the traced time, by the clock that was missing while it computed."""
    reason: str
    """The one that lasted longest."""
    clock_hz: float
    """While held down, mean."""
    highest_hz: float

    @property
    def kind(self) -> str:
        """heat | power"""
        return "heat" if any(word in self.reason for word in _HEAT) else "power"


def throttling_of(timeline: Timeline, stalls: Stalls) -> Throttling | None:
    """None where nothing tells, or nothing was held down."""
    mine = [one for one in timeline.counters if one.device == stalls.device and len(one.time_ns)]
    flags = [one for one in mine if one.name == THROTTLED][:MOST_REASONS]
    clocks = [one for one in mine if (one.name, one.which) == (CLOCK, "sm")]
    limits = [one for one in mine if (one.name, one.which) == (LIMIT, "sm")]
    if not flags or not clocks or not len(stalls.window):
        return None
    begin, end = int(stalls.window.start[0]), int(stalls.window.end[-1])
    edges = np.unique(np.concatenate([[begin, end], *(one.time_ns for one in (*flags, *clocks))]))
    edges = edges[(edges >= begin) & (edges <= end)]
    since, until = edges[:-1], edges[1:]
    traced = Coverage(stalls.window).within(since, until)
    computed = Coverage(stalls.computing).within(since, until)
    held = {one.which: _at(one, since) > 0 for one in flags}
    down = np.logical_or.reduce([*held.values()])
    clock = _at(clocks[0], since)
    highest = float(max(one.value.max() for one in (limits or clocks)))
    whole = int(traced[down].sum())
    if not whole or highest <= 0:
        return None
    missing = np.clip(1 - clock / highest, 0, 1)
    reason = max(held, key=lambda which: int(traced[held[which]].sum()))
    return Throttling(
        share=whole / stalls.window_ns,
        lost=float((missing * computed)[down].sum() / stalls.window_ns),
        reason=reason,
        clock_hz=float((clock * traced)[down].sum() / whole),
        highest_hz=highest,
    )


def _at(counter: Counter, times: I64) -> F64:
    """The last value before each time; the first one before that."""
    row = np.maximum(np.searchsorted(counter.time_ns, times, "right") - 1, 0)
    values: F64 = counter.value[row]
    return values
