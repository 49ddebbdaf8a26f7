# SPDX-License-Identifier: Apache-2.0
"""A slow loader: a worker of the same program hands its results over later than before.

Looks like: threads wait, in a pipe, a queue or for a lock, until a process that the program started
ends the wait; that one works or waits longer for each piece.
What to do: more workers, or faster ones; look at what they wait for.
"""

from __future__ import annotations

from sonde.diagnose.case import Case
from sonde.diagnose.incident import Candidate, FaultCause
from sonde.diagnose.lost_time import Part

LEAST = 0.08


def judge(case: Case) -> Candidate | None:
    """Waits that a descendant ended."""
    lost = case.lost.parts.get(Part.HANDED, 0.0)
    if lost < LEAST:
        return None
    wakers = [it for it in case.wakers(Part.HANDED) if it[0] in case.own and it[0] != case.victim]
    if not wakers:
        return None
    pid = wakers[0][0]
    cpu = case.grew("cpu", pid)
    disk = case.grew("disk_s", pid)
    evidence = [
        f"waited {lost:.2f} s more of each second for its own {case.name(pid)} ({pid})",
        f"that one used {cpu:+.2f} CPUs and {disk:+.2f} s of disk requests a second",
    ]
    share = case.lost.share(Part.HANDED)
    step = "Look at what its workers do, or start more of them."
    return Candidate(FaultCause.SLOW_LOADER, share, tuple(evidence), next_step=step)
