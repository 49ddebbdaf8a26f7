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
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from sonde.analyze.advice import next_step
from sonde.analyze.blame import LAUNCH_PATH_NS
from sonde.analyze.causes import CAUSES, IO_REASONS, LOADER
from sonde.analyze.device_totals import with_runs
from sonde.analyze.ranking import LEAST_SHARE, ranked_bounds
from sonde.model.timeline import CallKind, Timeline, Total, Way
from sonde.model.verdict import Advice, Bound, CauseShare, Place, Verdict

OWN_THREAD = "sonde"
"""What Sonde's own thread in a process is called; what it does, the program does not."""
LAUNCH_NS = 5_000
"""What a launch takes a thread, about; they are not probed."""
FOR_COPIES = 0.8
"""So many copies to the device for each wait, and the waits are for the copies."""
DRIVER_THREADS = ("cuda-EvtHandlr",)
"""What the driver's thread is called that hears from the device and tells the program's."""
HOPS = 6
"""From thread to thread, at the most."""
DEVICE = "device"
THREADS = 3
LEAST_CALLS = 0.05
"""Threads with less than this of the busiest one's calls are not told of."""

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
_WAITS = {"lock", "io", "input", "cpu", "stopped", "page fault", "allocation"}
"""Bounds that a thread's waits make."""
_COUNTED = {
    ("sonde.gpu.dram.active", ""): "dram",
    ("sonde.gpu.tensor.active", "any"): "tensor",
}
_INSIDE_CALLS = ("futex", "poll", "driver", "read", "system call")
"""What a thread blocks on within a device call."""


def host_verdicts(timeline: Timeline) -> list[Verdict]:
    """A verdict on each thread that called a device, busiest first; none where nothing did."""
    by_lane: dict[int, list[Total]] = defaultdict(list)
    runs: dict[int, list[Total]] = defaultdict(list)
    asked: dict[int, int] = defaultdict(int)
    own = {lane for lane, one in enumerate(timeline.lanes) if one.name == OWN_THREAD}
    labels = {timeline.lanes[lane].label for lane in own}
    for total in timeline.totals:
        if total.lane in own or total.waker in labels:
            continue
        if total.kind == "run":
            runs[timeline.lanes[total.lane].pid].append(total)
            asked[total.lane] += total.count * LAUNCH_NS
        else:
            by_lane[total.lane].append(total)
            asked[total.lane] += total.ns if total.kind == "device" else 0
    for lane, count in enumerate(np.bincount(timeline.calls.lane).tolist()):
        asked[lane] += 0 if lane in own else count * LAUNCH_NS
    window = max(1, timeline.end_ns - timeline.start_ns)
    ranked = sorted(((ns, lane) for lane, ns in asked.items() if ns), reverse=True)
    told = [lane for ns, lane in ranked[:THREADS] if ns >= LEAST_CALLS * max(ranked)[0]]
    timed = timeline.timed_ns
    timed_ns = max(1, timed[1] - timed[0]) if timed else window
    verdicts = []
    _waits_for_device(timeline, by_lane)
    for turns in _in_turns(timeline, told, by_lane):
        mine = runs[timeline.lanes[turns[0]].pid]
        launches = sum(one.count for one in mine if one.lane in turns) * window / timed_ns
        totals = [one for lane in turns for one in by_lane[lane]]
        verdict = _verdict(timeline, turns, totals, window, launches)
        span = timed or (timeline.start_ns, timeline.end_ns)
        active = _active(timeline, timeline.lanes[turns[0]].pid, span)
        verdicts.append(with_runs(verdict, mine, totals, window, timed_ns, active))
    return verdicts


def _active(timeline: Timeline, pid: int, span: tuple[int, int]) -> dict[str, float]:
    """What the counters of the process's devices say of some time: the parts of it, in the mean,
    in which memory and tensor cores worked."""
    found: dict[str, list[float]] = defaultdict(list)
    for one in timeline.counters:
        name = _COUNTED.get((one.name, one.which), "")
        if name and one.device in timeline.gpus_of.get(pid, ()):
            inside = (one.time_ns >= span[0]) & (one.time_ns <= span[1])
            found[name] += one.value[inside].tolist()
    return {name: sum(values) / len(values) for name, values in found.items() if values}


def _waits_for_device(timeline: Timeline, by_lane: Mapping[int, list[Total]]) -> None:
    """Name the waits for a lock that end when the device does.

    Some runtimes (XLA's) wait for the device by a thread of the driver's, which wakes one of
    theirs, which wakes the next, and so on to the one that asked. Each waits on a futex.
    """
    lanes = {one.label: lane for lane, one in enumerate(timeline.lanes)}
    woken: dict[int, Total] = {}
    for lane, totals in by_lane.items():
        for one in totals:
            on_futex = one.kind == "blocked" and one.name == "futex" and not one.within
            if on_futex and one.waker and 2 * one.waker_ns >= one.ns:
                woken[lane] = one
    for lane, waits in woken.items():
        waker = waits.waker
        for _ in range(HOPS):
            next_one = woken.get(lanes.get(waker, -1))
            if next_one and not waker.startswith(DRIVER_THREADS):
                waker = next_one.waker
        if waker.startswith(DRIVER_THREADS):
            by_lane[lane][by_lane[lane].index(waits)] = replace(waits, within=DEVICE)


