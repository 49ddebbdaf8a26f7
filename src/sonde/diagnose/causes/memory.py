# SPDX-License-Identifier: Apache-2.0
"""Reclaim: memory is short, so files that were in memory are read again, and pages freed first.

Looks like: reads of files that took none before, major faults, direct reclaim, hits of the memory
limit. What to do: raise the limit, or make the working set smaller.
"""

from __future__ import annotations

from sonde.diagnose.case import Case, Rates
from sonde.diagnose.incident import Candidate, FaultCause
from sonde.diagnose.thread_time import Part

LEAST = 0.05
MANY_FAULTS = 20.0
"""Major faults a second more."""
READ_AGAIN = 5e6
"""Bytes a second more from disks, beside hits of the limit: what was in memory is read again."""
CERTAIN = 0.9
"""The share that is claimed then, at least."""
LEAST_RECLAIM = 0.01
"""Seconds of direct reclaim a second."""


def judge(case: Case) -> Candidate | None:
    """Waits for the disk, or reclaim, where figures show that memory is short."""
    disk = case.lost.parts.get(Part.DISK, 0.0)
    hits = max(0, case.last.memory_limit_hits - case.first.memory_limit_hits)
    faults = case.grew("major_faults", case.victim)
    reclaim = case.grew("reclaim_s", case.victim)
    if disk + reclaim < LEAST or not (hits or reclaim >= LEAST_RECLAIM or faults >= MANY_FAULTS):
        return None
    evidence = [f"waited {disk:.2f} s more of each second for files"]
    if hits:
        evidence.append(f"its control group ran into its memory limit {hits:,} times")
    if faults >= MANY_FAULTS:
        evidence.append(f"{faults:,.0f} major faults a second more")
    if reclaim >= LEAST_RECLAIM:
        evidence.append(f"{reclaim:.2f} s of direct reclaim of each second")
    now = case.after.get(case.victim, Rates())
    evidence.append(f"it read {now.disk_bytes / 1e6:.1f} MB/s from disks")
    whole = case.lost.whole + reclaim
    # Twice: to free a page and to read it again costs CPU time of the kernel, too.
    share = min(1.0, (disk + 2 * max(0.0, reclaim)) / whole) if whole > 0 else 0.0
    if hits and now.disk_bytes - case.before.get(case.victim, Rates()).disk_bytes > READ_AGAIN:
        share = max(share, CERTAIN)
    step = "Raise its memory limit, or read less at a time."
    return Candidate(FaultCause.RECLAIM, share, tuple(evidence), next_step=step)
