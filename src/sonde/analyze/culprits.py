# SPDX-License-Identifier: Apache-2.0
"""Who is behind the time of a cause: the thread that ended the waits and what it mostly did, who
had the CPU, or what a lock was held for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from sonde.analyze.asked_threads import asked
from sonde.analyze.cpu_contention import contention_for_cpus
from sonde.analyze.lock_holders import held_for
from sonde.analyze.own_threads import own_threads
from sonde.analyze.pool_holders import held_from_pools
from sonde.analyze.ranking import LEAST_SHARE
from sonde.analyze.thread_time import ThreadTime, locations
from sonde.model.causes import Cause
from sonde.model.timeline import ThreadOwner, Timeline, Total, TotalKind, WaitDetail
from sonde.model.verdict import WITHOUT_CPU, Culprit

ENDED = 0.25
"""A thread that ended this part of a cause's waits is named."""
LEAST_ENDED = 0.05
"""And at least this part of all of them."""
WAITED_HOPS = 3
"""Of threads of which each waits for the next one, at most this many are named."""
AWAKE = 0.1
"""A thread that is on a CPU or ready for this part of the record holds a lock then, and not while
it sleeps."""


@dataclass(frozen=True, slots=True)
class Behind:
    """Who is behind the time of a cause."""

    facts: list[str] = field(default_factory=list)
    """In words, for people."""
    culprit: Culprit | None = None


def who_is_behind(
    timeline: Timeline,
    time: ThreadTime,
    cause: Cause,
    length: int,
    window: int,
    turns: Collection[int],
) -> Behind:
    """Who ended the waits of a cause, where one thread did for much of them; who had the CPU.

    `length`: the time of the cause, `window`: of the record, in ns; `turns`: the threads that
    waited.
    """
    if length < LEAST_SHARE * window:
        return Behind()
    if cause == Cause.RUN_QUEUE:
        return Behind(*contention_for_cpus(timeline, set(turns), length))
    if cause == Cause.SPIN:
        pool = own_threads(timeline, turns).most_spun
        return Behind([], Culprit("", "", "on a CPU", pool=pool) if pool else None)
    if cause == Cause.SLEEP and time.timed_out >= LEAST_SHARE * window:
        return Behind(
            [
                f"for {100 * time.timed_out / window:.0f} % of the time the threads that could end "
                "such a wait waited for this one: only its timer ended it"
            ]
        )
    if cause == Cause.POOL:
        return Behind(*held_from_pools(timeline, time.places[cause], turns))
    if cause == Cause.IO and 2 * sum(time.answers.values()) >= length:
        text, asking = asked(timeline, time.answers)
        return Behind([text], asking)
    others, peers = time.others[cause], set[int]()
    if cause == Cause.LOCK:
        peers = _waiting_at(timeline, time.places[cause], window, turns).union(turns)
        others = {track: ns for track, ns in others.items() if track not in peers}
    most = max(others, key=lambda track: others[track], default=-1)
    # A wait for the interpreter lock is cut by a timer every 5 ms, until somebody ends it. Threads
    # that wait for the same lock pass it on: another one holds it for long.
    by_threads = sum(others.values()) if cause == Cause.GIL or peers else length
    ended = others.get(most, 0)
    is_holder = ended > 0 and ended >= ENDED * by_threads and ended >= LEAST_ENDED * length
    facts: list[str] = []
    culprit = None
    if is_holder:
        how = f"{100 * ended / length:.0f} % of it ended by"
        if cause == Cause.LOCK and len(peers) > 1:  # most of it they ended for one another
            how = "held by"
        text, culprit = _doing(timeline, most, cause)
        facts.append(f"{how} {text}")
    if cause == Cause.LOCK:
        holder = most if is_holder else -1
        lines, within = held_for(timeline, time.places[cause], peers, holder)
        facts += lines
        culprit = within or culprit
    if culprit is not None and (culprit.doing == WITHOUT_CPU or culprit.is_short_of_cpu):
        facts += _who_had_the_cpu(timeline, culprit.thread, peers)
    if cause == Cause.INPUT and culprit is not None and _shares_gil(timeline, culprit, turns):
        culprit = replace(culprit, by_gil=True)
    return Behind(facts, culprit)


