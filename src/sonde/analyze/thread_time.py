# SPDX-License-Identifier: Apache-2.0
"""The time of threads by cause, and by place in the program, from totals.

On a CPU the stack shows what a thread did: a framework's dispatch, the runtime and the driver are
the launch path, everything else is the code that it is in. Off a CPU the reason, the stack and the
thread that ended the wait show what it waited for. Names of threads and of the program's functions
are printed, and decide nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sonde.analyze.causes import IO_REASONS, QUEUE_REASONS, descends
from sonde.analyze.device_waits import RESULT_BYTES
from sonde.analyze.ranking import LEAST_SHARE
from sonde.analyze.round_trips import is_round_trip
from sonde.model.causes import Cause
from sonde.model.timeline import (
    Activity,
    CallKind,
    CopyDirection,
    ThreadOwner,
    Timeline,
    Total,
    TotalKind,
    WaitDetail,
)
from sonde.model.user_code import function_of
from sonde.model.verdict import CauseShare, CodeLocation

FOR_COPIES = 0.8
"""From this many copies to the device per wait for it on, the waits are for the copies."""
COPIED_NS_PER_BYTE = 1.0
"""Copies to the host take at most this long, on the slowest links; a call that takes longer waited
for the work before the copy. Used where no such copy was timed on the device."""
POLLS = 0.9
"""A function that receives and sleeps for this share of its time, and does nothing else, polls."""
BURSTS = 0.5
"""A function whose samples lie in fewer than half of the parts of a record that samples at random
times would lie in, runs in bursts."""
LEAST_SAMPLES = 10
"""Fewer samples of a function do not show bursts."""
LINES = 4
"""Places that are named for a cause, those with the most time: at most this many, or all with
`LEAST_SHARE` of it."""

_OF_CALL = {
    CallKind.COPY: Cause.COPY,
    CallKind.ALLOC: Cause.ALLOCATION,
    CallKind.FREE: Cause.ALLOCATION,
    CallKind.PIN: Cause.ALLOCATION,
    CallKind.BUILD: Cause.BUILD,
}
"""All other calls are the launch path: memory sets are short, and queue like launches."""
_OF_REASON = {
    **dict.fromkeys(IO_REASONS, Cause.IO),
    "futex": Cause.LOCK,
    "stopped": Cause.STOPPED,
    "page fault": Cause.PAGE_FAULT,
    "memory": Cause.PAGE_FAULT,
    "sleep": Cause.SLEEP,
}
_OF_ACTIVITY = {
    Activity.INPUT: Cause.INPUT,
    Activity.PAGE_FAULT: Cause.PAGE_FAULT,
    Activity.LAUNCH_PATH: Cause.LAUNCH,
    Activity.BUILD: Cause.BUILD,
    Activity.ALLOCATION: Cause.ALLOCATION,
    Activity.COPY: Cause.COPY,
    Activity.DEVICE_WAIT: Cause.SYNCHRONIZATION,
    Activity.FILE: Cause.IO,
    Activity.COMMUNICATION: Cause.COLLECTIVE,
    Activity.SPIN: Cause.SPIN,
    Activity.CODE: Cause.HOST,
    Activity.UNKNOWN: Cause.UNKNOWN,
}
ACTIVITY_OF_CALL = {
    CallKind.SYNC: Activity.DEVICE_WAIT,
    CallKind.COPY: Activity.COPY,
    CallKind.ALLOC: Activity.ALLOCATION,
    CallKind.FREE: Activity.ALLOCATION,
    CallKind.PIN: Activity.ALLOCATION,
    CallKind.BUILD: Activity.BUILD,
}
"""What samples within a timed call show; of all other calls, `Activity.LAUNCH_PATH`."""
_INSIDE_CALLS = ("futex", "poll", "driver", "read", "system call")
"""Reasons for which threads block within device calls, where no stack shows more."""


@dataclass(slots=True)
class ThreadTime:
    """The time of threads that launch in turns. Lengths in ns."""

    ns: dict[Cause, int] = field(default_factory=lambda: defaultdict(int))
    count: dict[Cause, int] = field(default_factory=lambda: defaultdict(int))
    places: dict[Cause, dict[str, int]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(int))
    )
    """By cause and place."""
    others: dict[Cause, dict[int, int]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(int))
    )
    """By cause, and by the track of the thread that ended the waits."""
    waited: int = 0
    """In calls that wait for the device."""
    wait_places: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """The same by place, where that is known."""
    for_copies: bool = False
    """Waits for the device follow copies to it, one for one."""
    spread: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By function: (on-CPU samples, `Total.when`)."""
    timed_out: int = 0
    """In waits that only a timer can have ended (`_with_timers`)."""
    answers: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """In waits for threads that ask others when they are asked, by track (`asked_threads`)."""
    callers: Mapping[str, str] = field(default_factory=dict)
    """`Timeline.callers`."""

    def add(self, cause: Cause, ns: int, one: Total) -> None:
        """Adds a part of a total to a cause."""
        if ns <= 0:
            return
        self.ns[cause] += ns
        self.count[cause] += one.count
        if one.location:
            self.places[cause][one.location] += ns
        if one.kind == TotalKind.BLOCKED and one.waker_track >= 0 and one.waker_ns:
            self.others[cause][one.waker_track] += min(ns, one.waker_ns)
            if one.wait_detail == WaitDetail.ANSWER:
                self.answers[one.waker_track] += min(ns, one.waker_ns)

    def wait(self, ns: int, one: Total) -> None:
        """Adds a wait for the device."""
        self.waited += max(0, ns)
        if one.location:
            self.wait_places[one.location] += ns


