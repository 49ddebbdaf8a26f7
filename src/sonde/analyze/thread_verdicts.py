# SPDX-License-Identifier: Apache-2.0
"""Verdicts on the threads that launch work, for captures without a trace of the device.

Such a capture has exact totals for each thread: time in calls that wait for the device, in copies,
blocked (with the reason and the waking thread), and in the run queue; samples give the code that it
ran. Waits within device calls count as these calls. The verdict is on the thread.

If single runs of the device were timed, the share of time in which it computed is known
(`sonde.analyze.device_totals`). Threads of a process that wait for one another (the forward pass in
one, the backward pass in another) launch in turns, and get one verdict together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from sonde.analyze.advice import next_step, next_step_of_bound
from sonde.analyze.blame import LAUNCH_PATH_NS
from sonde.analyze.causes import IO_REASONS, LOADER
from sonde.analyze.device_totals import with_runs
from sonde.analyze.ranking import LEAST_SHARE, ranked_bounds
from sonde.model.causes import Bound, Cause, CauseDetail
from sonde.model.timeline import (
    Activity,
    CallKind,
    CopyDirection,
    Timeline,
    Total,
    TotalKind,
    WaitDetail,
)
from sonde.model.verdict import Advice, BoundShare, CauseShare, CodeLocation, Verdict

OWN_THREAD = "sonde"
"""The name of Sonde's own thread in a process; it is left out."""
LAUNCH_NS = 5_000
"""Estimated CPU time of one launch; launches are not probed."""
FOR_COPIES = 0.8
"""From this many copies to the device per wait, the waits are for the copies."""
DRIVER_THREADS = ("cuda-EvtHandlr",)
"""Names of driver threads that wake the program's threads when the device is done."""
HOPS = 6
"""Longest chain of threads of which each wakes the next."""
THREADS = 3
"""At most this many threads get a verdict."""
LEAST_CALLS = 0.05
"""Threads with a smaller fraction of the busiest thread's call time get no verdict."""

_OF_CALL = {
    CallKind.COPY: Cause.COPY,
    CallKind.SET: Cause.COPY,
    CallKind.ALLOC: Cause.ALLOCATION,
    CallKind.FREE: Cause.ALLOCATION,
    CallKind.PIN: Cause.ALLOCATION,
    CallKind.BUILD: Cause.BUILD,
    CallKind.LAUNCH: Cause.LAUNCH,
    CallKind.GRAPH_LAUNCH: Cause.LAUNCH,
    CallKind.OTHER: Cause.LAUNCH,
    CallKind.EVENT: Cause.LAUNCH,
}
_OF_REASON = {
    **dict.fromkeys(IO_REASONS, Cause.IO),
    "futex": Cause.LOCK,
    "stopped": Cause.STOPPED,
    "page fault": Cause.PAGE_FAULT,
    "memory": Cause.PAGE_FAULT,
    "sleep": Cause.SLEEP,
}
_OF_ACTIVITY = {Activity.INPUT: Cause.INPUT, Activity.PAGE_FAULT: Cause.PAGE_FAULT}
_OF_WAIT = {WaitDetail.GIL: Cause.GIL, WaitDetail.INPUT: Cause.INPUT}
_RUN_KINDS = (TotalKind.RUN, TotalKind.INTERRUPTED, TotalKind.UNDERFILLED)
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
_INSIDE_CALLS = ("futex", "poll", "driver", "read", "system call")
"""Reasons for which threads block within device calls."""