def _shares_gil(timeline: Timeline, culprit: Culprit, turns: Collection[int]) -> bool:
    """Whether a thread is in a process of those that wait for it, and threads of that wait for the
    interpreter lock for a good part of the record: more threads would not be faster."""
    pids = {timeline.tracks[track].pid for track in turns}
    mine = {number for number, one in enumerate(timeline.tracks) if one.pid in pids}
    waited = sum(
        one.ns for one in timeline.totals if one.wait_detail == WaitDetail.GIL and one.track in mine
    )
    least = LEAST_SHARE * (timeline.end_ns - timeline.start_ns)
    return waited >= least and any(timeline.tracks[it].label == culprit.thread for it in mine)


def _who_had_the_cpu(timeline: Timeline, label: str, peers: Collection[int]) -> list[str]:
    """Who had the CPUs that a thread with this label waited for; '': these threads."""
    mine = {track for track, one in enumerate(timeline.tracks) if label and one.label == label}
    mine = mine or set(peers)
    queued = (one for one in timeline.totals if one.kind == TotalKind.RUNQUEUE)
    waited = sum(one.ns for one in queued if one.track in mine)
    return contention_for_cpus(timeline, mine, waited)[0] if waited else []


def _waiting_at(
    timeline: Timeline, places: Collection[str], window: int, turns: Collection[int]
) -> set[int]:
    """The threads that wait on a futex at one of these places for a good part of the time, in the
    processes of `turns` and in those that share locks with them: their parents, children and
    siblings. A program of somebody else may have functions of the same names."""
    pids = {timeline.tracks[track].pid for track in turns}
    kin = {parent for pid in pids if (parent := timeline.parents.get(pid, 0)) > 1} | pids
    waited: dict[int, int] = defaultdict(int)
    for one in timeline.totals:
        pid = timeline.tracks[one.track].pid
        if pid not in kin and timeline.parents.get(pid, 0) not in kin:
            continue
        if one.kind == TotalKind.BLOCKED and one.name == "futex" and one.location in places:
            waited[one.track] += one.ns if one.location else 0
    return {track for track, ns in waited.items() if ns >= LEAST_SHARE * window}


def _doing(
    timeline: Timeline, track: int, cause: Cause, seen: tuple[int, ...] = ()
) -> tuple[str, Culprit | None]:
    """A thread that others waited for, and what it mostly did: 'worker (12), on a CPU in load
    train.py:8'; the same as a culprit, or that which it waits for itself. Of the interpreter lock
    that is what it ran: it holds the lock on a CPU. `seen`: tracks that wait for it, and were
    named already."""
    one = timeline.tracks[track]
    if one.owner == ThreadOwner.DRIVER:
        return f"{one.label}, a thread of the driver", None
    mine = [total for total in timeline.totals if total.track == track]
    running = sum(total.ns for total in mine if total.kind == TotalKind.SAMPLED)
    waits = [total for total in mine if total.kind == TotalKind.BLOCKED]
    waits += _ready(mine)
    if cause == Cause.LOCK:
        waits = _without_sleep(timeline, waits, running)
    longest = max(waits, key=lambda total: total.ns, default=None)
    place, shown = _code(timeline, mine, running)
    # Who waits for a lock may hold another one meanwhile; who waits in a queue holds up others.
    waits_most = longest is not None and longest.ns > running and not _is_lock(longest)
    if longest is not None and waits_most and cause != Cause.GIL:
        if longest.kind == TotalKind.RUNQUEUE:
            text = f"{one.label}, mostly waiting for a CPU{f', in {shown}' * bool(shown)}"
            return text, Culprit(one.label, place, WITHOUT_CPU)
        behind, culprit = _waited_for(timeline, track, waits, seen)
        if behind:
            return f"{one.label}, which waits{_where(waits)} for {behind}", culprit
        where = locations({longest.location: longest.ns}, longest.ns, timeline.callers)[0]
        text = f" in {where.text}" if longest.location else ""
        return (
            f"{one.label}, mostly waiting: {longest.name}{text}",
            Culprit(one.label, longest.location, longest.name),
        )
    text = f"{one.label}, on a CPU in {shown}" if shown else one.label
    return text, Culprit(one.label, place, "on a CPU")


