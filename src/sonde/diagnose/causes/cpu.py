# SPDX-License-Identifier: Apache-2.0
"""Without a CPU: a quota, a bad choice of CPUs, or others who use them.

Looks like: threads are ready and wait. Under a quota the kernel counts throttled periods; with bad
pinning CPUs that the process may not use are idle; else somebody else's CPU time rose. Where the
process had as few CPUs before, and somebody else came to them, that one is what changed.
What to do: raise the quota, widen the set of CPUs, or move one of the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from sonde.diagnose.case import Case
from sonde.diagnose.incident import Candidate, FaultCause, Offender
from sonde.diagnose.offenders import User, share_of_first
from sonde.diagnose.thread_time import Part

LEAST = 0.05
"""Seconds a second."""
LEAST_IDLE = 0.25
"""Pinning is a cause if the CPUs that it may not use are idle by this much together, in CPUs."""
THROTTLED = 0.2
"""Share of the time without a CPU in which its group was throttled, from which on it is a cause."""
OFFENCE = 0.1
"""An offender uses at least this many CPUs more than before."""
TOGETHER = 0.3
"""The same of many processes of which none is an offender: one owner's add up to little always."""
OF_LOST = 0.15
"""And this part of the time that the victim lost, of 1 s a second at most."""
LEAST_MORE = 0.1
"""CPUs more by which a worker, and the family, have to do more than before."""
NAMED = 3
"""Other processes that evidence names."""
AS_BEFORE = 0.3
"""What counts of pinning where it is as it was before, and somebody else came to its CPUs, or its
own processes do more on them."""
SLACK = 0.15
"""CPUs by which figures of processes and of CPUs may differ, as they are read at other times."""


def quota(case: Case) -> Candidate | None:
    """The quota of its control group."""
    ready = case.lost.parts.get(Part.READY, 0.0)
    throttled, periods = _throttled(case)
    of_ready = by_quota(case)
    if ready < LEAST or not periods or of_ready < THROTTLED:
        return None
    share = case.lost.share(Part.READY) * of_ready
    evidence = (
        f"without a CPU for {ready:.2f} s more of each second",
        f"throttled in {periods} periods, {throttled:.2f} s of each second; "
        f"its quota is {case.last.quota:g} CPUs",
    )
    step = "Raise the CPU limit of its control group, or start fewer threads."
    return Candidate(FaultCause.CPU_QUOTA, share, evidence, next_step=step)


def pinning(case: Case) -> Candidate | None:
    """The CPUs it may use are fewer than before, or full while others are idle."""
    ready = case.lost.parts.get(Part.READY, 0.0)
    by_pinning = _by_pinning(case)
    if ready < LEAST or not by_pinning:
        return None
    share = case.lost.share(Part.READY) * by_pinning * (1 - by_quota(case))
    allowed = ", ".join(map(str, case.last.allowed))
    evidence = [
        f"without a CPU for {ready:.2f} s more of each second",
        f"it may use {case.last.cpus_allowed} of {case.last.cpus} CPUs ({allowed}), while "
        f"{_idle_elsewhere(case):.2f} of the others were idle",
    ]
    if is_narrowed(case):
        evidence.append(f"before it might use {case.first.cpus_before}")
    step = "Let it use more CPUs (taskset, cpuset), or place it where nobody else is."
    return Candidate(FaultCause.BAD_PINNING, share, tuple(evidence), next_step=step)


def contention(case: Case) -> Candidate | None:
    """Others use the CPUs."""
    ready = case.lost.parts.get(Part.READY, 0.0)
    left = ready * (1 - by_quota(case)) * (1 - _by_pinning(case))
    if ready < LEAST or left < LEAST:
        return None
    evidence = [f"without a CPU for {ready:.2f} s more of each second"]
    more = case.cpu_users
    offender: Offender | None = None
    against: list[str] = []
    if _is_offence(more, left):
        first = more[0]
        did = f"used {first.more:.2f} CPUs more"
        offender = case.offender_of(first, did, share_of_first(more))
        evidence += [
            case.does(user, f"used {user.more:.2f} CPUs more")
            for user in more[:NAMED]
            if user.more >= OFFENCE
        ]
    else:
        against.append("no other process used notably more CPU time")
    if _is_crowded(case, ready):
        evidence.append(
            f"it may use {case.last.cpus_allowed} of {case.last.cpus} CPUs, as before; "
            f"{_idle_elsewhere(case):.2f} of the others were idle"
        )
    share = case.lost.share(Part.READY) * left / ready * (1.0 if offender else 0.3)
    step = "Give it separate CPUs, or the other one a quota."
    return Candidate(
        FaultCause.CPU_CONTENTION, share, tuple(evidence), tuple(against), offender, step
    )


