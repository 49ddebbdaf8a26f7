# SPDX-License-Identifier: Apache-2.0
"""Verdicts on the threads that launch work, for captures without a trace of the device.

Such a capture has totals for each thread (exact, but for many short waits): time in calls that wait
for the device, in copies, blocked (with the reason and the waking thread), and in the run queue;
samples give the code that it ran. Waits within device calls count as these calls. The verdict is on
the thread.

If single runs of the device were timed, the share of time in which it computed is known
(`sonde.analyze.device_totals`). Threads of a process that wait for one another (the forward pass in
one, the backward pass in another) launch in turns, and get one verdict together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from sonde.analyze.advice import next_step_on
from sonde.analyze.asked_threads import mark_answers
from sonde.analyze.deciding_threads import deciding_threads
from sonde.analyze.device_shares import device_shares
from sonde.analyze.device_totals import with_runs
from sonde.analyze.far_ends import asked_by, named
from sonde.analyze.host_words import without_device
from sonde.analyze.offenders import others_on_device, own_use
from sonde.analyze.ranking import LEAST_SHARE, ranked_bounds
from sonde.analyze.services import SERVICES, Service, services, with_next_requests
from sonde.analyze.thread_time import locations
from sonde.analyze.trace_totals import ExactTime
from sonde.analyze.verdict_on_threads import CODE, verdict_on
from sonde.model.causes import Bound, Cause
from sonde.model.serving import EVENT_LOOPS
from sonde.model.timeline import (
    Activity,
    CallKind,
    ThreadOwner,
    Timeline,
    Total,
    TotalKind,
    WaitDetail,
)
from sonde.model.verdict import Advice, CauseShare, DeviceShare, Verdict

LAUNCH_NS = 5_000
"""Estimated CPU time of one launch; launches are probed on request only."""
HOPS = 6
"""Longest chain of threads of which each wakes the next."""
THREADS = 3
"""At most this many threads get a verdict."""
LAUNCHING = 16
"""At most this many threads that launch are compared, for whether they launch in turns."""
PRESENT = 0.05
"""Of the recorded time: where nobody was chosen, a thread that is there for less decides nothing,
also if it alone called a device, as a test does for a second in an hour of a machine."""
LEAST_CALLS = 0.05
"""Threads with a smaller fraction of the busiest thread's call time get no verdict."""
TURNS = 0.05
"""Threads that wait for each other for this part of the time, each of them, take turns."""
FILLS = 0.85
"""Two threads' waits for each other that fill this part of the time, those of one of them in no
code of the program: it works only when it is asked to."""
LEAST_WORK = 0.1
"""Threads that asked for a smaller part of a device's time do not decide when it stalls."""

HANDED_OVER = "what other threads or processes hand over"
LEADS = 0.01
"""Of the recorded time, on CPUs: a program that started a service and works so much itself is what
is asked about. One that only starts services, and waits for their end, does not."""
IDLE = 0.5
"""A thread that waits for requests for this part of the record has nothing else to do."""

_LAUNCHES = (Activity.LAUNCH_PATH, Activity.FULL_QUEUE)
"""What a thread that launches work does on a CPU."""
_NO_TURN = (WaitDetail.INPUT, WaitDetail.GIL, WaitDetail.OWN_LOCK)
"""Waits that are not for another thread's launches."""
_RUN_KINDS = (
    *(TotalKind.RUN, TotalKind.INTERRUPTED, TotalKind.UNDERFILLED),
    TotalKind.STREAM,
)
_WAITS = {
    *(Bound.LOCK, Bound.IO, Bound.INPUT, Bound.CPU_CONTENTION, Bound.STOPPED),
    *(Bound.PAGE_FAULT, Bound.ALLOCATION),
}
"""Bounds that waits of a thread add up to."""
_COUNTED = {
    ("sonde.gpu.dram.active", ""): Bound.MEMORY,
    ("sonde.gpu.tensor.active", "any"): Bound.COMPUTE,
}
"""Hardware counters, and the bound that each one indicates."""


