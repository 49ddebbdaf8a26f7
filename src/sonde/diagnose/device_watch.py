# SPDX-License-Identifier: Apache-2.0
"""The series that calls of devices show of one process, tick by tick: each compares with the ticks
before."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from sonde.diagnose import device_calls
from sonde.diagnose.device_calls import Function, Rate
from sonde.diagnose.moments import ProcessMoment
from sonde.diagnose.series import Series

TICKS = 60
"""That are compared with."""
LEAST_TICKS = 8
"""Fewer show nothing."""
USUAL_EVERY = 4
"""Ticks after which what is usual is found out again."""
SKIPPED = 2
"""The last ticks, which are not part of what is usual."""
SETTLED_TICKS = 16
"""Ticks with calls after which a process has begun, though none of its calls come steadily."""
IDLE_TICKS = 8
"""Ticks without calls after which one that was about to begin is idle."""


class DeviceWatch:
    """One process."""

    def __init__(self) -> None:
        self._ticks: deque[dict[Function, Rate]] = deque(maxlen=TICKS)
        self._age = 0
        self._clocks: dict[Function, float] = {}
        """Usual calls a second of those that come steadily."""
        self._each_s: dict[Function, float] = {}
        """How long one call usually takes."""
        self._waits = 0.0
        """Usual waits for a device a second."""
        self._idle = 0
        """Ticks since the last call."""
        self.is_settling = False
        """It has begun to call devices, and what is usual is not known yet: it loads its model,
        compiles, runs its first steps. What it did before is nothing to compare with."""

    def take(self, one: ProcessMoment, seconds: float) -> dict[Series, float]:
        """Take in a tick; returns its values, none of a process that calls no device."""
        self._idle = 0 if one.calls else self._idle + 1
        if not any(self._ticks) or (self.is_settling and self._idle >= IDLE_TICKS):
            self._ticks.clear()
            self._age, self._clocks = 0, {}
            self.is_settling = bool(one.calls)
            if not one.calls:
                return dict.fromkeys(OF_DEVICES, 0.0)
        now: dict[Function, Rate] = {}
        for function, calls in device_calls.functions_of(one).items():
            now[function] = Rate(
                calls[0].op,
                sum(it.count for it in calls) / seconds,
                sum(it.ns for it in calls) / 1e9 / seconds,
            )
        if self._age % USUAL_EVERY == 0 and len(self._ticks) >= LEAST_TICKS:
            self._learn(list(self._ticks)[:-SKIPPED])
        self._age += 1
        self._ticks.append(now)
        if self._clocks or sum(map(bool, self._ticks)) >= SETTLED_TICKS:
            self.is_settling = False
        ratios = [now[it].count / usual if it in now else 0.0 for it, usual in self._clocks.items()]
        waits = device_calls.waits_for_device(now)
        return {
            Series.STEPS: max(0.0, 1.0 - min(ratios)) if ratios else 0.0,
            Series.CALLS: self._stretched_s(now),
            Series.BUILD: _seconds(now, device_calls.BUILDS),
            Series.MEMORY: _seconds(now, device_calls.MEMORY),
            Series.SYNCHRONIZATION: max(0.0, waits - 2 * self._waits) / 1000,
        }

    def _learn(self, ticks: Sequence[dict[Function, Rate]]) -> None:
        rates = [
            {it: rate.count for it, rate in tick.items() if rate.op in device_calls.OF_STEPS}
            for tick in ticks
        ]
        self._clocks = device_calls.steady(rates)
        each: dict[Function, list[float]] = {}
        for tick in ticks:
            for function, rate in tick.items():
                if rate.count and rate.op in device_calls.OF_STEPS:
                    each.setdefault(function, []).append(rate.each_s)
        self._each_s = {
            function: statistics.median(row)
            for function, row in each.items()
            if len(row) >= len(ticks) // 2
        }
        self._waits = statistics.median(device_calls.waits_for_device(tick) for tick in ticks)

    def _stretched_s(self, now: dict[Function, Rate]) -> float:
        return sum(
            max(0.0, rate.seconds - rate.count * self._each_s[function])
            for function, rate in now.items()
            if function in self._each_s and rate.seconds >= device_calls.LEAST_TIME
        )


OF_DEVICES = (*(Series.STEPS, Series.CALLS, Series.BUILD, Series.MEMORY, Series.SYNCHRONIZATION),)


def _seconds(of: dict[Function, Rate], ops: frozenset[str]) -> float:
    return sum(rate.seconds for rate in of.values() if rate.op in ops)
