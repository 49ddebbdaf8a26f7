# SPDX-License-Identifier: Apache-2.0
"""The verdict on a device: what limits the work, the evidence, and one next step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sonde.analyze.advice import next_step
from sonde.analyze.blame import Blame, blame_device
from sonde.analyze.causes import CAUSES, KEYS
from sonde.analyze.critical_path import critical_path
from sonde.analyze.details import detail_of
from sonde.analyze.host_view import host_verdicts, with_short_waits
from sonde.analyze.idle import Stalls, State, devices_of
from sonde.analyze.kernels import classes_of, top_kernels, underfilled_share
from sonde.analyze.phases import phases_of
from sonde.analyze.places import places_of
from sonde.analyze.ranking import STALLED, UNDERFILLED_BOUND, mixed, ranked_bounds
from sonde.analyze.sampling import sampling_of
from sonde.analyze.steps import steps_of
from sonde.analyze.throttling import Throttling, throttling_of
from sonde.model.timeline import Timeline
from sonde.model.verdict import (
    Advice,
    Bound,
    CauseShare,
    Explanation,
    KernelShare,
    Verdict,
)

KNOWN_GAIN = 0.05
"""A stall that takes this share of the time is the next step also where kernels are the bound."""
HELD_DOWN = 0.15
"""Time lost to clocks that were held down, from which on they are the bound."""
_KERNELS = {
    "compute": "products",
    "memory": "kernels that stream through memory",
    "kernels": "other kernels",
}


_WITHOUT_STREAMS = (
    "no device activity in it: nothing to explain",
    "no device time in it: this is what the threads that call the device waited for",
    "single runs of the device were timed: how busy it was is known, not when it waited; this is "
    "what the threads that call it did meanwhile",
)


def explain(timeline: Timeline) -> Explanation:
    """A verdict for each device of the timeline."""
    verdicts = [verdict_of(timeline, device) for device in devices_of(timeline)]
    notes = list(timeline.notes)
    if tuple(timeline.sources) == ("sonde",):
        verdicts = with_short_waits(timeline, verdicts)
    if not verdicts:
        verdicts = host_verdicts(timeline)
        notes.append(_WITHOUT_STREAMS[bool(verdicts) + bool(verdicts and timeline.timed_ns)])
    elif not len(timeline.states):
        notes.append(
            "without the machine's waits (a capture by `sonde record` beside it) locks, rivals for "
            "a CPU, quotas and page faults show as host code"
        )
    return Explanation(verdicts, timeline.sources, notes)


def verdict_of(
    timeline: Timeline, device: int, start_ns: int | None = None, end_ns: int | None = None
) -> Verdict:
    """The verdict on one device, between two instants if given."""
    blamed = blame_device(timeline, device, start_ns, end_ns)
    stalls = blamed.stalls
    causes = _causes(timeline, blamed)
    classes = classes_of(timeline, stalls)
    window = max(1, stalls.window_ns)
    computing = stalls.computing.total / window
    underfilled = underfilled_share(timeline, stalls)

    throttling = throttling_of(timeline, stalls)

    def judge(
        causes: list[CauseShare], classes: list[KernelShare], computing: float
    ) -> list[Bound]:
        found = _bounds(causes, classes, computing, underfilled[0])
        lost = throttling.lost if throttling else 0.0
        device = found[0].key in ("compute", "kernels", "serial")
        return [Bound("throttled", lost)] if lost >= HELD_DOWN and device else found

    bounds = judge(causes, classes, computing)
    steps = steps_of(timeline, stalls)
    idle = int(stalls.duration_ns[stalls.state == State.IDLE].sum()) / window
    return Verdict(
        device=device,
        device_name=timeline.devices.get(device, ""),
        start_ns=int(stalls.window.start[0]) if len(stalls.window) else 0,
        end_ns=int(stalls.window.end[-1]) if len(stalls.window) else 0,
        window_ns=stalls.window_ns,
        bounds=bounds,
        computing=computing,
        idle=idle,
        causes=causes,
        kernels=top_kernels(timeline, stalls),
        kernel_classes=classes,
        evidence=[
            *_evidence(stalls, computing, idle, causes, classes, underfilled, bounds),
            *_left(blamed),
            *_throttled(throttling),
        ],
        advice=_advice(causes, bounds, throttling),
        steps=steps,
        critical_path=critical_path(timeline, stalls, steps),
        phases=phases_of(timeline, blamed, steps, judge),
        sampling=sampling_of(timeline, blamed, bounds, steps),
    )


def _causes(timeline: Timeline, blamed: Blame) -> list[CauseShare]:
    stalls = blamed.stalls
    duration = stalls.duration_ns
    window = max(1, stalls.window_ns)
    ns = np.bincount(blamed.cause, duration, len(KEYS)).astype(np.int64)
    found = []
    for number in np.argsort(-ns, kind="stable").tolist():
        if not ns[number]:
            continue
        cause = CAUSES[KEYS[number]]
        rows = blamed.cause == number
        lanes, weight = _by_lane(blamed, rows)
        lane = int(lanes[weight.argmax()]) if len(lanes) else -1
        large = ns[number] >= 0.01 * window
        detail, facts = detail_of(cause.key, timeline, blamed) if large else ("", [])
        found.append(
            CauseShare(
                key=cause.key,
                title=cause.title,
                bound=cause.bound,
                detail=detail,
                ns=int(ns[number]),
                share=float(ns[number] / window),
                count=int(rows.sum()),
                longest_ns=int(duration[rows].max()),
                thread=timeline.lanes[lane].label if lane >= 0 else "",
                places=places_of(timeline, blamed, cause.key, lane) if large else [],
                facts=facts,
            )
        )
    return found


def _by_lane(blamed: Blame, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    known = rows & (blamed.lane >= 0)
    lanes, inverse = np.unique(blamed.lane[known], return_inverse=True)
    return lanes, np.bincount(inverse, blamed.stalls.duration_ns[known], len(lanes))


def _bounds(
    causes: list[CauseShare], classes: list[KernelShare], computing: float, underfilled: float
) -> list[Bound]:
    unknown = [Bound("unknown", 0.0)]
    if sum(cause.share for cause in causes) >= STALLED or computing <= 0:
        return ranked_bounds((cause.bound, cause.share) for cause in causes) or unknown
    if underfilled >= UNDERFILLED_BOUND:
        return [Bound("serial", computing)]
    kernels = max(1, sum(one.ns for one in classes))
    return mixed([Bound(one.name, computing * one.ns / kernels) for one in classes]) or unknown


def _evidence(
    stalls: Stalls,
    computing: float,
    idle: float,
    causes: list[CauseShare],
    classes: list[KernelShare],
    underfilled: tuple[float, int],
    bounds: list[Bound],
) -> list[str]:
    lines = [
        f"kernels ran for {100 * computing:.1f} % of {stalls.window_ns / 1e6:,.1f} ms, "
        f"nothing at all for {100 * idle:.1f} %"
    ]
    keys = {bound.key for bound in bounds}
    for cause in causes:
        if cause.bound in keys and cause.share >= 0.01:
            lines.append(
                f"{cause.title}: {100 * cause.share:.1f} %, {_times(cause.count)}, at most "
                f"{cause.longest_ns / 1e6:.2f} ms" + "".join(f"; {fact}" for fact in cause.facts)
            )
    for one in classes:
        if one.name in keys and one.ns:
            what = _KERNELS[one.name]
            lines.append(f"{what}: {100 * one.share:.1f} % of the time, {one.count:,} kernels")
    if "serial" in keys:
        lines.append(
            f"{100 * underfilled[0]:.0f} % of the kernel time one kernel ran alone that fills less "
            f"than half of the device, over {underfilled[1]} streams"
        )
    return lines


def _left(blamed: Blame) -> list[str]:
    if not blamed.threads_left:
        return []
    return [
        f"{blamed.threads_left:,} more threads were late for a shorter time each; why is not "
        "looked into, and counts as not known"
    ]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _throttled(found: Throttling | None) -> list[str]:
    if found is None:
        return []
    return [
        f"clocks were held down for {100 * found.share:.0f} % of the time "
        f"({found.reason.replace('_', ' ')}): {found.clock_hz / 1e6:,.0f} of "
        f"{found.highest_hz / 1e6:,.0f} MHz, {100 * found.lost:.1f} % of the time lost at most"
    ]


def _advice(
    causes: list[CauseShare], bounds: list[Bound], throttling: Throttling | None
) -> list[Advice]:
    found = [
        Advice(next_step(cause.key, cause.detail), cause.share)
        for cause in causes
        if cause.share >= 0.02
    ]
    device = [
        Advice(next_step(bound.key), 0.0)
        for bound in bounds
        if bound.key in ("compute", "memory", "kernels", "serial")
    ]
    if not device and bounds[0].key != "throttled":
        return found
    # What can be had for certain goes before what may make kernels faster by nobody knows how much.
    known = [one for one in found if one.gain >= KNOWN_GAIN]
    rest = [one for one in found if one.gain < KNOWN_GAIN]
    if throttling is not None and bounds[0].key == "throttled":
        device.insert(0, Advice(next_step("throttled", throttling.kind), throttling.lost))
        return [*device, *known, *rest]
    return [*known, *device, *rest]


def causes_of(timeline: Timeline) -> Iterator[tuple[int, int, int, str]]:
    """(device, start_ns, end_ns, title of its cause) of every stall of every device."""
    for device in devices_of(timeline):
        blamed = blame_device(timeline, device)
        stalls = blamed.stalls
        columns = (stalls.start.tolist(), stalls.end.tolist(), blamed.cause.tolist())
        for start, end, cause in zip(*columns, strict=True):
            yield device, start, end, CAUSES[KEYS[cause]].title