def thread_time(
    timeline: Timeline,
    totals: Sequence[Total],
    timed: Collection[CopyDirection] = (),
    callers: Mapping[str, str] | None = None,
) -> ThreadTime:
    """The time of threads by cause. `totals`: theirs, without waits for one another; `timed`:
    directions of copies whose time on the device is known, and counted there; `callers`: by
    location, in these threads; None: in all."""
    found = ThreadTime(callers=timeline.callers if callers is None else callers)
    called: dict[Activity, int] = defaultdict(int)
    in_copies = 0  # of the time in calls that copy, the part that waited
    for one in totals:
        if one.kind != TotalKind.CALL:
            continue
        builds = one.wait_detail == WaitDetail.GRAPH_CAPTURE
        activity = ACTIVITY_OF_CALL.get(one.call, Activity.LAUNCH_PATH)
        called[Activity.BUILD if builds else activity] += one.ns
        if builds:
            found.add(Cause.BUILD, one.ns, one)
        elif one.call == CallKind.SYNC:
            found.wait(one.ns, one)
        elif one.call == CallKind.COPY and one.direction == CopyDirection.D2H:
            copied = 0 if CopyDirection.D2H in timed else _copying_ns(one)
            found.add(Cause.COPY, copied, one)
            found.wait(one.ns - copied, one)
            in_copies += one.ns - copied
        elif one.direction == CopyDirection.D2D:  # within the device: it queues like a launch
            found.add(Cause.LAUNCH, one.ns, one)
        else:
            found.add(_OF_CALL.get(one.call, Cause.LAUNCH), one.ns, one)
    inside = sum(called.values())
    blocked = (one for one in totals if one.kind in (TotalKind.BLOCKED, TotalKind.RUNQUEUE))
    for one in sorted(blocked, key=_inside_rank):
        length = one.ns
        if _inside_rank(one)[0] < len(_INSIDE_CALLS) + 1 and one.kind == TotalKind.BLOCKED:
            within = min(length, inside)
            inside -= within
            length -= within
            if one.wait_detail in (WaitDetail.DEVICE, WaitDetail.IN_CALL):
                found.wait(length, one)
                continue
        found.add(cause_of(timeline, one), length, one)
    _on_cpu(found, totals, called, inside, in_copies / max(1, called[Activity.COPY]))
    _with_polling(found, {one.location for one in totals if _is_for_a_timer(one)})
    _with_timers(found, timeline, totals)
    found.for_copies = _wait_for_copies(totals)
    return found


