# SPDX-License-Identifier: Apache-2.0
"""What limits the threads that feed a device, where the device itself was not traced.

A capture without device time still knows, exactly, how long such a thread was in calls that wait
for the device, in copies, blocked on what and woken by whom, in the run queue; samples tell what it
ran. Waits inside device calls belong to the calls. The verdict is on the thread, and says so.

Where single runs of the device were timed, the share of the time in which it was busy is known. A
device that was not, though its thread waited for it, is fed anew after each wait: without that wait
the thread would have launched meanwhile, so its launches and code between are the wait's doing, as
far as the wait was long. Threads of a process that wait for one another (a forward pass in one, the
backward pass in another) feed the device in turns, so what each does is laid together.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from sonde.analyze.advice import next_step
from sonde.analyze.causes import CAUSES, IO_REASONS, LOADER
from sonde.analyze.kernels import class_of
from sonde.model.timeline import CallKind, Timeline, Total
from sonde.model.verdict import Advice, Bound, CauseShare, KernelShare, Place, Verdict

THREADS = 3
LEAST_SHARE = 0.05
"""Threads with less than this of the busiest one's calls, and causes below it, are not told of."""
MIX = 0.6
STALLED = 0.15
"""As for devices that were traced: one that computed for more of the time is the bound itself."""

_OF_CALL = {
    CallKind.COPY: "copy",
    CallKind.SET: "copy",
    CallKind.ALLOC: "allocation",
    CallKind.FREE: "allocation",
    CallKind.PIN: "allocation",
    CallKind.BUILD: "build",
    CallKind.LAUNCH: "launch",
    CallKind.GRAPH_LAUNCH: "launch",
    CallKind.OTHER: "launch",
    CallKind.EVENT: "launch",
}
_OF_REASON = {
    **dict.fromkeys(IO_REASONS, "io"),
    "futex": "lock",
    "stopped": "stopped",
    "page fault": "page fault",
    "memory": "page fault",
    "sleep": "sleep",
}
_INSIDE_CALLS = ("futex", "poll", "driver", "read", "system call")
"""What a thread blocks on within a device call."""


def host_verdicts(timeline: Timeline) -> list[Verdict]:
    """A verdict on each thread that called a device, busiest first; none where nothing did."""
    by_lane: dict[int, list[Total]] = defaultdict(list)
    runs: dict[int, list[Total]] = defaultdict(list)
    for total in timeline.totals:
        if total.kind == "run":
            runs[timeline.lanes[total.lane].pid].append(total)
        else:
            by_lane[total.lane].append(total)
    window = max(1, timeline.end_ns - timeline.start_ns)
    asked = {
        lane: sum(one.ns for one in totals if one.kind == "device")
        for lane, totals in by_lane.items()
    }
    ranked = sorted(((ns, lane) for lane, ns in asked.items() if ns), reverse=True)
    told = [lane for ns, lane in ranked[:THREADS] if ns >= LEAST_SHARE * max(ranked)[0]]
    timed = timeline.timed_ns
    return [
        _with_runs(
            _verdict(timeline, turns, [one for lane in turns for one in by_lane[lane]], window),
            runs[timeline.lanes[turns[0]].pid],
            max(1, timed[1] - timed[0]) if timed else window,
        )
        for turns in _in_turns(timeline, told, by_lane)
    ]


def _in_turns(
    timeline: Timeline, told: list[int], by_lane: dict[int, list[Total]]
) -> list[list[int]]:
    """The threads, those together that wait for one another; such waits are left out."""
    tails = {f"({timeline.lanes[lane].number})": lane for lane in told}
    groups: dict[int, list[int]] = {}
    for lane in told:
        others: set[int] = set()
        kept = []
        for one in by_lane[lane]:
            waker = tails.get(one.waker.rpartition(" ")[2], lane)
            mine = timeline.lanes[waker].pid == timeline.lanes[lane].pid
            if one.kind == "blocked" and one.name == "futex" and mine and waker != lane:
                others.add(waker)
            else:
                kept.append(one)
        by_lane[lane] = kept
        joined = [groups[one] for one in [lane, *others] if one in groups]
        group = sorted({lane, *others, *(one for each in joined for one in each)}, key=told.index)
        groups |= dict.fromkeys(group, group)
    return [group for lane, group in groups.items() if lane == group[0]]


def _with_runs(verdict: Verdict, runs: list[Total], window: int) -> Verdict:
    """The verdict with what is known of the device's own time, by runs that were timed singly.

    `window`: in which they were.
    """
    if not runs:
        return verdict
    busy = min(1.0, sum(one.ns for one in runs) / window)
    ranked = sorted(runs, key=lambda one: -one.ns)
    kernels = [KernelShare(one.name, one.ns, one.ns / window, one.count) for one in ranked[:5]]
    classes: dict[str, list[Total]] = defaultdict(list)
    for one in runs:
        classes[class_of(one.name)].append(one)
    shares = [
        KernelShare(
            name,
            sum(one.ns for one in group),
            sum(one.ns for one in group) / window,
            sum(one.count for one in group),
        )
        for name, group in classes.items()
    ]
    shares.sort(key=lambda one: -one.ns)
    bounds = verdict.bounds
    causes = verdict.causes
    if busy >= 1 - STALLED:
        bounds = [Bound(one.name, one.share) for one in shares if one.ns >= MIX * shares[0].ns]
    else:
        causes = _fed_anew(verdict)
        bounds = _ranked(causes) or bounds
    line = f"the device computed about {100 * busy:.0f} % of the time, by runs timed singly"
    if busy >= 1 - STALLED:
        advice = [Advice(next_step(bounds[0].key), 0.0), *verdict.advice]
    else:
        advice = [Advice(next_step(one.key), 0.0) for one in causes if one.share >= LEAST_SHARE]
    return replace(
        verdict,
        bounds=bounds,
        causes=causes,
        kernels=kernels,
        kernel_classes=shares,
        evidence=[verdict.evidence[0], line, *verdict.evidence[1:]],
        advice=advice,
    )


