# SPDX-License-Identifier: Apache-2.0
"""Adds device time to the verdict on a launching thread, where single runs were timed.

The weighted totals of the runs, over the time in which they were timed, give the share of time in
which the device computed. The bytes of all copies are known, timed or not, so the time of copies
follows from the speed of the timed ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sonde.analyze.advice import next_step, next_step_of_bound
from sonde.analyze.kernels import ALONE, class_by_counters, class_of
from sonde.analyze.offenders import OtherUse
from sonde.analyze.ranking import LEAST_SHARE, STALLED, UNDERFILLED_BOUND, mixed, ranked_bounds
from sonde.analyze.thread_time import ThreadTime, locations
from sonde.model.causes import Bound, Cause, CauseDetail
from sonde.model.timeline import CallKind, Total, TotalKind
from sonde.model.verdict import (
    Advice,
    BoundShare,
    CauseShare,
    KernelClassShare,
    KernelShare,
    Verdict,
)

_KERNELS = (CallKind.LAUNCH, CallKind.GRAPH_LAUNCH)
_COUNTERS = {Bound.MEMORY: "memory bandwidth", Bound.COMPUTE: "tensor cores"}


def with_runs(
    verdict: Verdict,
    runs: list[Total],
    calls: list[Total],
    window: int,
    timed_ns: int,
    active: Mapping[Bound, float],
    others: Sequence[OtherUse],
    time: ThreadTime,
) -> Verdict:
    """The verdict on a thread with the device's time in it.

    `runs`: totals of the device's runs; `calls`: totals of the thread; `window`: the time of
    `calls`, in ns; `timed_ns`: the time in which runs were timed; `active`: shares of that time by
    the device's counters (`sonde.analyze.kernels`); `others`: other processes that used the device
    meanwhile; `time`: of the thread.
    """
    if not runs:
        return _by_counters(verdict, active)
    kernels = [one for one in runs if one.kind == TotalKind.RUN and one.call in _KERNELS]
    computed = min(1.0, sum(one.ns for one in kernels) / timed_ns)
    counted = {bound: share for bound, share in active.items() if share > 0}
    by_counters = class_by_counters(
        {bound: part / max(computed, part) for bound, part in counted.items()}
    )
    interrupted = sum(one.ns for one in runs if one.kind == TotalKind.INTERRUPTED)
    copied = min(1.0 - computed, _copied(runs, calls, window, timed_ns))
    held_up = min(1.0 - computed, interrupted / timed_ns)
    by_others = sum(one.share for one in others)
    if others:
        # The thread waited for a device that ran none of its work, and others' work meanwhile.
        unexplained = verdict.computing - computed - copied
        held_up = max(held_up, min(unexplained, by_others, 1.0 - computed))
    contention = Cause.GPU_CONTENTION if others else Cause.NOT_TAKEN
    classes: dict[Bound, list[Total]] = defaultdict(list)
    for one in kernels:
        by_name = class_of(one.name)
        classes[by_counters if by_counters and by_name == Bound.KERNELS else by_name].append(one)
    shares = [
        KernelClassShare(bound, *_sum_of(group, timed_ns)) for bound, group in classes.items()
    ]
    shares.sort(key=lambda one: -one.ns)
    causes, bounds = verdict.causes, verdict.bounds
    lines = [f"the device computed about {100 * computed:.0f} % of the time, by runs timed singly"]
    if by_counters and any(class_of(one.name) == Bound.KERNELS for one in kernels):
        lines.append(_counter_evidence(active))
    if others:
        lines += [one.text for one in others[:2]]
    computing = sum(one.ns for one in kernels)
    alone = sum(one.ns for one in runs if one.kind == TotalKind.UNDERFILLED)
    if shares and computed >= 1 - STALLED and alone >= UNDERFILLED_BOUND * computing:
        one_by_one = computing <= ALONE * timed_ns
        bounds = [BoundShare(Bound.SMALL_KERNELS if one_by_one else shares[0].bound, computed)]
        advice = [Advice(next_step_of_bound(bounds[0].key), 0.0), *verdict.advice]
    elif shares and computed >= 1 - STALLED:
        bounds = mixed([BoundShare(one.bound, one.share) for one in shares])
        advice = [Advice(next_step_of_bound(bounds[0].key), 0.0), *verdict.advice]
    else:
        causes = _attributed(verdict, {Cause.COPY: copied, contention: held_up}, time)
        bounds = ranked_bounds((one.bound, one.share) for one in causes) or bounds
        advice = [Advice(next_step(one.key), 0.0) for one in causes if one.share >= LEAST_SHARE]
    ranked = sorted(kernels, key=lambda one: -one.ns)
    return replace(
        verdict,
        bounds=bounds,
        causes=causes,
        kernels=[KernelShare(one.name, *_sum_of([one], timed_ns)) for one in ranked[:5]],
        kernel_classes=shares,
        evidence=[verdict.evidence[0], *lines, *verdict.evidence[1:]],
        advice=advice,
    )


def _by_counters(verdict: Verdict, active: Mapping[Bound, float]) -> Verdict:
    """The verdict on a thread that waits for its device, where no run was timed."""
    bound = class_by_counters(active)
    if bound is None or verdict.bounds[0].key != Bound.DEVICE:
        return verdict
    bounds = [BoundShare(bound, verdict.bounds[0].share), *verdict.bounds[1:]]
    evidence = [verdict.evidence[0], _counter_evidence(active), *verdict.evidence[1:]]
    advice = [Advice(next_step_of_bound(bound), 0.0), *verdict.advice[1:]]
    return replace(verdict, bounds=bounds, evidence=evidence, advice=advice)


def _counter_evidence(active: Mapping[Bound, float]) -> str:
    busy = (
        f"{_COUNTERS[bound]} {100 * active[bound]:.0f} %" for bound in _COUNTERS if bound in active
    )
    return f"hardware counters of the device, of the time: {', '.join(busy)}"


def _sum_of(group: list[Total], timed_ns: int) -> tuple[int, float, int]:
    """(ns, share of the time, count)."""
    ns = sum(one.ns for one in group)
    return ns, ns / timed_ns, sum(one.count for one in group)


def _copied(runs: list[Total], calls: list[Total], window: int, timed_ns: int) -> float:
    """Share of the time in which the device copied."""
    share = 0.0
    for direction in {one.direction for one in runs if one.call == CallKind.COPY}:
        mine = [one for one in runs if one.call == CallKind.COPY and one.direction == direction]
        ns, moved = sum(one.ns for one in mine), sum(one.bytes for one in mine)
        asked = sum(
            one.bytes for one in calls if one.call == CallKind.COPY and one.direction == direction
        )
        share += ns / timed_ns if not moved or not asked else ns * asked / moved / window
    return share


def _attributed(
    verdict: Verdict, device: Mapping[Cause, float], time: ThreadTime
) -> list[CauseShare]:
    """The causes of the thread, less those that its waits for the device explain.

    A thread that waits for a device which does not compute launches late because of that wait: its
    launches and code count as synchronization, up to the length of the waits. Code that takes
    longer than the waits keeps its rank: without it the time would shrink by more than without the
    waits. `device`: shares of the time in which the device did something else than compute; these
    come first.
    """
    left = verdict.computing
    extra: dict[Cause, float] = {}
    for cause, share in device.items():
        extra[cause] = min(left, share)
        left -= extra[cause]
    causes = []
    synchronized = 0.0
    for one in sorted(verdict.causes, key=lambda one: one.key != Cause.LAUNCH):
        part = min(left, one.share) if one.key in (Cause.LAUNCH, Cause.HOST) else 0.0
        if one.key == Cause.HOST and one.share > part > 0.5 * one.share:
            part = 0.0
        left -= part
        synchronized += part
        part -= extra.pop(one.key, 0.0)
        ns = one.ns - round(part * verdict.window_ns)
        if ns > 0:
            causes.append(replace(one, ns=ns, share=one.share - part))
    for cause, share in {**extra, Cause.SYNCHRONIZATION: synchronized}.items():
        if share:
            waited = cause in (Cause.SYNCHRONIZATION, Cause.GPU_CONTENTION, Cause.NOT_TAKEN)
            causes.append(
                CauseShare(
                    key=cause,
                    title=cause.description,
                    bound=cause.bound,
                    detail=CauseDetail.NONE,
                    ns=round(share * verdict.window_ns),
                    share=share,
                    count=0,
                    longest_ns=0,
                    thread=verdict.device_name,
                    locations=locations(time.wait_places, time.waited) if waited else [],
                    facts=[],
                )
            )
    return sorted(causes, key=lambda one: -one.ns)
