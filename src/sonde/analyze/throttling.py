# SPDX-License-Identifier: Apache-2.0
"""How much time a device lost to throttled clocks while it computed, by its own counters.

The loss is the time in which the device computed with throttled clocks, times the missing share of
its highest clock. Clocks of an idle device are low for another reason, so only time that the driver
reports as throttled counts. Memory-bound kernels lose less than that: where they are the
bound, `sonde.analyze.bound` does not put the clocks in their place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sonde.analyze.intervals import Coverage
from sonde.analyze.stalls import Stalls
from sonde.model.causes import CauseDetail
from sonde.model.timeline import F64, I64, Counter, Timeline

CLOCK, LIMIT, THROTTLED = "sonde.gpu.clock", "sonde.gpu.clock.limit", "sonde.gpu.throttled"
MAX_REASONS = 32
"""At most this many reasons are compared; drivers report about ten."""
_HARDWARE_SLOWDOWN = "hardware_slowdown"
"""NVML's bit for heat, the power brake or the fast power trigger; the last has no separate bit."""
_SPECIFIC = ("hardware_thermal", "hardware_power_brake")
"""The separate bits of the first two, on drivers that have them."""
_NO_THROTTLING = frozenset(
    ("sync_boost", "display_clock", "application_clocks", "gpu_idle", "idle", "none")
)
"""The driver's reasons for a low clock that are no throttling: somebody set it, or nothing ran."""
_DETAILS = {
    "hardware_thermal": CauseDetail.TEMPERATURE,
    "software_thermal": CauseDetail.TEMPERATURE,
    "hardware_power_brake": CauseDetail.POWER_BRAKE,
    "software_power_cap": CauseDetail.POWER,
    "board_limit": CauseDetail.BOARD,
    "reliability": CauseDetail.BOARD,
    _HARDWARE_SLOWDOWN: CauseDetail.HARDWARE,
}
"""Any other reason is `CauseDetail.OTHER_LIMIT`."""


@dataclass(frozen=True, slots=True)
class Throttling:
    """Throttling of one device over its traced time."""

    share: float
    """Share of the traced time with throttled clocks."""
    lost: float
    """Share of the traced time that was lost, at most."""
    reason: str
    """The driver's reason that lasted longest."""
    clock_hz: float
    """Mean clock while throttled."""
    highest_hz: float

    @property
    def detail(self) -> CauseDetail:
        """What held the clocks down: temperature, the power limit, the power brake, a limit of the
        board, or a limit of the hardware that the driver does not specify; OTHER_LIMIT for a reason
        that has no name here."""
        return _DETAILS.get(self.reason, CauseDetail.OTHER_LIMIT)


def throttling_of(timeline: Timeline, stalls: Stalls) -> Throttling | None:
    """Throttling of a device; None without counters, or without throttling."""
    mine = [one for one in timeline.counters if one.device == stalls.device and len(one.time_ns)]
    flags = [one for one in mine if one.name == THROTTLED and one.which not in _NO_THROTTLING]
    flags = flags[:MAX_REASONS]
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
    flagged = {one.which: _at(one, since) > 0 for one in flags}
    down = np.logical_or.reduce([*flagged.values()])
    clock = _at(clocks[0], since)
    highest = float(max(one.value.max() for one in (limits or clocks)))
    whole = int(traced[down].sum())
    if not whole or highest <= 0:
        return None
    missing = np.clip(1 - clock / highest, 0, 1)
    specific = [flagged[one] for one in _SPECIFIC if one in flagged]
    if _HARDWARE_SLOWDOWN in flagged and specific:
        flagged[_HARDWARE_SLOWDOWN] &= ~np.logical_or.reduce(specific)
    reason = max(flagged, key=lambda which: int(traced[flagged[which]].sum()))
    return Throttling(
        share=whole / stalls.window_ns,
        lost=float((missing * computed)[down].sum() / stalls.window_ns),
        reason=reason,
        clock_hz=float((clock * traced)[down].sum() / whole),
        highest_hz=highest,
    )


def _at(counter: Counter, times: I64) -> F64:
    """The last value of a counter up to each time; its first value before that."""
    row = np.maximum(np.searchsorted(counter.time_ns, times, "right") - 1, 0)
    values: F64 = counter.value[row]
    return values