def with_short_waits(timeline: Timeline, verdicts: list[Verdict]) -> list[Verdict]:
    """Verdicts on devices of a capture, whose waits are kept one by one from 10 ms on only.

    What no such wait claims counts as host code, so it is parted as the totals of the thread are.
    """
    if not any(one.bounds[0].key == "host" for one in verdicts):
        return verdicts
    told = host_verdicts(timeline)
    return [_parted(one, told) if one.bounds[0].key == "host" else one for one in verdicts]


def _parted(verdict: Verdict, told: list[Verdict]) -> Verdict:
    host = next((one for one in verdict.causes if one.key == "host"), None)
    exact = next((one for one in told if host and one.device_name == host.thread), None)
    exact = exact or (told[0] if len(told) == 1 else None)
    if host is None or exact is None:
        return verdict
    parts = [one for one in exact.causes if one.bound in _WAITS or one.key == "host"]
    whole = sum(one.ns for one in parts)
    if not whole:
        return verdict
    causes = {one.key: one for one in verdict.causes if one.key != "host"}
    left = host.ns
    for number, part in enumerate(parts):
        ns = host.ns * part.ns // whole if number + 1 < len(parts) else left
        left -= ns
        before = host if part.key == "host" else causes.get(part.key, part)
        ns += causes[part.key].ns if part.key in causes else 0
        causes[part.key] = replace(before, ns=ns, share=ns / verdict.window_ns)
    ranked = sorted(causes.values(), key=lambda one: -one.ns)
    bounds = ranked_bounds((one.bound, one.share) for one in ranked)
    if bounds[0].key == "host":
        return verdict
    line = f"{ranked[0].title}: by the totals of the thread, whose single waits were short"
    advice = [Advice(next_step(one.key), one.share) for one in ranked if one.share >= LEAST_SHARE]
    return replace(
        verdict, bounds=bounds, causes=ranked, evidence=[*verdict.evidence, line], advice=advice
    )


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


def _verdict(
    timeline: Timeline, turns: list[int], totals: list[Total], window: int, launches: float
) -> Verdict:
    """On threads that feed a device in turns; called by the name of the first.

    `launches`: about how many they asked for in that time; 0 unknown.
    """
    lane = turns[0]
    ns: dict[str, int] = defaultdict(int)
    count: dict[str, int] = defaultdict(int)
    facts: dict[str, list[str]] = defaultdict(list)
    in_calls = sum(one.ns for one in totals if one.kind == "device")
    inside = in_calls
    waited = 0
    sampled = {one.name: one.ns for one in totals if one.kind == "sampled"}
    for one in sorted(totals, key=lambda one: (_inside_rank(one), -one.ns)):
        if one.kind == "sampled":
            continue
        if one.kind == "device" and one.call == CallKind.SYNC:
            waited += one.ns
            continue
        if one.within == DEVICE:
            within = min(one.ns, inside)
            inside -= within
            waited += one.ns - within
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
    running = max(0, running - inside)  # what is left of `inside` was spent on the CPU
    # A full queue is a wait for the device.
    for name, key in (("full queue", ""), ("input", "input"), ("page fault", "page fault")):
        part = min(running, sampled.get(name, 0))
        running -= part
        if key:
            ns[key] += part
        else:  # those of graphs are calls that are timed
            called = min(ns["launch"], sampled.get(name, 0) - part)
            ns["launch"] -= called
            waited += part + called
    ns["launch" if running <= LAUNCH_PATH_NS * launches else "host"] += running
    if _wait_for_copies(totals):
        ns["copy"] += waited
        waited = 0
    # Who was kept from running within a call that waits was so first.
    beyond = max(0, waited + sum(ns.values()) - window * len(turns))
    waited -= min(waited, beyond, ns["run queue"] + ns["stopped"])
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
            places=places if key in ("host", "launch") else [],
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


def _wait_for_copies(totals: list[Total]) -> bool:
    """Whether the calls that wait for the device are those that follow copies to it."""
    waits = sum(one.count for one in totals if one.kind == "device" and one.call == CallKind.SYNC)
    copies = [one for one in totals if one.kind == "device" and one.call == CallKind.COPY]
    there = sum(one.count for one in copies if one.way == Way.H2D)
    return waits > 0 and there >= FOR_COPIES * waits


def _inside_rank(total: Total) -> int:
    """Order in which blocked time is taken for that inside device calls."""
    return _INSIDE_CALLS.index(total.name) if total.name in _INSIDE_CALLS else len(_INSIDE_CALLS)


def _cause_of(total: Total) -> str:
    if total.kind == "device":
        return _OF_CALL.get(total.call, "launch")
    if total.kind == "runqueue":
        return "run queue"
    if total.within:
        return total.within
    if (total.name == "futex" or total.name in IO_REASONS) and LOADER.search(total.waker):
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
    return ranked_bounds([*((one.bound, one.share) for one in causes), ("device", waited)])
