# SPDX-License-Identifier: Apache-2.0
"""Garbage collection: the interpreter looks for garbage in every step.

Looks like: on a CPU as before, but in the collector. What to do: freeze what lives long
(gc.freeze), collect between steps, or raise the thresholds.
"""

from __future__ import annotations

from sonde.diagnose.case import Case
from sonde.diagnose.incident import Candidate, FaultCause
from sonde.diagnose.thread_time import Part

LEAST = 0.08


def judge(case: Case) -> Candidate | None:
    """CPU time in the collector."""
    lost = case.lost.parts.get(Part.GARBAGE, 0.0)
    if lost < LEAST:
        return None
    now = sum(row.get(Part.GARBAGE, 0.0) for row in case.lost.after.times.values())
    evidence = [f"in the garbage collector for {now:.2f} s of each second, {lost:.2f} more"]
    evidence += [f"called from {text}" for text, _ in case.places("")[:1]]
    # The collector holds the interpreter's lock: threads that wait for the lock wait for it.
    behind = case.lost.share(Part.INTERPRETER_LOCK, Part.LOCK) * collector_share(case)
    share = min(1.0, case.lost.share(Part.GARBAGE) + behind)
    step = "Call gc.freeze() after the start, or collect less often."
    return Candidate(FaultCause.GARBAGE_COLLECTION, share, tuple(evidence), next_step=step)


def collector_share(case: Case) -> float:
    """Share of the collector in the CPU time that came with the slowdown."""
    more = {}
    for part in (Part.GARBAGE, Part.CPU):
        was = sum(row.get(part, 0.0) for row in case.lost.before.times.values())
        now = sum(row.get(part, 0.0) for row in case.lost.after.times.values())
        more[part] = max(0.0, now - was)
    whole = sum(more.values())
    garbage = more[Part.GARBAGE]
    return garbage / whole if whole > 0 and garbage >= LEAST else 0.0