def thread_verdicts(timeline: Timeline, exact: ExactTime | None = None) -> list[Verdict]:
    """Verdicts on the threads that called a device most, `THREADS` at most; threads that take turns
    have one together. Where nothing called a device, on the busiest threads. `exact`: of a trace,
    whose runs are all among the totals (`trace_totals`)."""
    by_track: dict[int, list[Total]] = defaultdict(list)
    runs: dict[int, list[Total]] = defaultdict(list)
    asked: dict[int, int] = defaultdict(int)
    own = {track for track, one in enumerate(timeline.tracks) if one.owner == ThreadOwner.SONDE}
    beside = {track for track in range(len(timeline.tracks)) if not timeline.is_chosen(track)}
    for total in timeline.totals:
        if total.track in own or total.waker_track in own or total.track in beside:
            continue
        if total.kind in _RUN_KINDS:
            runs[timeline.tracks[total.track].pid].append(total)
            asked[total.track] += total.count * LAUNCH_NS * (total.kind == TotalKind.RUN)
        else:
            by_track[total.track].append(total)
            asked[total.track] += total.ns if total.kind == TotalKind.CALL else 0
    for track, count in enumerate(np.bincount(timeline.calls.track).tolist()):
        asked[track] += 0 if track in own or track in beside else count * LAUNCH_NS
    window = max(1, timeline.end_ns - timeline.start_ns)
    ranked = sorted(((ns, track) for track, ns in asked.items() if ns), reverse=True)
    if not timeline.chosen and exact is None:
        ranked = _present(ranked, by_track, runs, window)
    if not ranked:
        return _without_device(timeline, by_track, window)
    chosen = [track for ns, track in ranked[:THREADS] if ns >= LEAST_CALLS * max(ranked)[0]]
    timed = timeline.timed_ns
    timed_ns = max(1, timed[1] - timed[0]) if timed else window
    verdicts = []
    _waits_for_device(timeline, by_track)
    mark_answers(timeline, by_track)
    launching = [track for _, track in ranked[:LAUNCHING]]
    groups = _in_turns(timeline, launching, by_track, window)
    groups = [turns for turns in groups if not set(chosen).isdisjoint(turns)]
    for turns in _with_work(groups, timeline, runs):
        pid = timeline.tracks[turns[0]].pid
        mine = runs[pid]
        totals = [one for track in turns for one in by_track[track]]
        copies = {one.direction for one in mine if one.call == CallKind.COPY}
        verdict, time = verdict_on(timeline, turns, totals, window, copies, bool(mine))
        span = timed if timed and exact is None else (timeline.start_ns, timeline.end_ns)
        active = _active(timeline, pid, span)
        devices = timeline.gpus_of.get(pid, ())
        others = others_on_device(timeline, devices, {pid}, span)
        reported = own_use(timeline, devices, pid, span)
        shares = _shares(timeline, pid, by_track, window, timed_ns, reported)
        verdicts.append(
            with_runs(
                verdict,
                mine,
                totals,
                window,
                timed_ns,
                active,
                others,
                time,
                reported,
                shares,
                exact if mine else None,
            )
        )
    return verdicts


def _present(
    ranked: list[tuple[int, int]],
    by_track: Mapping[int, Sequence[Total]],
    runs: Mapping[int, Sequence[Total]],
    window: int,
) -> list[tuple[int, int]]:
    """Of (what it asked a device for, thread): those that are there for long enough to decide."""
    there: dict[int, int] = defaultdict(int)
    for totals in (*by_track.values(), *runs.values()):
        for one in totals:
            there[one.track] += one.ns
    return [one for one in ranked if max(one[0], there[one[1]]) >= PRESENT * window]


def causes_of_threads(timeline: Timeline) -> dict[str, dict[Cause, CauseShare]]:
    """By label, the causes of the time of each thread of the program, with waits for the device
    among them as synchronization; shares are of the record's length."""
    by_track: dict[int, list[Total]] = defaultdict(list)
    for total in timeline.totals:
        if timeline.tracks[total.track].owner == ThreadOwner.PROGRAM:
            by_track[total.track].append(total)
    window = max(1, timeline.end_ns - timeline.start_ns)
    found = {}
    for track, totals in by_track.items():
        verdict, time = verdict_on(timeline, [track], totals, window)
        causes = {one.key: one for one in verdict.causes}
        if time.waited > 0:
            at = locations(time.wait_places, time.waited, time.callers)
            empty = CauseShare.empty(Cause.SYNCHRONIZATION, verdict.device_name, at)
            share = time.waited / window
            causes[Cause.SYNCHRONIZATION] = replace(empty, ns=time.waited, share=share)
        found[verdict.device_name] = causes
    return found