def _fed_anew(verdict: Verdict) -> list[CauseShare]:
    """Its causes, with what the thread's waits for the device are to blame for."""
    left = verdict.computing
    causes = []
    due = 0
    for one in sorted(verdict.causes, key=lambda one: one.key != "launch"):
        part = 0.0
        if one.key in ("launch", "host"):
            part = min(left, one.share)
            left -= part
            due += round(part * verdict.window_ns)
        ns = one.ns - round(part * verdict.window_ns)
        if ns > 0:
            causes.append(replace(one, ns=ns, share=one.share - part))
    if due:
        known = CAUSES["synchronisation"]
        causes.append(
            CauseShare(
                known.key, known.title, known.bound, "", due, due / verdict.window_ns, 0, 0,
                verdict.device_name, [], [],
            )
        )  # fmt: skip
    return sorted(causes, key=lambda one: -one.ns)


def _ranked(causes: list[CauseShare]) -> list[Bound]:
    shares: dict[str, float] = defaultdict(float)
    for one in causes:
        shares[one.bound] += one.share
    ranked = sorted((Bound(key, share) for key, share in shares.items()), key=lambda b: -b.share)
    return [one for one in ranked if one.share >= MIX * ranked[0].share][:3]


def _verdict(timeline: Timeline, turns: list[int], totals: list[Total], window: int) -> Verdict:
    """On threads that feed a device in turns; called by the name of the first."""
    lane = turns[0]
    ns: dict[str, int] = defaultdict(int)
    count: dict[str, int] = defaultdict(int)
    facts: dict[str, list[str]] = defaultdict(list)
    in_calls = sum(one.ns for one in totals if one.kind == "device")
    inside = in_calls
    waited = 0
    for one in sorted(totals, key=lambda one: (_inside_rank(one), -one.ns)):
        if one.kind == "device" and one.call == CallKind.SYNC:
            waited += one.ns
            continue
        length = one.ns
        if one.kind == "blocked" and one.name in _INSIDE_CALLS:
            within = min(length, inside)
            inside -= within
            length -= within
        key = _cause_of(one)
        ns[key] += length
        count[key] += one.count
        if length >= LEAST_SHARE * window and one.waker:
            facts[key].append(f"woken by {one.waker}")
    running, places = _running(timeline, turns)
    ns["host"] += max(0, running - inside)  # what is left of `inside` was spent on the CPU
    causes = [
        CauseShare(
            key=key,
            title=CAUSES[key].title,
            bound=CAUSES[key].bound,
            detail="",
            ns=length,
            share=length / window,
            count=count[key],
            longest_ns=0,
            thread=timeline.lanes[lane].label,
            places=places if key == "host" else [],
            facts=facts[key],
        )
        for key, length in sorted(ns.items(), key=lambda item: -item[1])
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
    if bounds[0].key == "device":
        advice.insert(0, Advice(next_step("device"), 0.0))
    return Verdict(
        device=-1,
        device_name=timeline.lanes[lane].label,
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


def _inside_rank(total: Total) -> int:
    """Order in which blocked time is taken for that inside device calls."""
    return _INSIDE_CALLS.index(total.name) if total.name in _INSIDE_CALLS else len(_INSIDE_CALLS)


def _cause_of(total: Total) -> str:
    if total.kind == "device":
        return _OF_CALL.get(total.call, "launch")
    if total.kind == "runqueue":
        return "run queue"
    if total.name == "futex" and LOADER.search(total.waker):
        return "input"
    return _OF_REASON.get(total.name, "unknown")


def _running(timeline: Timeline, lanes: list[int]) -> tuple[int, list[Place]]:
    """Time on a CPU by the samples, and the functions that took most of it."""
    samples = timeline.samples
    rows = np.isin(samples.lane, lanes)
    whole = int(samples.weight_ns[rows].sum())
    if not whole:
        return 0, []
    ns = np.bincount(samples.name[rows], samples.weight_ns[rows], len(timeline.names))
    ranked = [
        Place(timeline.names[i], float(ns[i] / whole))
        for i in np.argsort(-ns)[:4].tolist()
        if ns[i] > 0 and timeline.names[i]
    ]
    return whole, ranked


def _bounds(causes: list[CauseShare], waited: float) -> list[Bound]:
    shares: dict[str, float] = defaultdict(float)
    shares["device"] = waited
    for one in causes:
        shares[one.bound] += one.share
    ranked = sorted((Bound(key, share) for key, share in shares.items()), key=lambda b: -b.share)
    return [one for one in ranked if one.share >= MIX * ranked[0].share][:3]
