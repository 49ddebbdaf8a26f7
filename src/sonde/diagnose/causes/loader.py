# SPDX-License-Identifier: Apache-2.0
"""A slow loader: a worker, a process that the program started, hands its results over later.

Looks like: threads wait, in a pipe, a queue or for a lock, until such a process ends the wait; it
works or waits longer for each piece.
What to do: more workers, or faster ones; look at what they wait for.
"""

from __future__ import annotations

from sonde.diagnose.case import OWN, Case
from sonde.diagnose.incident import Candidate, FaultCause
from sonde.diagnose.lost_time import Part

LEAST = 0.08
OF_LOST = 0.25
"""Part of what the victim lost by which its worker must work or wait longer."""
SHOWN = 0.005
"""Fewer seconds are shown as 0.00."""


def judge(case: Case) -> Candidate | None:
    """Waits that a descendant ended."""
    lost = case.handed
    if lost < LEAST:
        return None
    pid = case.handed_by
    if pid is None:
        return None
    cpu = case.grew("cpu", pid)
    of_worker = case.of(pid).parts
    working = max(0.0, cpu) + sum(of_worker.get(part, 0.0) for part in OWN)
    lacked, stopped = of_worker.get(Part.READY, 0.0), of_worker.get(Part.STOPPED, 0.0)
    evidence = (
        f"waited {lost:.2f} s more of each second for its own {case.name(pid)} ({pid})",
        f"that one used {cpu:+.2f} CPUs, and waited {working - max(0.0, cpu):.2f} s more itself",
    )
    against: list[str] = []
    if working < max(LEAST, OF_LOST * lost):
        against.append(f"that one's own work and waits took {working:+.2f} s, too little for that")
    if lacked + stopped > working:
        ways = (("lacked a CPU", lacked), ("was stopped", stopped))
        against += [
            f"that one {what} for {seconds:.2f} s more itself"
            for what, seconds in ways
            if seconds >= SHOWN
        ]
    share = (case.lost.share(Part.HANDED) + _behind(case)) * (0.3 if against else 1.0)
    step = "Look at what its workers do, or start more of them."
    return Candidate(FaultCause.SLOW_LOADER, share, evidence, tuple(against), next_step=step)


def _behind(case: Case) -> float:
    """Share of the time that its steps lost as its threads had to wait for work of other ones: for
    those that wait for the worker."""
    steps, queue = (case.lost.parts.get(part, 0.0) for part in (Part.STEPS, Part.QUEUE))
    return case.lost.share(Part.STEPS) * min(1.0, queue / steps) if steps else 0.0
