# SPDX-License-Identifier: Apache-2.0
"""Waits for disks: a limit, others who use the device, or the program's own fsync.

Looks like: threads wait in reads, writes or fsync. Under a limit the time passes before requests
reach the device; with contention requests take longer in it while somebody else's rose; with fsync
the program asks for more of them than before.
What to do: raise the limit, move one of the two, or sync less often.
"""

from __future__ import annotations

from sonde.diagnose.case import Case, Rates
from sonde.diagnose.incident import Candidate, FaultCause, Offender
from sonde.diagnose.offenders import User, share_of_first
from sonde.diagnose.thread_time import Part

LEAST = 0.05
IN_DEVICE = 0.5
"""Device time above this part of the waiting time: then no limit before the device holds requests
back."""
MORE_SYNCS = 1.5
"""Times as many waits for a write to disk as before make them a cause."""
LEAST_SYNCS = 2.0
"""And this many a second."""
MANY_SYNCS = 10.0
"""From this many times as many on, what steps lose beyond all waits is due to them in part: a sync
takes CPU time, too, and what it writes was written before."""
NO_WAITS = (Part.STEPS, Part.CPU)
OFFENCE_BYTES, TOGETHER_BYTES = 2e6, 6e6
"""Bytes a second more on disks that make an offender: of one process, of many together."""
OFFENCE_TIME, TOGETHER_TIME = 0.1, 0.3
"""Or time of the requests that they make more, s a second."""
NAMED = 3
"""Others that evidence names."""


def throttle(case: Case) -> Candidate | None:
    """A limit of its control group on block devices."""
    lost = _lost(case)
    if lost < LEAST or not case.last.disk_limits:
        return None
    in_device = sum(use.ns for use in case.disk(case.window.after, case.own).values()) / 1e9
    seconds = case.lost.after.seconds
    waiting = sum(_waiting(case)) * seconds
    if waiting <= 0 or in_device > IN_DEVICE * waiting:
        return None
    evidence = (
        f"waited {lost:.2f} s more of each second for files",
        f"{in_device / max(waiting, 1e-9):.0%} of the waiting was in the device",
        "limits of its control group: " + "; ".join(case.last.disk_limits[:4]),
    )
    share = case.lost.share(Part.DISK, Part.SYNC)
    step = "Raise the limit on the device (blkio.throttle, io.max)."
    return Candidate(FaultCause.DISK_THROTTLE, share, evidence, next_step=step)


def contention(case: Case) -> Candidate | None:
    """Others use the device."""
    lost = _lost(case)
    if lost < LEAST:
        return None
    by_bytes, by_time = _by_bytes(case), _by_time(case)
    moved = [it for it in by_bytes if it.is_enough(OFFENCE_BYTES, TOGETHER_BYTES)]
    asked = [it for it in by_time if it.is_enough(OFFENCE_TIME, TOGETHER_TIME)]
    was, now = _per_request(case, before=True), _per_request(case, before=False)
    if not moved and not asked:
        return None
    # Its own requests are slower, or its device is full of theirs.
    slower = now > 1.3 * was if was else now > 0  # by more than requests vary anyway
    share = case.lost.share(Part.DISK, Part.SYNC) * (1.0 if slower else 0.3)
    offender: Offender | None = None
    if slower:
        # Many that use more together than each of those who use enough may be to blame: then nobody
        # is named.
        if by_bytes and by_bytes[0] in moved:
            first = by_bytes[0]
            offender = _offender(case, by_bytes, first.more, _sum(case, "disk_s", first))
        elif by_time and by_time[0] in asked:
            first = by_time[0]
            offender = _offender(case, by_time, _sum(case, "disk_bytes", first), first.more)
    known = {it.pid for it in moved}
    named = [case.does(it, f"moved {it.more / 1e6:.1f} MB/s more") for it in moved]
    named += [
        case.does(it, f"made requests that took {it.more:.2f} s more of each second")
        for it in asked
        if it.pid not in known
    ]
    evidence = (
        f"waited {lost:.2f} s more of each second for files",
        f"a request took {now * 1e3:.2f} ms, before {was * 1e3:.2f}",
        *named[:NAMED],
    )
    step = "Give one of the two another device, or limit the other."
    return Candidate(FaultCause.DISK_CONTENTION, share, evidence, (), offender, step)


def _offender(case: Case, users: list[User], size: float, seconds: float) -> Offender:
    """The first of the users. `size`: bytes a second more that it moves; `seconds`: time of its
    requests, s a second more."""
    did = f"{size / 1e6:.1f} MB/s and {seconds:.2f} s of requests a second more"
    if not users[0].is_alone:
        did = f"moved {did}"
    return case.offender_of(users[0], did, share_of_first(users), since="")


def _sum(case: Case, field: str, user: User) -> float:
    """By how much a rate (a field of `Rates`) rose, of all its processes together."""
    return sum(case.grew(field, pid) for pid in user.pids)


def _by_bytes(case: Case) -> list[User]:
    """Others by the bytes a second that they move more."""
    before, after = (
        {pid: rates.disk_bytes for pid, rates in side.items()} for side in (case.before, case.after)
    )
    return case.users(before, after)


def _by_time(case: Case) -> list[User]:
    """Others by the time, s a second, of the requests that they make more. Who makes as many as
    before, which take longer, suffers like the victim."""
    before = {pid: it.disk_s for pid, it in case.before.items() if pid not in case.after}
    after: dict[int, float] = {}
    for pid, rates in case.after.items():
        was = case.before.get(pid, Rates()).disk_requests
        more = max(0.0, rates.disk_requests - was)
        after[pid] = rates.disk_s * more / rates.disk_requests if more else 0.0
    return case.users(before, after)


def fsync(case: Case) -> Candidate | None:
    """It waits for its own files to be on the disk, more often than before."""
    lost = case.lost.parts.get(Part.SYNC, 0.0)
    was, now = (side.counts.get(Part.SYNC, 0.0) for side in (case.lost.before, case.lost.after))
    if lost < LEAST or now < max(LEAST_SYNCS, MORE_SYNCS * was):
        return None
    evidence = (
        f"waited {lost:.2f} s more of each second in fsync and the like",
        f"{now:.0f} such waits a second, before {was:.0f}",
        *(f"in {text}" for text, _ in case.places("sync to disk")[:2]),
    )
    share = case.lost.share(Part.SYNC)
    if now >= MANY_SYNCS * was:
        waits = sum(its for part, its in case.lost.parts.items() if part not in NO_WAITS)
        share += case.lost.share(*NO_WAITS) * lost / waits
    return Candidate(
        FaultCause.FSYNC, share, evidence, next_step="Sync less often, or in another thread."
    )


def _lost(case: Case) -> float:
    return case.lost.parts.get(Part.DISK, 0.0) + case.lost.parts.get(Part.SYNC, 0.0)


def _waiting(case: Case) -> list[float]:
    return [
        row.get(Part.DISK, 0.0) + row.get(Part.SYNC, 0.0) for row in case.lost.after.times.values()
    ]


def _per_request(case: Case, before: bool) -> float:
    """Mean length in s of requests of the victim and its descendants; 0 without any."""
    moments = case.window.before if before else case.window.after
    uses = case.disk(moments, case.own).values()
    count, ns = sum(use.count for use in uses), sum(use.ns for use in uses)
    return ns / 1e9 / count if count else 0.0