def _on_cpu(
    found: ThreadTime,
    totals: Iterable[Total],
    called: dict[Activity, int],
    inside: int,
    waiting: float,
) -> None:
    """Adds samples. `called`: the time in calls; `inside`: the part of it that was not blocked;
    `waiting`: of the time in calls that copy, the part in which they waited for the device.

    A timed call is counted already: samples in it are left out up to its length, and what is beyond
    counts as the call does. Samples without a stack may lie in calls, too.
    """
    sampled: dict[Activity, list[Total]] = defaultdict(list)
    for one in totals:
        if one.kind == TotalKind.SAMPLED:
            sampled[Activity(one.name)].append(one)
    polled = sum(one.ns for one in sampled.pop(Activity.FULL_QUEUE, []))
    # Polling for room in a full queue is a wait for the device; graph launches are timed calls.
    timed = min(called[Activity.LAUNCH_PATH], polled, found.ns[Cause.LAUNCH])
    found.ns[Cause.LAUNCH] -= timed
    called[Activity.LAUNCH_PATH] -= timed
    inside -= timed
    found.waited += polled
    for activity, group in sampled.items():
        if activity == Activity.UNKNOWN:
            continue
        for one in group:
            samples, when = found.spread.get(function_of(one.location), (0, 0))
            found.spread[function_of(one.location)] = samples + one.samples, when | one.when
        whole = sum(one.ns for one in group)
        left_out = min(whole, called[activity])
        inside -= left_out
        for one in group:
            part = one.ns - left_out * one.ns // max(1, whole)
            if activity == Activity.DEVICE_WAIT:
                found.wait(part, one)
            elif activity == Activity.COPY:
                waited = round(waiting * part)
                found.wait(waited, one)
                found.add(Cause.COPY, part - waited, one)
            else:
                found.add(_OF_ACTIVITY[activity], part, one)
    for one in sampled.get(Activity.UNKNOWN, []):
        within = min(one.ns, max(0, inside))
        inside -= within
        found.add(Cause.UNKNOWN, one.ns - within, one)


def cause_of(timeline: Timeline, total: Total) -> Cause:
    """The cause of a wait."""
    if total.kind == TotalKind.RUNQUEUE:
        return Cause.RUN_QUEUE
    if total.wait_detail == WaitDetail.IDLE:
        return Cause.IDLE
    if total.wait_detail == WaitDetail.GIL:
        return Cause.GIL
    if total.wait_detail == WaitDetail.COMMUNICATION:
        return Cause.COLLECTIVE
    if total.wait_detail == WaitDetail.GRAPH_CAPTURE:
        return Cause.BUILD
    if total.wait_detail == WaitDetail.POOL:
        return Cause.POOL
    if total.wait_detail == WaitDetail.COMPUTE:
        return Cause.HOST
    if total.wait_detail == WaitDetail.ANSWER:
        return Cause.IO
    if _is_for_a_timer(total):
        return Cause.SLEEP
    if total.wait_detail == WaitDetail.ROOM:
        return Cause.FULL_QUEUE
    if total.wait_detail == WaitDetail.INPUT or _is_handed_over(timeline, total):
        return Cause.INPUT
    return _OF_REASON.get(total.name, Cause.UNKNOWN)


def _is_for_a_timer(total: Total) -> bool:
    """Whether a thread waits for something to be handed over and a timer ends it, always."""
    return total.wait_detail == WaitDetail.QUEUE and total.timed_out and total.name == "futex"