def _is_offence(more: list[User], lost: float) -> bool:
    """Whether the first of them uses enough to be an offender. `lost`: what the victim lost."""
    if not more:
        return False
    least = max(OFFENCE, OF_LOST * min(lost, 1.0))
    return more[0].is_enough(least, max(least, TOGETHER))


@dataclass(frozen=True, slots=True)
class OwnWorkers:
    """Processes that the victim started, which do more."""

    pid: int
    """Of the one that does most more."""
    cpus: float
    """CPUs more that all of the victim's family use."""


def own_workers(case: Case) -> OwnWorkers | None:
    """The process that the victim started that uses most more, with what all of the family use
    more; None: they use no more than before, or less than others do."""
    family = sum(case.grew("cpu", pid) for pid in case.own)
    workers = {pid: case.grew("cpu", pid) for pid in sorted(case.own - {case.victim})}
    most = max(workers, key=lambda pid: workers[pid], default=None)
    if most is None or workers[most] < LEAST_MORE or family < LEAST_MORE:
        return None
    others = case.cpu_users
    if others and others[0].more > family:
        return None
    return OwnWorkers(most, family)


def _throttled(case: Case) -> tuple[float, int]:
    """(seconds a second, periods) between the two readings."""
    seconds = max(0.0, case.last.throttled_s - case.first.throttled_s) / case.between_s
    return seconds, max(0, case.last.throttled_periods - case.first.throttled_periods)


def by_quota(case: Case) -> float:
    """Share of the time without a CPU in which its group was throttled. All its threads wait then,
    so throttled time is divided by the waiting time of the thread that waited most."""
    before, after = case.lost.before.times, case.lost.after.times
    most = max(
        (row.get(Part.READY, 0.0) - before.get(tid, {}).get(Part.READY, 0.0)
         for tid, row in after.items()), default=0.0,
    )  # fmt: skip
    throttled, _ = _throttled(case)
    return min(1.0, throttled / most) if most > 0 else 0.0


def is_narrowed(case: Case) -> bool:
    """Whether it was allowed more CPUs before it became slower."""
    return 0 < case.last.cpus_allowed < case.first.cpus_before


def _by_pinning(case: Case) -> float:
    """Share of the time without a CPU that the CPUs it may not use could have served."""
    ready = case.lost.parts.get(Part.READY, 0.0)
    idle = _idle_elsewhere(case)
    if is_narrowed(case):
        return 1.0
    if ready <= 0 or idle < LEAST_IDLE:
        return 0.0
    is_as_before = _is_crowded(case, ready) or (_is_known(case) and own_workers(case) is not None)
    return min(1.0, idle / ready) * (AS_BEFORE if is_as_before else 1.0)


def _is_known(case: Case) -> bool:
    """Whether it had as few CPUs before."""
    return 0 < case.first.cpus_before <= case.last.cpus_allowed


def _is_crowded(case: Case, ready: float) -> bool:
    """Whether it had as few CPUs before, and another process, that may be on them, came, while
    there are idle ones elsewhere."""
    if not _is_known(case) or _idle_elsewhere(case) < LEAST_IDLE:
        return False
    more = case.cpu_users
    used = sum(case.last.cpu_busy.get(cpu, 0.0) for cpu in case.last.allowed)
    own = sum(case.after[pid].cpu for pid in case.own if pid in case.after)
    return _is_offence(more, ready) and more[0].more <= used - own + SLACK


def _idle_elsewhere(case: Case) -> float:
    """CPUs idle among those that it may not use."""
    if case.last.cpus_allowed >= case.last.cpus:
        return 0.0
    allowed = set(case.last.allowed)
    return sum(1 - busy for cpu, busy in case.last.cpu_busy.items() if cpu not in allowed)
