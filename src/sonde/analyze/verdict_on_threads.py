# SPDX-License-Identifier: Apache-2.0
"""The verdict on one thread, or on threads that take turns or wait for the same: the causes of its
time, what limits it, and the next step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from sonde.analyze.advice import next_step_of_bound, next_step_on
from sonde.analyze.culprits import who_is_behind
from sonde.analyze.far_ends import BehindIo, behind_io
from sonde.analyze.host_words import of_io as kinds_of_io
from sonde.analyze.native_callees import FASTER_BLAS, callee_facts, on_reference_blas
from sonde.analyze.ranking import LEAST_SHARE, ranked_bounds
from sonde.analyze.slowed_launches import without_hand_overs
from sonde.analyze.thread_time import (
    ThreadTime,
    cause_lines,
    functions,
    in_bursts,
    locations,
    thread_time,
)
from sonde.analyze.wait_facts import wait_facts
from sonde.model.causes import Bound, Cause
from sonde.model.timeline import CopyDirection, Timeline, Total, TotalKind, parts_of
from sonde.model.user_code import function_of
from sonde.model.verdict import Advice, BoundShare, CauseShare, Verdict

FUNCTION = 0.1
"""Functions of the program with this share of the time are described in evidence."""
FUNCTIONS = 3
"""At most this many functions are."""
NEAR_TIE = 0.8
"""A cause with this part of the largest one's time is about as large, where nothing calls a device.
"""
STOOD = 0.5
"""Where a thread was without a CPU is by the stacks that were taken then, if they are of this part
of that time; else by its samples."""
BY_SAMPLES = " (places: where it ran, by samples)"
"""Behind the title of time without a CPU, where its stacks are not known."""
BESIDE = 0.15
"""Time without a CPU and another cause that both have this part of the time are both stated first.
"""
CODE = (Cause.HOST, Cause.SPIN, Cause.LAUNCH, Cause.BUILD, Cause.UNKNOWN)
"""What a thread does on a CPU, by its stacks."""

_Key = TypeVar("_Key")


def verdict_on(
    timeline: Timeline,
    turns: list[int],
    totals: list[Total],
    window: int,
    timed: Collection[CopyDirection] = (),
    has_runs: bool = False,
    on_host: bool = False,
    whole: int = 0,
    are_held_up: bool = False,
) -> tuple[Verdict, ThreadTime]:
    """The verdict on threads that take turns, under the name of the first, and their time.

    `totals`: theirs; `timed`: as of `thread_time`; `has_runs`: runs of the device were timed;
    `on_host`: nothing called a device; `whole`: the time in ns that shares are of, where that is
    not the recorded one: that of the requests that the threads answer; `are_held_up`: the threads
    were chosen for what they wait for.
    """
    track, pid = turns[0], timeline.tracks[turns[0]].pid
    of_requests = whole > 0
    time = thread_time(timeline, totals, timed, _callers(timeline, turns) if of_requests else None)
    if time.for_copies and not has_runs:
        time.ns[Cause.COPY] += time.waited
        time.waited = 0
    # Time without a CPU within a call that waits counts as without a CPU.
    ns = time.ns
    beyond = max(0, time.waited + sum(ns.values()) - window * len(turns))
    time.waited -= min(time.waited, beyond, ns[Cause.RUN_QUEUE] + ns[Cause.STOPPED])
    if on_host:
        _cut_to(time, window * len(turns))
    # Threads that take turns fill one window; where they do not, shares are of all their time.
    whole = whole or max(window, time.waited + sum(ns.values()) if len(turns) > 1 else window)
    least = min(window, whole)
    behind_it = behind_io(timeline, totals, window) if on_host else BehindIo()
    lengths = wait_facts(timeline, totals)

    def of_code(cause: Cause, length: int) -> bool:
        return on_host and cause == Cause.HOST and length >= LEAST_SHARE * whole

    causes = [
        CauseShare(
            key=cause,
            title=cause.description + BY_SAMPLES * bool(ran_at),
            bound=cause.bound,
            detail=of_io.detail,
            ns=length * window // whole,
            share=length / whole,
            count=time.count[cause],
            longest_ns=0,
            thread=timeline.tracks[track].label,
            locations=locations(*(ran_at or (time.places[cause], length)), time.callers),
            facts=[
                *(kinds_of_io(timeline, totals, length) if on_host and cause == Cause.IO else ()),
                *(
                    callee_facts(timeline, pid, time.places[cause])
                    if of_code(cause, length)
                    else ()
                ),
                *of_io.facts,
                *behind.facts,
                *lengths.get(cause, ()),
            ],
            culprit=of_io.culprit or behind.culprit,
            in_event_loop=of_io.in_event_loop,
        )
        for cause, length in sorted(ns.items(), key=lambda item: -item[1])
        if length > 0
        for of_io in [behind_it if cause == Cause.IO else BehindIo()]
        for behind in [who_is_behind(timeline, time, cause, length, least, turns)]
        for ran_at in [_ran_at(totals, time, length) if cause == Cause.RUN_QUEUE else None]
    ]
    if not has_runs:
        causes = without_hand_overs(causes, time.count, whole)
    bounds = _bounds(causes, time.waited / whole)
    if are_held_up and len(turns) > 1:
        # They were chosen for the lock that they wait for.
        bounds.sort(key=lambda one: one.key != Bound.LOCK)
    waited = f"in calls that wait for the device: {100 * time.waited / whole:.1f} %"
    evidence = ["shares are of the recorded time" if on_host else waited]
    if whole > window and not of_requests:
        evidence.append(
            f"shares are of the time of {len(turns)} threads together, "
            f"{whole / window:.2f} times the recorded time"
        )
    first = bounds[0].key
    evidence += cause_lines(sorted(causes, key=lambda one: on_host and one.bound != first))
    evidence += _of_functions(timeline, time, whole)
    large = [one for one in causes if one.share >= LEAST_SHARE]
    if on_host:  # the next step is about what the verdict names first
        large = [one for one in large if one.bound != Bound.IDLE] or large
        large.sort(key=lambda one: one.bound != bounds[0].key)
        large = _without_spins(large)
    advice = [Advice(_step(timeline, pid, one, of_requests, on_host), 0.0) for one in large]
    if on_host:
        advice = _with_near_tie(large, advice, len(turns))
    if bounds[0].key == Bound.DEVICE:
        advice.insert(0, Advice(next_step_of_bound(Bound.DEVICE), 0.0))
    verdict = Verdict(
        device=-1,
        device_name=timeline.tracks[track].label,
        start_ns=timeline.start_ns,
        end_ns=timeline.end_ns,
        window_ns=window,
        bounds=bounds,
        computing=time.waited / whole,
        idle=0.0,
        causes=causes,
        kernels=[],
        kernel_classes=[],
        evidence=evidence,
        advice=advice,
    )
    return verdict, time


def _ran_at(
    totals: Iterable[Total], time: ThreadTime, length: int
) -> tuple[dict[str, int], int] | None:
    """(by place, the time on a CPU by samples; all of it), which stand for where a thread was
    without a CPU, where that is not known of most of this time (`length`, in ns); None where it
    is, or no sample shows a place."""
    if sum(time.places[Cause.RUN_QUEUE].values()) >= STOOD * length:
        return None
    sampled = [one for one in totals if one.kind == TotalKind.SAMPLED]
    places: dict[str, int] = defaultdict(int)
    for one in sampled:
        places[one.location] += one.ns if one.location else 0
    places.pop("", None)
    return (places, sum(one.ns for one in sampled)) if any(places.values()) else None


def _with_near_tie(
    causes: Sequence[CauseShare], advice: Sequence[Advice], threads: int
) -> list[Advice]:
    """The next steps; those of two causes of one thread that are about as large are one, always in
    the same order: which of them is larger changes from run to run. The step on time without a CPU
    goes with that on another large cause: what a machine's other programs take must not hide what
    the program itself waits for. `causes`: of the steps."""
    if len(causes) < 2:
        return [*advice]
    pair = _beside_contention(causes)
    if threads == 1 and causes[1].share >= NEAR_TIE * causes[0].share and pair in ((), (0, 1)):
        order = [*Cause]
        first, second = sorted((0, 1), key=lambda number: order.index(causes[number].key))
        texts = dict.fromkeys(advice[number].text for number in (first, second))
        both = tuple(causes[number].key for number in pair)
        return [Advice("; or ".join(texts), 0.0, causes=both), *advice[2:]]
    if not pair:
        return [*advice]
    steps = [replace(advice[number], causes=(causes[number].key,)) for number in pair]
    rest = [one for number, one in enumerate(advice) if number not in pair]
    return [steps[0], replace(steps[1], with_former=True), *rest]


def _beside_contention(causes: Sequence[CauseShare]) -> tuple[int, ...]:
    """The numbers of the first cause and of the largest one beside it, where one of them is time
    without a CPU and both are large; () else."""
    for number, one in enumerate(causes[1:], 1):
        if Cause.RUN_QUEUE in (causes[0].key, one.key):
            is_large = min(causes[0].share, one.share) >= BESIDE
            return (0, number) if is_large else ()
    return ()


def _without_spins(causes: Sequence[CauseShare]) -> list[CauseShare]:
    """The causes of next steps: where a pool that spins takes CPUs, that step is one with the one
    on its time without a CPU, at the place of the first."""
    keys = [one.key for one in causes]
    if Cause.SPIN not in keys or Cause.RUN_QUEUE not in keys:
        return [*causes]
    queue = causes[keys.index(Cause.RUN_QUEUE)]
    if queue.culprit is None or not queue.culprit.pool:
        return [*causes]
    at = min(keys.index(Cause.SPIN), keys.index(Cause.RUN_QUEUE))
    rest = [one for one in causes if one.key not in (Cause.SPIN, Cause.RUN_QUEUE)]
    return [*rest[:at], queue, *rest[at:]]


def _step(timeline: Timeline, pid: int, cause: CauseShare, of_requests: bool, on_host: bool) -> str:
    """The next step on a cause."""
    first = cause.locations[0].function if cause.locations else ""
    if on_host and cause.key == Cause.HOST and on_reference_blas(timeline, pid, function_of(first)):
        return FASTER_BLAS
    return next_step_on(cause, of_requests, on_host)


def _callers(timeline: Timeline, turns: Sequence[int]) -> dict[str, str]:
    """By location, the one that mostly called it, in these threads or in all."""
    found: dict[str, str] = {}
    mine, differ = set(turns), set()
    for (track, location), caller in timeline.thread_callers.items():
        if track in mine and found.setdefault(location, caller) != caller:
            differ.add(location)
    return {**timeline.callers, **{one: found[one] for one in found if one not in differ}}


def _cut_to(time: ThreadTime, limit: int) -> None:
    """Cuts the causes of a thread's time so that they sum to no more than the time it had, and what
    is known of each with it. Waits are measured; what it did on a CPU is estimated from samples, so
    that is cut first."""
    ns = time.ns
    before = dict(ns)
    for causes in (CODE, tuple(ns)):
        part = sum(ns[one] for one in causes)
        beyond = min(part, sum(ns.values()) - limit)
        if beyond <= 0:
            continue
        for one in causes:
            ns[one] -= -(-beyond * ns[one] // part)
    for one, length in before.items():
        if ns[one] < length:
            time.places[one] = _part(time.places[one], ns[one], length)
            time.others[one] = _part(time.others[one], ns[one], length)


def _part(parts: Mapping[_Key, int], ns: int, of: int) -> dict[_Key, int]:
    """Each of these, times `ns` / `of`."""
    return {key: one * ns // of for key, one in parts.items()}


def _of_functions(timeline: Timeline, time: ThreadTime, whole: int) -> list[str]:
    """Functions of the program with several separate causes, or that run in bursts only."""
    parts = parts_of(timeline.start_ns, timeline.end_ns, timeline.tick_ns)
    lines = []
    for function, causes in functions(time).items():
        ns = sum(causes.values())
        if ns < FUNCTION * whole or not function:
            continue
        large = {cause: part for cause, part in causes.items() if part >= LEAST_SHARE * whole}
        bursts = in_bursts(time, function, parts)
        if len(large) < 2 and not bursts:
            continue
        ranked = sorted(large.items(), key=lambda item: -item[1])
        text = ", ".join(f"{one.bound.label} {100 * part / whole:.0f} %" for one, part in ranked)
        line = f"{100 * ns / whole:.0f} % of the time in {function}: {text or 'several causes'}"
        lines.append(
            line + f"; in bursts, in {bursts} of {parts} parts of the record" * bool(bursts)
        )
    return lines[:FUNCTIONS]


def _bounds(causes: list[CauseShare], waited: float) -> list[BoundShare]:
    """The bounds; a thread that is idle is bound by what else it does, where that is not little."""
    working = [(one.bound, one.share) for one in causes if one.bound != Bound.IDLE]
    found = ranked_bounds([*working, (Bound.DEVICE, waited)])
    idle = sum(one.share for one in causes if one.bound == Bound.IDLE)
    is_idle = idle > 0 and (not found or found[0].share < LEAST_SHARE)
    return [BoundShare(Bound.IDLE, idle)] if is_idle else found