def _shares(
    timeline: Timeline,
    pid: int,
    by_track: Mapping[int, Sequence[Total]],
    window: int,
    timed_ns: int,
    reported: float | None,
) -> list[DeviceShare]:
    """What a process's runs took of the time, copies of all its threads included."""
    runs = timeline.single_runs
    mine = runs.take(timeline.pid_of_track[runs.track] == pid)
    calls = [
        one
        for track, totals in by_track.items()
        if timeline.tracks[track].pid == pid
        for one in totals
    ]
    return device_shares(mine, timeline.names, calls, window, timed_ns, reported)


def _with_work(
    groups: list[list[int]], timeline: Timeline, runs: Mapping[int, list[Total]]
) -> list[list[int]]:
    """The groups of threads that asked for a good part of the device's time for their process; all
    of a process whose runs are not known."""
    found = []
    for turns in groups:
        mine = [one for one in runs[timeline.tracks[turns[0]].pid] if one.kind == TotalKind.RUN]
        work = sum(one.ns for one in mine if one.track in turns)
        if work >= LEAST_WORK * sum(one.ns for one in mine):
            found.append(turns)
    return found or groups


def _without_device(
    timeline: Timeline, by_track: dict[int, list[Total]], window: int
) -> list[Verdict]:
    """Verdicts on the threads that decide in a capture in which nothing called a device."""
    by_track = with_next_requests(timeline, by_track)
    waiting = _idle_threads(by_track, window)
    threads = deciding_threads(timeline, by_track, window)
    served = services(timeline, by_track, window)[:SERVICES]
    answering = {track for one in served for track in one.totals}
    threads = [one for one in threads if answering.isdisjoint(one.tracks)]
    threads = threads[: max(0, THREADS - len(served))]
    leading = _leading(timeline, (one.tracks for one in threads), by_track, window)
    helping: list[Verdict] = []
    verdicts: list[Verdict] = []
    for one in served:
        to = helping if _helps(timeline, one, leading) else verdicts
        to.append(_of_service(timeline, one, window))
    for group in threads:
        totals = []
        for track in group.tracks:
            takes_requests = any(one.serves or one.service for one in by_track[track])
            handed_by = () if takes_requests else waiting
            totals += [_on_host(one, handed_by) for one in by_track[track]]
        held_up, number = group.are_held_up, len(group.tracks)
        verdict, _ = verdict_on(
            timeline, group.tracks, totals, window, on_host=True, are_held_up=held_up
        )
        verdicts.append(without_device(verdict, number))
    return verdicts + helping


def _leading(
    timeline: Timeline,
    threads: Iterable[Sequence[int]],
    by_track: Mapping[int, Iterable[Total]],
    window: int,
) -> set[int]:
    """The processes whose deciding threads, which answer no requests, also work themselves."""
    worked: dict[int, int] = defaultdict(int)
    for track in {track for tracks in threads for track in tracks}:
        ns = sum(one.ns for one in by_track[track] if one.kind == TotalKind.SAMPLED)
        worked[timeline.tracks[track].pid] += ns
    return {pid for pid, ns in worked.items() if ns >= LEADS * window}


def _helps(timeline: Timeline, service: Service, leading: Container[int]) -> bool:
    """Whether a service is a helper of a program that leads it: that started its processes, and
    works. The verdict on that program goes first, as nobody else asks the helper."""

    def is_led(pid: int) -> bool:
        seen = {pid}
        while (pid := timeline.parents.get(pid, 0)) and pid not in seen:
            if pid in leading:
                return True
            seen.add(pid)
        return False

    return all(is_led(timeline.tracks[track].pid) for track in service.tracks)