def _is_handed_over(timeline: Timeline, total: Total) -> bool:
    """Whether another thread or process of the program hands something over in the end.

    By the stack (a queue, a future, a condition), or because a thread or a worker process of the
    program ends a wait on a pipe or a socket that is no round trip, or a worker process a wait on a
    futex of both (a semaphore) that it does not wait for in turn.
    """
    if total.name not in QUEUE_REASONS:
        return False
    if total.wait_detail == WaitDetail.QUEUE:
        return True
    if total.waker_track < 0 or 2 * total.waker_ns < total.ns:
        return False
    me, other = timeline.tracks[total.track].pid, timeline.tracks[total.waker_track].pid
    if other == me:
        owner = timeline.tracks[total.waker_track].owner
        is_other = total.waker_track != total.track and owner == ThreadOwner.PROGRAM
        # What a request asks for by a socket is answered, and not made ahead.
        is_other &= not (total.service and total.name == "socket")
        return is_other and total.name != "futex"
    if not descends(timeline, other, me):
        return False
    if total.name == "futex":
        return not _waits_for(timeline, other, me)
    return not is_round_trip(timeline, total.track, total.waker_track)


def _waits_for(timeline: Timeline, pid: int, other: int) -> bool:
    """Whether a process waits on futexes for one that waits for it, too: they pass on a lock, where
    work that is handed over goes one way."""
    waited = timeline.ended_futexes_ns.get((pid, other), 0)
    return waited >= LEAST_SHARE * (timeline.end_ns - timeline.start_ns)


def _copying_ns(total: Total) -> int:
    """How long calls that copy to the host copied at most; the rest of them is a wait for the work
    before.

    Small ones read a result (a loss, a flag) and do nothing but wait.
    """
    if total.bytes <= RESULT_BYTES * total.count:
        return 0
    return min(total.ns, round(COPIED_NS_PER_BYTE * total.bytes))


def _with_polling(found: ThreadTime, timed_out: set[str]) -> None:
    """Counts sleeps between attempts to receive as waiting for what is received.

    Only of functions that do nothing else: what sleeps in a function that also works may be there
    for any reason. Nothing is received at the places `timed_out`.
    """
    spent = functions(found)
    for place, ns in list(found.places[Cause.SLEEP].items()):
        causes = spent[function_of(place)]
        both = causes.get(Cause.INPUT, 0) + causes.get(Cause.SLEEP, 0)
        if place in timed_out:
            continue
        if causes.get(Cause.INPUT, 0) and both >= POLLS * sum(causes.values()):
            for key, amount in ((Cause.SLEEP, -ns), (Cause.INPUT, ns)):
                found.ns[key] += amount
                found.places[key][place] += amount


