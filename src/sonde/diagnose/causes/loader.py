# SPDX-License-Identifier: Apache-2.0
"""A slow loader: a worker, a process that the program started, hands its results over later.

Looks like: threads wait, in a pipe, a queue or for a lock, until such a process ends the wait; it
works or waits longer for each piece. Or threads lack a CPU, as workers do more on the same ones.
What to do: more workers, or faster ones; look at what they wait for.
"""

from __future__ import annotations

from sonde.diagnose.case import OWN, Case
from sonde.diagnose.causes.cpu import by_quota, is_narrowed, own_workers
from sonde.diagnose.incident import Candidate, FaultCause
from sonde.diagnose.thread_time import Part

LEAST = 0.08
OF_LOST = 0.25
"""Part of what the victim lost by which its worker must work or wait longer."""
STEP = "Look at what its workers do, or start more of them."
SHOWN = 0.005
"""Fewer seconds are shown as 0.00."""


def judge(case: Case) -> Candidate | None:
    """Waits that a descendant ended; or for CPUs that descendants use."""
    lost = case.handed
    pid = case.handed_by
    if lost < LEAST or pid is None:
        return _crowded_out(case)
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
    return Candidate(FaultCause.SLOW_LOADER, share, evidence, tuple(against), next_step=STEP)


def _crowded_out(case: Case) -> Candidate | None:
    """Workers that do more use the CPUs that the program may use, and it lacks one itself."""
    ready = case.lost.parts.get(Part.READY, 0.0)
    workers = own_workers(case)
    if ready < LEAST or workers is None or is_narrowed(case):
        return None
    evidence = (
        f"without a CPU for {ready:.2f} s more of each second, on the CPUs that it had before",
        f"its own {case.name(workers.pid)} ({workers.pid}) used "
        f"{case.grew('cpu', workers.pid):+.2f} CPUs, all of its processes {workers.cpus:+.2f}",
    )
    share = case.lost.share(Part.READY) * (1 - by_quota(case))
    return Candidate(FaultCause.SLOW_LOADER, share, evidence, next_step=STEP)


def _behind(case: Case) -> float:
    """Share of the time that its steps lost as its threads had to wait for work of other ones: for
    those that wait for the worker."""
    steps, queue = (case.lost.parts.get(part, 0.0) for part in (Part.STEPS, Part.QUEUE))
    return case.lost.share(Part.STEPS) * min(1.0, queue / steps) if steps else 0.0