def _of_service(timeline: Timeline, service: Service, window: int) -> Verdict:
    """The verdict on the requests that some threads answer; shares are of the time of requests."""
    totals = [_on_host(one, ()) for each in service.totals.values() for one in each]
    tracks, whole = service.tracks, service.ns
    verdict, _ = verdict_on(timeline, tracks, totals, window, on_host=True, whole=whole)
    number = len(tracks)
    # A wait that began before the record counts whole, so there may be a little more than that.
    mean = min(whole / window, number)
    at_a_time = f"{mean:.1f}" if mean >= 1 else f"{mean:.2f}"
    which = f"{number:,} threads that answer requests" if number > 1 else "the thread that answers"
    line = f"{at_a_time} requests at a time on average, in {which}"
    if service.between >= LEAST_SHARE * whole:
        waited = 100 * service.between / (whole + service.between)
        # Where a handler awaits an answer, the loop waits, and no stack shows for whom.
        is_loop = service.file in EVENT_LOOPS
        line += ", without what its handlers await" * is_loop
        line += f"; for {waited:.0f} % of their time they wait for the next one"
        line += ", or for what handlers await" * is_loop
        if is_loop and (asked := asked_by(timeline, tracks)):
            line += f", such as an answer of {named(asked)}"
    is_full = service.tasks and service.between < LEAST_SHARE * (whole + service.between)
    line += "; all of them are busy: further tasks wait for a thread" * is_full
    evidence = ["shares are of the time of requests", line, *verdict.evidence[1:]]
    found = replace(verdict, evidence=evidence, service=service.name, request_ns=whole)
    found = without_device(found, number)
    title = Cause.INPUT.description  # what another thread hands over is no input to a request
    return replace(
        found,
        causes=[replace(one, title=one.title.replace(title, HANDED_OVER)) for one in found.causes],
        evidence=[line.replace(title, HANDED_OVER) for line in found.evidence],
    )


def _idle_threads(by_track: Mapping[int, Iterable[Total]], window: int) -> set[int]:
    """The threads that mostly wait for the next connection, request or task."""
    idle: dict[int, int] = defaultdict(int)
    for track, totals in by_track.items():
        idle[track] = sum(one.ns for one in totals if one.serves)
    return {track for track, ns in idle.items() if ns >= IDLE * window}


def _on_host(one: Total, handed_by: Container[int]) -> Total:
    """A total of a program that calls no device: a framework's dispatch launches nothing there, and
    a wait for the next request or task is idle. So is one for a thread of `handed_by`: idle threads
    that hand requests over by a queue. A thread that takes requests itself has none: what it waits
    for in between, it waits for to answer one."""
    if one.kind == TotalKind.BLOCKED:
        from_idle = one.wait_detail == WaitDetail.QUEUE and one.waker_track in handed_by
        is_idle = one.serves or (from_idle and 2 * one.waker_ns >= one.ns)
        return replace(one, wait_detail=WaitDetail.IDLE) if is_idle else one
    launches = one.kind == TotalKind.SAMPLED and one.name in _LAUNCHES
    return replace(one, name=Activity.CODE) if launches else one


def _active(timeline: Timeline, pid: int, span: tuple[int, int]) -> dict[Bound, float]:
    """Mean share of a time span in which memory and tensor cores of the process's devices were
    active, by the bound that each indicates."""
    found: dict[Bound, list[float]] = defaultdict(list)
    for one in timeline.counters:
        bound = _COUNTED.get((one.name, one.which))
        if bound and one.device in timeline.gpus_of.get(pid, ()):
            inside = (one.time_ns >= span[0]) & (one.time_ns <= span[1])
            found[bound] += one.value[inside].tolist()
    return {bound: sum(values) / len(values) for bound, values in found.items() if values}


def _waits_for_device(timeline: Timeline, by_track: Mapping[int, list[Total]]) -> None:
    """Marks waits on a futex that are waits for the device (`WaitDetail.DEVICE`).

    Some runtimes (XLA's) wait for the device through a thread of the driver, which wakes a thread
    of the runtime, which wakes the next, up to the launching thread. Each waits on a futex. A
    thread of the driver is one whose stacks hold the driver's code only.
    """
    woken: dict[int, int] = {}
    waits: dict[int, list[Total]] = defaultdict(list)
    for track, totals in by_track.items():
        ended: dict[int, int] = defaultdict(int)
        for one in totals:
            on_futex = one.kind == TotalKind.BLOCKED and one.name == "futex"
            if on_futex and one.wait_detail in (WaitDetail.NONE, WaitDetail.QUEUE):
                waits[track].append(one)
                if one.waker_track >= 0:
                    ended[one.waker_track] += one.waker_ns
        whole = sum(one.ns for one in waits[track])
        waker = max(ended, key=lambda other: ended[other], default=-1)
        if waker >= 0 and 2 * ended[waker] >= whole:
            woken[track] = waker
    for track in woken:
        waker = woken[track]
        for _ in range(HOPS):
            if timeline.tracks[waker].owner != ThreadOwner.DRIVER:
                waker = woken.get(waker, waker)
        if timeline.tracks[waker].owner == ThreadOwner.DRIVER:
            for one in waits[track]:
                at = by_track[track].index(one)
                by_track[track][at] = replace(one, wait_detail=WaitDetail.DEVICE)