def _ready(totals: Iterable[Total]) -> list[Total]:
    """The time of a thread in run queues, that for one reason in one: wherever it stood then, it
    had no CPU."""
    found: dict[str, Total] = {}
    for one in totals:
        if one.kind == TotalKind.RUNQUEUE:
            known = found.get(one.name)
            found[one.name] = replace(one, ns=one.ns + known.ns if known else one.ns)
    return list(found.values())


def _code(timeline: Timeline, totals: Iterable[Total], running: int) -> tuple[str, str]:
    """(the place in which most of these samples are, the same with its caller); '' not known."""
    places: dict[str, int] = defaultdict(int)
    for total in totals:
        if total.kind == TotalKind.SAMPLED and total.location:
            places[total.location] += total.ns
    found = locations(places, running, timeline.callers)
    return (found[0].function, found[0].text) if found else ("", "")


def _without_sleep(timeline: Timeline, waits: list[Total], running: int) -> list[Total]:
    """The waits of a thread that holds a lock; those in which it sleeps only where it hardly does
    anything else."""
    ready = sum(one.ns for one in waits if one.kind == TotalKind.RUNQUEUE)
    if running + ready < AWAKE * (timeline.end_ns - timeline.start_ns):
        return waits
    return [one for one in waits if one.name != "sleep"]


def _is_lock(wait: Total) -> bool:
    """Whether a wait is for a lock, and not in a queue."""
    handed = (WaitDetail.QUEUE, WaitDetail.ROOM, WaitDetail.POOL)
    return wait.name == "futex" and wait.wait_detail not in handed


def _where(waits: Iterable[Total]) -> str:
    """Where in the program most of these waits are: ' in fetch train.py:8'; '' not known."""
    places: dict[str, int] = defaultdict(int)
    for one in waits:
        places[one.location] += one.ns
    most = max(places, key=lambda place: places[place], default="")
    return f" in {most}" if most else ""


def _waited_for(
    timeline: Timeline, track: int, waits: Sequence[Total], seen: tuple[int, ...]
) -> tuple[str, Culprit | None]:
    """Who ended most of a thread's waits, and what that one mostly did; '' nobody that is known.

    Of another process, a thread that only passes on what others of that process made stands for the
    busiest of them. Of the same process, it is who fills the queue that the thread waits in (the
    thread that writes a worker's results to a pipe waits for the one that makes them).
    """
    ended: dict[int, int] = defaultdict(int)
    for one in waits:
        if one.kind == TotalKind.BLOCKED and one.waker_track >= 0:
            ended[one.waker_track] += one.waker_ns
    whole = sum(one.ns for one in waits)
    before = timeline.tracks[track].pid
    filled: dict[int, int] = defaultdict(int)
    for one in waits:
        if one.wait_detail == WaitDetail.QUEUE and one.waker_track not in (-1, track, *seen):
            same = timeline.tracks[one.waker_track].pid == before
            filled[one.waker_track] += one.waker_ns if same else 0
    fills = max(filled, key=lambda other: filled[other], default=-1)
    if fills >= 0 and 2 * filled[fills] >= whole and len(seen) < WAITED_HOPS:
        return _doing(timeline, fills, Cause.INPUT, (*seen, track))
    processes: dict[int, int] = defaultdict(int)
    for other, ns in ended.items():
        processes[timeline.tracks[other].pid] += ns
    processes.pop(before, None)
    most = max(processes, key=lambda pid: processes[pid], default=0)
    if len(seen) >= WAITED_HOPS or 2 * sum(processes.values()) < whole or not most:
        return "", None
    busy: dict[int, int] = defaultdict(int)
    for total in timeline.totals:
        if timeline.tracks[total.track].pid == most and total.kind == TotalKind.SAMPLED:
            busy[total.track] += total.ns
    busiest = max(busy, key=lambda other: busy[other], default=-1)
    if busiest < 0 or busiest in seen:
        return "", None
    return _doing(timeline, busiest, Cause.INPUT, (*seen, track))
