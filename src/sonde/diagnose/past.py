# SPDX-License-Identifier: Apache-2.0
"""Whether a process does what it did before anyway, compared with each second of its past.

Programs that compile, test or serve in bursts wait more in one second than in the next. A slowdown
is one only where the process waits for longer, and does less, than in any second before, but for
one odd second (`usual_range`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sonde.diagnose.case import Case
from sonde.diagnose.lost_time import HINDRANCES, LEAST_PACE
from sonde.diagnose.thread_time import Part, Side, side, work_of, worked
from sonde.diagnose.usual_range import LEAST_SECONDS, begun, by_seconds, largest

LEAST_MORE = 0.06
"""Seconds a second by which it must wait for longer than in any second before."""

LESS = 0.1
"""Part of the least of the seconds before by which it must do less than that."""


@dataclass(frozen=True, slots=True)
class Past:
    """What a process did in each second before, the last one first, and what it does now."""

    waited: Sequence[float]
    """Waits of threads that had work, seconds a second."""
    cpu: Sequence[float]
    """CPUs that these threads used, but for collecting garbage."""
    pace: Sequence[float]
    waits: float
    now_cpu: float
    now_pace: float

    @property
    def is_short(self) -> bool:
        """Whether too little of the past is known."""
        return len(self.waited) < LEAST_SECONDS

    def waits_longer(self) -> bool:
        """Whether it waits for longer than it did in these seconds."""
        return self._begin() is not None

    def does_less(self) -> bool:
        """Whether it uses a tenth less CPU time, or does a tenth fewer pieces of work, than in
        these seconds."""
        since = self._begin() or 0
        return any(
            now < (1 - LESS) * (usual := -largest([-it for it in before[since:]])) and usual > least
            for now, before, least in (
                (self.now_cpu, self.cpu, 0.0),
                (self.now_pace, self.pace, LEAST_PACE),
            )
        )

    def _begin(self) -> int | None:
        """How many of the last seconds are part of the slowdown; None: it waits as before."""
        return begun(self.waits, self.waited, LEAST_MORE)


def past(case: Case) -> Past:
    """The past of a case's victim."""
    lost = case.lost
    idle = (Part.NETWORK,) if lost.asks_nobody else ()
    # Queues, too: which waits are those is known by some stacks only.
    counted = [part for part in (*HINDRANCES, Part.QUEUE) if part not in idle]
    threads = worked(lost.before)
    moments = case.window.before
    first = next((at for at, one in enumerate(moments) if case.victim in one.processes), 0)
    known = moments[first:]
    seconds = [side(case.window, known[one]) for one in by_seconds([it.seconds for it in known])]
    return Past(
        [_waits(one, threads, counted) for one in seconds],
        [work_of(one, threads) for one in seconds],
        [one.pace for one in seconds],
        _waits(lost.after, threads, counted),
        work_of(lost.after, threads),
        lost.after.pace,
    )


def _waits(one: Side, threads: Iterable[int], parts: Sequence[Part]) -> float:
    rows = (one.times.get(tid, {}) for tid in threads)
    return sum(row.get(part, 0.0) for row in rows for part in parts)