def _with_timers(found: ThreadTime, timeline: Timeline, totals: Iterable[Total]) -> None:
    """Counts as sleep how long the thread and those that hand something over to it waited for each
    other: neither can have ended such a wait, so a timer did (a server that collects requests until
    a window of time is over, from clients that wait for its answer).

    Of two waits with lengths a and b in a window w, at least a + b - w is at the same time.
    """
    window = max(1, timeline.end_ns - timeline.start_ns)
    waits = [one for one in totals if one.kind == TotalKind.BLOCKED and one.name == "futex"]
    waits = [one for one in waits if one.wait_detail == WaitDetail.QUEUE]
    length = sum(one.ns for one in waits)
    tracks = {one.track for one in waits}
    ended: dict[int, int] = defaultdict(int)
    for one in waits:
        if one.waker_track >= 0 and one.waker_track not in tracks:
            ended[one.waker_track] += one.waker_ns
    all_ended = sum(ended.values())
    if len(tracks) != 1 or not all_ended:  # waits without a length have one of 0
        return
    (mine,) = tracks
    back = {track: timeline.ended_ns.get((track, mine), 0) for track in ended}
    both = sum(ns * max(0, length + back[track] - window) for track, ns in ended.items())
    moved = min(both // all_ended, length, found.ns[Cause.INPUT])
    if moved <= 0:
        return
    for one in waits:
        part = min(moved * one.ns // length, found.places[Cause.INPUT].get(one.location, 0))
        found.places[Cause.INPUT][one.location] -= part
        found.places[Cause.SLEEP][one.location] += part
    rest = found.ns[Cause.INPUT] - moved
    for track, ns in found.others[Cause.INPUT].items():
        found.others[Cause.INPUT][track] = ns * rest // found.ns[Cause.INPUT]
    found.ns[Cause.INPUT] = rest
    found.ns[Cause.SLEEP] += moved
    found.timed_out += moved


def _wait_for_copies(totals: Iterable[Total]) -> bool:
    """Whether the waits for the device follow copies to it, one for one."""
    calls = [one for one in totals if one.kind == TotalKind.CALL]
    waits = sum(one.count for one in calls if one.call == CallKind.SYNC)
    copies = [one for one in calls if one.call == CallKind.COPY]
    there = sum(one.count for one in copies if one.direction == CopyDirection.H2D)
    return waits > 0 and there >= FOR_COPIES * waits


def _inside_rank(total: Total) -> tuple[int, int]:
    """Order in which blocked time is counted as time within device calls."""
    rank = len(_INSIDE_CALLS) + 1
    if total.wait_detail in (WaitDetail.IN_CALL, WaitDetail.DEVICE, WaitDetail.GRAPH_CAPTURE):
        rank = 0
    elif total.name in _INSIDE_CALLS and not total.location and not total.wait_detail:
        rank = 1 + _INSIDE_CALLS.index(total.name)
    return rank, -total.ns


def functions(time: ThreadTime) -> dict[str, dict[Cause, int]]:
    """The time in each function of the program by cause, the most first: a checkpoint copies,
    serializes and writes. Waits for the device count as synchronization."""
    found: dict[str, dict[Cause, int]] = defaultdict(lambda: defaultdict(int))
    for cause, places in (*time.places.items(), (Cause.SYNCHRONIZATION, time.wait_places)):
        for place, ns in places.items():
            found[function_of(place)][cause] += ns
    return dict(sorted(found.items(), key=lambda item: -sum(item[1].values())))


def in_bursts(time: ThreadTime, function: str, parts: int) -> int:
    """In how many of `parts` of the record a function ran, if these are far fewer than as many
    samples at random times would lie in; else 0."""
    samples, when = time.spread.get(function, (0, 0))
    if samples < LEAST_SAMPLES or parts < 2:
        return 0
    expected = parts * (1 - (1 - 1 / parts) ** samples)
    found = when.bit_count()
    return found if found <= BURSTS * expected else 0


def locations(
    places: Mapping[str, int], whole: int, callers: Mapping[str, str]
) -> list[CodeLocation]:
    """The places with the most time; lines of one function are one place, its commonest line.
    `callers`: `Timeline.callers`."""
    functions: dict[str, dict[str, int]] = defaultdict(dict)
    for place, ns in places.items():
        functions[function_of(place)][place] = ns
    sums = {max(lines, key=lambda one: lines[one]): sum(lines.values())
            for lines in functions.values()}  # fmt: skip
    ranked = sorted(sums.items(), key=lambda item: -item[1])
    large = sum(ns >= LEAST_SHARE * max(1, whole) for _, ns in ranked)
    ranked = ranked[: max(LINES, large)]
    return [CodeLocation(it, ns / max(1, whole), callers.get(it, "")) for it, ns in ranked]


def cause_lines(causes: Iterable[CauseShare]) -> list[str]:
    """A line of evidence for each cause that is not small."""
    return [
        f"{one.title}: {100 * one.share:.1f} %" + "".join(f"; {fact}" for fact in one.facts)
        for one in causes
        if one.share >= LEAST_SHARE
    ]
