# SPDX-License-Identifier: Apache-2.0
"""Waits for other threads of the same process: the interpreter's lock, or one of the program.

Looks like: threads wait on a futex that a thread of their process lets go. For the interpreter's
lock the stack shows it (take_gil), while another thread runs Python all the time.
What to do: hold it for less, or do that work in another process.
"""

from __future__ import annotations

from collections.abc import Iterable

from sonde.diagnose.case import Case
from sonde.diagnose.causes.garbage import collector_share
from sonde.diagnose.incident import Candidate, FaultCause
from sonde.diagnose.thread_time import Part

LEAST = 0.05


def interpreter(case: Case) -> Candidate | None:
    """The interpreter's lock."""
    lost = case.lost.parts.get(Part.INTERPRETER_LOCK, 0.0)
    if lost < LEAST:
        return None
    # The thread that runs meanwhile holds the lock.
    running = {
        tid: row.get(Part.CPU, 0.0) - case.lost.before.times.get(tid, {}).get(Part.CPU, 0.0)
        for tid, row in case.lost.after.times.items()
    }
    evidence = [f"waited {lost:.2f} s more of each second for the interpreter's lock"]
    holder = max(running, key=lambda tid: running[tid], default=0)
    if holder and running[holder] > LEAST:
        where = case.places("", (holder,))
        at = f" in {where[0][0]}" if where else ""
        evidence.append(f"thread {holder} ran {running[holder]:.2f} s more of each second{at}")
    share = case.lost.share(Part.INTERPRETER_LOCK, Part.LOCK) * (1 - collector_share(case))
    share += case.lost.share(Part.READY) * _own_share(case, running.values())
    step = "Move that thread's work to another process, or to code that lets the lock go."
    return Candidate(FaultCause.INTERPRETER_LOCK, share, tuple(evidence), next_step=step)


def _own_share(case: Case, running: Iterable[float]) -> float:
    """Of the CPU time that processes use more of, the part of the victim's threads: what its other
    threads lack a CPU for."""
    own = sum(max(0.0, more) for more in running)
    others = sum(max(0.0, case.grew("cpu", pid)) for pid in case.others())
    return own / (own + others) if own > LEAST else 0.0


def own(case: Case) -> Candidate | None:
    """A lock of the program."""
    lost = case.lost.parts.get(Part.LOCK, 0.0)
    gil = case.lost.parts.get(Part.INTERPRETER_LOCK, 0.0)
    if lost < LEAST or gil >= lost:
        return None
    holders = [it for it in case.wakers(Part.LOCK) if it[0] == case.victim]
    evidence = [f"waited {lost:.2f} s more of each second for its own locks"]
    if holders:
        _, tid, seconds = holders[0]
        where = case.places(None, (tid,))
        at = f", mostly in {where[0][0]}" if where else ""
        evidence.append(f"thread {tid} ended {seconds:.2f} s of them{at}")
    places = case.places("futex", list(case.lost.before.times))
    evidence += [f"waited in {text}" for text, _ in places[:2]]
    share = case.lost.share(Part.LOCK) * (1.0 if holders else 0.5)
    step = "Hold the lock for less, or share less under it."
    return Candidate(FaultCause.LOCK, share, tuple(evidence), next_step=step)
