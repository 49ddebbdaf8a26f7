# SPDX-License-Identifier: Apache-2.0
"""Frozen: the process is stopped by a signal or a debugger, or its control group is frozen.

Looks like: no thread runs, none waits for anything. What to do: send SIGCONT, or thaw the group.
"""

from __future__ import annotations

from sonde.diagnose.case import Case
from sonde.diagnose.incident import Candidate, FaultCause
from sonde.diagnose.thread_time import Part

LEAST = 0.2
STOPPED_STATES = ("T", "t")


def judge(case: Case) -> Candidate | None:
    """Stopped time, or a stopped state."""
    lost = case.lost.parts.get(Part.STOPPED, 0.0)
    stands = case.last.state in STOPPED_STATES or case.last.is_frozen
    if lost < LEAST and not stands:
        return None
    evidence = [f"stopped for {lost:.2f} s of each second"]
    if case.last.is_frozen:
        evidence.append("its control group is frozen")
    elif stands:
        evidence.append(f"state {case.last.state}: stopped by a signal or a debugger")
    return Candidate(
        FaultCause.FROZEN,
        1.0 if stands else case.lost.share(Part.STOPPED),
        tuple(evidence),
        next_step="Thaw its control group." if case.last.is_frozen else "Send SIGCONT.",
    )
