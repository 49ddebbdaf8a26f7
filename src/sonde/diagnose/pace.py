# SPDX-License-Identifier: Apache-2.0
"""Whether a job makes progress, by what its ranks do in each tick.

A rank that waits or sleeps uses no CPU, switches threads no more, and calls its device no more. If
one rank no longer does what it did all the time, the job pauses, unless calls of devices show that
work goes on: those of any rank, even where another has ended. A rank without a row in a tick did
nothing, as far as is known. A pause becomes a stall once it is long beside earlier ones.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from typing import Final

from sonde.diagnose.moments import Moment, ProcessMoment

LEAST_S: Final = 2.0
"""A pause is looked into from then on."""
OF_LONGEST: Final = 1.5
"""And only if it is this many times as long as the longest one before."""
MAX_S: Final = 30.0
"""A pause this long is looked into however long earlier ones were."""
PAUSE_S: Final = 0.5
"""Shorter pauses do not count."""
TICKS: Final = 64
"""Ticks of progress that a series' usual value is the median of."""
LEAST_TICKS: Final = 16
"""Fewer ticks of progress give no usual value."""
FELL_TO: Final = 0.15
"""A series that fell to this part of its usual value has stopped."""
RESUMED: Final = 2
"""Ticks in a row in which it goes on, after which a pause is over."""
FLOORS: Final = {"cpu": 0.05, "switches": 10.0, "calls": 10.0}
"""Least usual values a second, in CPUs, voluntary switches, and calls: lower ones show nothing."""
SYMPTOMS: Final = {"cpu": "CPU time", "switches": "waits", "calls": "calls of its device"}
CALLS: Final = "calls"


class JobPace:
    """The progress of one job."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._past = {pid: {name: deque[float](maxlen=TICKS) for name in FLOORS} for pid in pids}
        self._guests: set[int] = set()
        """Further ranks, that show nothing of its progress."""
        self._quiet_ns = 0
        """When it stopped; 0: it goes on."""
        self._resumed = 0
        self._resumed_ns = 0
        self._used: dict[int, list[float]] = {}
        """CPU time (s) and bytes of each rank since it stopped."""
        self.longest_pause_s = 0.0
        self.symptoms: dict[int, str] = {}
        """What each rank does no longer; of the last pause, where there is none now."""
        self._now_ns = 0
        self._is_stall = False

    def admit(self, pids: Iterable[int]) -> None:
        """Take in ranks that others have brought in: what they use is noted, but not whether they
        stop, so they neither make nor end a pause."""
        self._guests.update(pids)

    def note_stall(self) -> None:
        """The pause was reported as a stall: its length does not count for later ones."""
        self._is_stall = True

    def add(self, moment: Moment, ended: Iterable[int] = ()) -> None:
        """Take in a tick; `ended`: ranks that are gone."""
        self._now_ns = moment.end_ns
        gone = set(ended)
        rates = {pid: _rates(moment.processes.get(pid), moment.seconds) for pid in self._past}
        symptoms = dict.fromkeys(gone & self._past.keys(), "has ended")
        calls_on = False
        for pid, its in rates.items():
            for name, rate in its.items():
                usual = self._usual(pid, name)
                if usual < FLOORS[name]:
                    continue
                if rate <= FELL_TO * usual:
                    symptoms.setdefault(pid, SYMPTOMS[name])
                elif name == CALLS:
                    calls_on = True
        if symptoms and not calls_on:
            if not self._quiet_ns:
                self._quiet_ns, self._used = moment.start_ns, {}
            self._resumed = 0
            self.symptoms = symptoms
        elif self._quiet_ns:
            self._resumed += 1
            if self._resumed == 1:
                self._resumed_ns = moment.start_ns
            if self._resumed >= RESUMED:
                self._end_pause(self._resumed_ns)
        if self._quiet_ns:
            self._note_use(moment)
        else:
            for pid, its in rates.items():
                for name, rate in its.items():
                    self._past[pid][name].append(rate)

    def _end_pause(self, now_ns: int) -> None:
        pause_s = (now_ns - self._quiet_ns) / 1e9
        if pause_s >= PAUSE_S and not self._is_stall:
            self.longest_pause_s = max(self.longest_pause_s, pause_s)
        self._quiet_ns = self._resumed = 0
        self._is_stall = False

    def _note_use(self, moment: Moment) -> None:
        for pid in (*self._past, *self._guests):
            if (one := moment.processes.get(pid)) is not None:
                used = self._used.setdefault(pid, [0.0, 0.0])
                used[0] += one.usage.cpu_ns / 1e9
                used[1] += one.usage.read_bytes + one.usage.written_bytes

    def _usual(self, pid: int, name: str) -> float:
        past = self._past[pid][name]
        return statistics.median(past) if len(past) >= LEAST_TICKS else 0.0

    @property
    def quiet_since_ns(self) -> int:
        """When it stopped; 0: it goes on."""
        return self._quiet_ns

    @property
    def quiet_s(self) -> float:
        """How long it has made no progress."""
        return (self._now_ns - self._quiet_ns) / 1e9 if self._quiet_ns else 0.0

    @property
    def is_due(self) -> bool:
        """Whether the pause is long enough to be looked into."""
        return self.quiet_s >= min(MAX_S, max(LEAST_S, OF_LONGEST * self.longest_pause_s))

    def use_of(self, pid: int) -> tuple[float, float]:
        """CPUs, and bytes a second, of a rank since it stopped."""
        cpu, size = self._used.get(pid, (0.0, 0.0))
        return cpu / max(self.quiet_s, 0.25), size / max(self.quiet_s, 0.25)


def _rates(one: ProcessMoment | None, seconds: float) -> dict[str, float]:
    if one is None:
        return dict.fromkeys(FLOORS, 0.0)
    return {
        "cpu": one.usage.cpu_ns / 1e9 / seconds,
        "switches": one.usage.voluntary / seconds,
        CALLS: sum(call.count for call in one.calls) / seconds,
    }