def with_short_waits(timeline: Timeline, verdicts: list[Verdict]) -> list[Verdict]:
    """The verdicts on devices with host time split by the totals of the launching thread.

    A capture keeps single waits from 10 ms on only, by default. Shorter ones count as host code at
    first.
    """
    if not any(one.bounds[0].key == Bound.HOST for one in verdicts):
        return verdicts
    of_threads = thread_verdicts(timeline)
    return [_split(one, of_threads) if one.bounds[0].key == Bound.HOST else one for one in verdicts]


def _split(verdict: Verdict, of_threads: list[Verdict]) -> Verdict:
    """Splits the host code of a verdict in the proportions of its thread's waits and code."""
    host = next((one for one in verdict.causes if one.key == Cause.HOST), None)
    exact = next((one for one in of_threads if host and one.device_name == host.thread), None)
    exact = exact or (of_threads[0] if len(of_threads) == 1 else None)
    if host is None or exact is None:
        return verdict
    parts = [one for one in exact.causes if one.bound in _WAITS or one.key in CODE]
    whole = sum(one.ns for one in parts)
    if not whole:
        return verdict
    causes: dict[Cause, CauseShare] = {
        one.key: one for one in verdict.causes if one.key != Cause.HOST
    }
    left = host.ns
    for number, part in enumerate(parts):
        ns = host.ns * part.ns // whole if number + 1 < len(parts) else left
        left -= ns
        before = host if part.key == Cause.HOST else causes.get(part.key, part)
        ns += causes[part.key].ns if part.key in causes else 0
        causes[part.key] = replace(before, ns=ns, share=ns / verdict.window_ns)
    ranked = sorted(causes.values(), key=lambda one: -one.ns)
    bounds = ranked_bounds((one.bound, one.share) for one in ranked)
    if bounds[0].key == Bound.HOST:
        return verdict
    line = f"{ranked[0].title}: by totals of the thread; single waits were short"
    advice = [Advice(next_step_on(one), one.share) for one in ranked if one.share >= LEAST_SHARE]
    return replace(
        verdict, bounds=bounds, causes=ranked, evidence=[*verdict.evidence, line], advice=advice
    )


def _in_turns(
    timeline: Timeline, chosen: list[int], by_track: dict[int, list[Total]], window: int
) -> list[list[int]]:
    """Groups of threads that launch in turns, without their waits for one another in `by_track`.

    A wait in a queue that another thread fills is no turn, but where that thread launches more;
    nor is one for the interpreter lock, or a lock of the program, which threads pass on. A thread
    that works only when another one asks it to, such as that of a backward pass, has turns however
    short they are.
    """
    launched = {track: _launching_ns(by_track[track]) for track in chosen}

    def is_turn(one: Total) -> bool:
        waker = one.waker_track
        if waker not in launched or waker == one.track or one.name != "futex":
            return False
        if timeline.tracks[waker].pid != timeline.tracks[one.track].pid:
            return False
        if one.kind != TotalKind.BLOCKED or one.wait_detail in _NO_TURN:
            return False
        return one.wait_detail != WaitDetail.QUEUE or launched[waker] >= launched[one.track]

    waited: dict[tuple[int, int], int] = defaultdict(int)
    unplaced: dict[tuple[int, int], int] = defaultdict(int)
    for track in chosen:
        for one in filter(is_turn, by_track[track]):
            waited[track, one.waker_track] += one.waker_ns
            unplaced[track, one.waker_track] += one.waker_ns * (not one.location)
    groups = {track: [track] for track in chosen}
    for (track, waker), ns in waited.items():
        back = waited.get((waker, track), 0)
        idle = unplaced[track, waker]
        is_asked = idle >= back > 0 and idle + back >= FILLS * window
        if is_asked or min(ns, back) >= TURNS * window:
            both = {*groups[track], *groups[waker]}
            groups |= dict.fromkeys(both, sorted(both, key=chosen.index))
    for track in chosen:
        mine = groups[track]
        kept = [one for one in by_track[track] if not (one.waker_track in mine and is_turn(one))]
        by_track[track] = kept
    return [group for track, group in groups.items() if track == group[0]]


def _launching_ns(totals: Iterable[Total]) -> int:
    """On-CPU time on the launch path, by the stacks."""
    mine = (one for one in totals if one.kind == TotalKind.SAMPLED and one.name in _LAUNCHES)
    return sum(one.ns for one in mine)