def thread_verdicts(timeline: Timeline) -> list[Verdict]:
    """A verdict on each thread that called a device, the busiest first; none without calls."""
    by_track: dict[int, list[Total]] = defaultdict(list)
    runs: dict[int, list[Total]] = defaultdict(list)
    asked: dict[int, int] = defaultdict(int)
    own = {track for track, one in enumerate(timeline.tracks) if one.name == OWN_THREAD}
    labels = {timeline.tracks[track].label for track in own}
    for total in timeline.totals:
        if total.track in own or total.waker in labels:
            continue
        if total.kind in _RUN_KINDS:
            runs[timeline.tracks[total.track].pid].append(total)
            asked[total.track] += total.count * LAUNCH_NS
        else:
            by_track[total.track].append(total)
            asked[total.track] += total.ns if total.kind == TotalKind.CALL else 0
    for track, count in enumerate(np.bincount(timeline.calls.track).tolist()):
        asked[track] += 0 if track in own else count * LAUNCH_NS
    window = max(1, timeline.end_ns - timeline.start_ns)
    ranked = sorted(((ns, track) for track, ns in asked.items() if ns), reverse=True)
    chosen = [track for ns, track in ranked[:THREADS] if ns >= LEAST_CALLS * max(ranked)[0]]
    timed = timeline.timed_ns
    timed_ns = max(1, timed[1] - timed[0]) if timed else window
    verdicts = []
    _waits_for_device(timeline, by_track)
    for turns in _in_turns(timeline, chosen, by_track):
        mine = runs[timeline.tracks[turns[0]].pid]
        launches = sum(one.count for one in mine if one.track in turns) * window / timed_ns
        totals = [one for track in turns for one in by_track[track]]
        verdict = _verdict(timeline, turns, totals, window, launches)
        span = timed or (timeline.start_ns, timeline.end_ns)
        active = _active(timeline, timeline.tracks[turns[0]].pid, span)
        verdicts.append(with_runs(verdict, mine, totals, window, timed_ns, active))
    return verdicts


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
    of the runtime, which wakes the next, up to the launching thread. Each waits on a futex.
    """
    tracks = {one.label: track for track, one in enumerate(timeline.tracks)}
    woken: dict[int, Total] = {}
    for track, totals in by_track.items():
        for one in totals:
            on_futex = one.kind == TotalKind.BLOCKED and one.name == "futex"
            if on_futex and not one.wait_detail and one.waker and 2 * one.waker_ns >= one.ns:
                woken[track] = one
    for track, waits in woken.items():
        waker = waits.waker
        for _ in range(HOPS):
            next_one = woken.get(tracks.get(waker, -1))
            if next_one and not waker.startswith(DRIVER_THREADS):
                waker = next_one.waker
        if waker.startswith(DRIVER_THREADS):
            by_track[track][by_track[track].index(waits)] = replace(
                waits, wait_detail=WaitDetail.DEVICE
            )


def with_short_waits(timeline: Timeline, verdicts: list[Verdict]) -> list[Verdict]:
    """The verdicts on devices with host time split by the totals of the launching thread.

    A capture keeps single waits from 10 ms on only. Shorter waits count as host code at first.
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
    parts = [one for one in exact.causes if one.bound in _WAITS or one.key == Cause.HOST]
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
    advice = [Advice(next_step(one.key), one.share) for one in ranked if one.share >= LEAST_SHARE]
    return replace(
        verdict, bounds=bounds, causes=ranked, evidence=[*verdict.evidence, line], advice=advice
    )


def _in_turns(
    timeline: Timeline, chosen: list[int], by_track: dict[int, list[Total]]
) -> list[list[int]]:
    """Groups of threads that wait for one another, without these waits in `by_track`."""
    tails = {f"({timeline.tracks[track].number})": track for track in chosen}
    groups: dict[int, list[int]] = {}
    for track in chosen:
        others: set[int] = set()
        kept = []
        for one in by_track[track]:
            waker = tails.get(one.waker.rpartition(" ")[2], track)
            mine = timeline.tracks[waker].pid == timeline.tracks[track].pid
            if one.kind == TotalKind.BLOCKED and one.name == "futex" and mine and waker != track:
                others.add(waker)
            else:
                kept.append(one)
        by_track[track] = kept
        joined = [groups[one] for one in [track, *others] if one in groups]
        group = sorted(
            {track, *others, *(one for each in joined for one in each)}, key=chosen.index
        )
        groups |= dict.fromkeys(group, group)
    return [group for track, group in groups.items() if track == group[0]]


def _verdict(
    timeline: Timeline, turns: list[int], totals: list[Total], window: int, launches: float
) -> Verdict:
    """The verdict on threads that launch in turns, under the name of the first.

    `launches`: their estimated number in `window` ns; 0 unknown.
    """
    track = turns[0]
    ns: dict[Cause, int] = defaultdict(int)
    count: dict[Cause, int] = defaultdict(int)
    facts: dict[Cause, list[str]] = defaultdict(list)
    inside = sum(one.ns for one in totals if one.kind == TotalKind.CALL)
    waited = 0
    sampled = {one.name: one.ns for one in totals if one.kind == TotalKind.SAMPLED}
    for one in sorted(totals, key=lambda one: (_inside_rank(one), -one.ns)):
        if one.kind == TotalKind.SAMPLED:
            continue
        if one.kind == TotalKind.CALL and one.call == CallKind.SYNC:
            waited += one.ns
            continue
        if one.wait_detail == WaitDetail.DEVICE:
            within = min(one.ns, inside)
            inside -= within
            waited += one.ns - within
            continue
        length = one.ns
        if one.kind == TotalKind.BLOCKED and one.name in _INSIDE_CALLS:
            within = min(length, inside)
            inside -= within
            length -= within
        cause = _cause_of(one)
        ns[cause] += length
        count[cause] += one.count
        if length >= LEAST_SHARE * window and one.waker:
            facts[cause].append(f"woken by {one.waker}")
    running, locations = _running(timeline, turns)
    running = max(0, running - inside)  # the rest of `inside` was on-CPU time
    # Polling for room in a full queue is a wait for the device.
    polled = sampled.get(Activity.FULL_QUEUE, 0)
    part = min(running, polled)
    running -= part
    in_graph_launches = min(ns[Cause.LAUNCH], polled - part)  # those calls are timed
    ns[Cause.LAUNCH] -= in_graph_launches
    waited += part + in_graph_launches
    for activity, cause in _OF_ACTIVITY.items():
        part = min(running, sampled.get(activity, 0))
        running -= part
        ns[cause] += part
    ns[Cause.LAUNCH if running <= LAUNCH_PATH_NS * launches else Cause.HOST] += running
    if _wait_for_copies(totals):
        ns[Cause.COPY] += waited
        waited = 0
    # Time without a CPU within a call that waits counts as without a CPU.
    beyond = max(0, waited + sum(ns.values()) - window * len(turns))
    waited -= min(waited, beyond, ns[Cause.RUN_QUEUE] + ns[Cause.STOPPED])
    causes = [
        CauseShare(
            key=cause,
            title=cause.description,
            bound=cause.bound,
            detail=CauseDetail.NONE,
            ns=length,
            share=length / window,
            count=count[cause],
            longest_ns=0,
            thread=timeline.tracks[track].label,
            locations=locations if cause in (Cause.HOST, Cause.LAUNCH) else [],
            facts=facts[cause],
        )
        for cause, length in sorted(ns.items(), key=lambda item: -item[1])
        if length > 0
    ]
    bounds = _bounds(causes, waited / window)
    evidence = [f"in calls that wait for the device: {100 * waited / window:.1f} %"]
    evidence += [
        f"{one.title}: {100 * one.share:.1f} %" + "".join(f"; {fact}" for fact in one.facts)
        for one in causes
        if one.share >= LEAST_SHARE
    ]
    advice = [Advice(next_step(one.key), 0.0) for one in causes if one.share >= LEAST_SHARE]
    if bounds[0].key == Bound.DEVICE:
        advice.insert(0, Advice(next_step_of_bound(Bound.DEVICE), 0.0))
    return Verdict(
        device=-1,
        device_name=timeline.tracks[track].label,
        start_ns=timeline.start_ns,
        end_ns=timeline.end_ns,
        window_ns=window,
        bounds=bounds,
        computing=waited / window,
        idle=0.0,
        causes=causes,
        kernels=[],
        kernel_classes=[],
        evidence=evidence,
        advice=advice,
    )


def _wait_for_copies(totals: list[Total]) -> bool:
    """Whether the waits for the device follow copies to it, one for one."""
    waits = sum(
        one.count for one in totals if one.kind == TotalKind.CALL and one.call == CallKind.SYNC
    )
    copies = [one for one in totals if one.kind == TotalKind.CALL and one.call == CallKind.COPY]
    there = sum(one.count for one in copies if one.direction == CopyDirection.H2D)
    return waits > 0 and there >= FOR_COPIES * waits


def _inside_rank(total: Total) -> int:
    """Order in which blocked time is counted as time within device calls."""
    return _INSIDE_CALLS.index(total.name) if total.name in _INSIDE_CALLS else len(_INSIDE_CALLS)


def _cause_of(total: Total) -> Cause:
    if total.kind == TotalKind.CALL:
        return _OF_CALL.get(total.call, Cause.LAUNCH)
    if total.kind == TotalKind.RUNQUEUE:
        return Cause.RUN_QUEUE
    if total.wait_detail in _OF_WAIT:
        return _OF_WAIT[total.wait_detail]
    if (total.name == "futex" or total.name in IO_REASONS) and LOADER.search(total.waker):
        return Cause.INPUT
    return _OF_REASON.get(total.name, Cause.UNKNOWN)


def _running(timeline: Timeline, tracks: list[int]) -> tuple[int, list[CodeLocation]]:
    """(on-CPU time of the threads in ns, by samples; the functions with most of it)."""
    samples = timeline.samples
    rows = np.isin(samples.track, tracks)
    whole = int(samples.weight_ns[rows].sum())
    if not whole:
        return 0, []
    ns = np.bincount(samples.name[rows], samples.weight_ns[rows], len(timeline.names))
    ranked = [
        CodeLocation(timeline.names[i], float(ns[i] / whole))
        for i in np.argsort(-ns)[:4].tolist()
        if ns[i] > 0 and timeline.names[i]
    ]
    return whole, ranked


def _bounds(causes: list[CauseShare], waited: float) -> list[BoundShare]:
    return ranked_bounds([*((one.bound, one.share) for one in causes), (Bound.DEVICE, waited)])
