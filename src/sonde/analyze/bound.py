# SPDX-License-Identifier: Apache-2.0
"""The verdict on a device: what limits the work, the evidence, and one next step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from sonde.analyze.advice import next_step_of_bound, next_step_on
from sonde.analyze.beside_trace import with_code, with_run_queue
from sonde.analyze.blame import blame_device
from sonde.analyze.blamed_stalls import BlamedStalls
from sonde.analyze.causes import CAUSES
from sonde.analyze.code_locations import code_locations_of
from sonde.analyze.contention import taken_from_kernels
from sonde.analyze.critical_path import critical_path
from sonde.analyze.details import detail_of
from sonde.analyze.device_waits import waited_for_kernels
from sonde.analyze.kernels import classes_of, top_kernels, underfilled_share
from sonde.analyze.phases import phases_of
from sonde.analyze.ranking import (
    SECOND_BOUND_SHARE,
    STALLED,
    UNDERFILLED_BOUND,
    of_kernels,
    ranked_bounds,
    with_stalls,
)
from sonde.analyze.sampling import sampling_of
from sonde.analyze.stalls import DeviceState, Stalls, devices_of
from sonde.analyze.steps import steps_of
from sonde.analyze.thread_verdicts import causes_of_threads, thread_verdicts, with_short_waits
from sonde.analyze.throttling import Throttling, throttling_of
from sonde.analyze.trace_totals import traced_capture
from sonde.model.causes import Bound, Cause, CauseDetail
from sonde.model.timeline import I64, U8, Timeline
from sonde.model.verdict import (
    Advice,
    BoundShare,
    CauseShare,
    Explanation,
    KernelClassShare,
    Verdict,
)

KNOWN_GAIN = 0.05
"""Also where kernels are the bound, a cause with this share of the time is the first next step."""
THROTTLED = 0.15
"""Throttled clocks are the bound if they cost this share of the time."""
_KERNELS = {
    Bound.COMPUTE: "compute-bound kernels",
    Bound.MEMORY: "memory-bound kernels",
    Bound.KERNELS: "other kernels",
}


_OF_KERNELS = (Bound.COMPUTE, Bound.MEMORY, Bound.KERNELS, Bound.SMALL_KERNELS)
"""Bounds of a device that is rarely stalled."""
_NOTHING = "no busy thread in the record: nothing to explain"
_NO_DEVICE_CALLS = "the verdict is on the threads that work or wait most"
_OF_REQUESTS = (
    "the verdict is on what requests wait for, then on the threads that work or wait most"
)
_NO_DEVICE_TIME = "no device time in the record: the verdict is on the threads that launch work"
_SINGLE_RUNS = (
    "only single runs of the device were timed: its busy time is known, its stalls are not; the "
    "verdict is on the threads that launch work"
)


def explain(timeline: Timeline, causes: StallCauses | None = None) -> Explanation:
    """A verdict for each device of the timeline; without device streams, for launching threads;
    without device calls, for the busiest threads. `causes`: filled with those of all stalls."""
    verdicts = []
    threads = _threads_beside(timeline)
    for device in devices_of(timeline):
        if not _is_used(timeline, device):
            continue
        blamed = blame_device(timeline, device)
        verdicts.append(_of_threads(timeline, blamed, _verdict(timeline, blamed, threads)))
        if causes is not None:
            causes.keep(blamed)
    notes = list(timeline.notes)
    if tuple(timeline.sources) == ("sonde",):
        verdicts = with_short_waits(timeline, verdicts)
    if not verdicts:
        verdicts = thread_verdicts(timeline)
        verdicts = [replace(one, evidence=_who_first(one)) for one in verdicts]
        if not verdicts:
            notes.append(_NOTHING)
        elif verdicts[0].without_device:
            notes.append(_OF_REQUESTS if verdicts[0].request_ns else _NO_DEVICE_CALLS)
        else:
            notes.append(_SINGLE_RUNS if timeline.timed_ns else _NO_DEVICE_TIME)
    elif not len(timeline.states):
        notes.append(
            "without a capture of the same time (`sonde record`), locks, CPU contention, quotas "
            "and page faults show as host-bound"
        )
    return Explanation(
        verdicts, timeline.sources, notes, timeline.requests, timeline.requests_in_all
    )


def _is_used(timeline: Timeline, device: int) -> bool:
    """Whether a process that is asked about ran anything on a device; also where it is not known
    whose the device's streams are."""
    streams = [one for one in timeline.tracks if one.device == device]
    return not timeline.chosen or any(not it.pid or it.pid in timeline.chosen for it in streams)


def _of_threads(timeline: Timeline, blamed: BlamedStalls, verdict: Verdict) -> Verdict:
    """The verdict on a device with the bounds and causes of the thread that launches its work,
    where a capture beside the trace has that thread's time and the trace has no functions."""
    traced = traced_capture(timeline, blamed)
    found = thread_verdicts(traced.timeline, traced.exact) if traced else []
    first = next((one for one in found if one.kernel_classes), None)
    if first is None:
        return verdict
    return replace(
        verdict,
        bounds=first.bounds,
        causes=first.causes,
        evidence=_who_first(first),
        advice=first.advice,
    )


def _who_first(verdict: Verdict) -> list[str]:
    """The evidence on a thread: after the first line, lines on who kept it waiting go before
    those on how time was measured."""
    first, *rest = verdict.evidence
    facts = [fact for cause in verdict.causes for fact in cause.facts]
    whom = [line for line in rest if any(fact in line for fact in facts)]
    return [first, *whom, *(line for line in rest if line not in whom)]


def verdict_of(
    timeline: Timeline, device: int, start_ns: int | None = None, end_ns: int | None = None
) -> Verdict:
    """The verdict on one device, between two times if given."""
    blamed = blame_device(timeline, device, start_ns, end_ns)
    return _verdict(timeline, blamed, _threads_beside(timeline))


def _threads_beside(timeline: Timeline) -> dict[str, dict[Cause, CauseShare]]:
    """Causes of threads by the capture beside a trace; empty without one."""
    return causes_of_threads(timeline.beside) if timeline.beside else {}


def _verdict(
    timeline: Timeline, blamed: BlamedStalls, threads: Mapping[str, Mapping[Cause, CauseShare]]
) -> Verdict:
    stalls = blamed.stalls
    device = stalls.device
    causes = with_run_queue(with_code(_causes(timeline, blamed), threads), threads)
    classes = classes_of(timeline, stalls)
    window = max(1, stalls.window_ns)
    taken, by_whom = taken_from_kernels(timeline, stalls)
    causes = _with_taken(causes, taken, by_whom, window)
    computing = stalls.computing.total / window - taken
    underfilled = underfilled_share(timeline, stalls)
    throttling = throttling_of(timeline, stalls)
    waits_for_kernels = waited_for_kernels(timeline, stalls) / window

    def judge(
        causes: list[CauseShare], classes: list[KernelClassShare], computing: float
    ) -> list[BoundShare]:
        """The bounds of these shares of the time, or the clocks in place of what they slow."""
        found = _bounds(causes, classes, computing, underfilled[0], waits_for_kernels)
        lost = throttling.lost if throttling else 0.0
        by_clock = found[0].key in (Bound.COMPUTE, Bound.KERNELS, Bound.SMALL_KERNELS)
        return [BoundShare(Bound.THROTTLED, lost)] if lost >= THROTTLED and by_clock else found

    bounds = judge(causes, classes, computing)
    steps = steps_of(timeline, stalls)
    idle = int(stalls.duration_ns[stalls.state == DeviceState.IDLE].sum()) / window
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
            *_not_analysed(blamed),
            *_throttled(throttling),
        ],
        advice=_advice(causes, bounds, throttling),
        steps=steps,
        critical_path=critical_path(timeline, stalls, steps),
        phases=phases_of(timeline, blamed, steps, judge),
        sampling=sampling_of(timeline, blamed, bounds, steps),
    )


def _causes(timeline: Timeline, blamed: BlamedStalls) -> list[CauseShare]:
    stalls = blamed.stalls
    duration = stalls.duration_ns
    window = max(1, stalls.window_ns)
    ns = np.bincount(blamed.cause, duration, len(CAUSES)).astype(np.int64)
    found = []
    for number in np.argsort(-ns, kind="stable").tolist():
        if not ns[number]:
            continue
        cause = CAUSES[number]
        rows = blamed.cause == number
        tracks, weight = _by_track(blamed, rows)
        track = int(tracks[weight.argmax()]) if len(tracks) else -1
        large = ns[number] >= 0.01 * window  # of smaller causes, details and code are not searched
        detail, facts = detail_of(cause, timeline, blamed) if large else (CauseDetail.NONE, [])
        found.append(
            CauseShare(
                key=cause,
                title=cause.description,
                bound=cause.bound,
                detail=detail,
                ns=int(ns[number]),
                share=float(ns[number] / window),
                count=int(rows.sum()),
                longest_ns=int(duration[rows].max()),
                thread=timeline.tracks[track].label if track >= 0 else "",
                locations=code_locations_of(timeline, blamed, cause, track) if large else [],
                facts=facts,
            )
        )
    return found


def _with_taken(
    causes: list[CauseShare], share: float, facts: list[str], window: int
) -> list[CauseShare]:
    """The causes with what other processes took out of the kernels (`taken_from_kernels`)."""
    if not share:
        return causes
    cause = Cause.GPU_CONTENTION
    before = next((one for one in causes if one.key == cause), CauseShare.empty(cause))
    ns, whole = before.ns + round(share * window), before.share + share
    mine = replace(before, ns=ns, share=whole, facts=before.facts or facts)
    rest = [one for one in causes if one.key != cause]
    return sorted([*rest, mine], key=lambda one: -one.ns)


def _by_track(blamed: BlamedStalls, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    known = rows & (blamed.track >= 0)
    tracks, inverse = np.unique(blamed.track[known], return_inverse=True)
    return tracks, np.bincount(inverse, blamed.stalls.duration_ns[known], len(tracks))


def _bounds(
    causes: list[CauseShare],
    classes: list[KernelClassShare],
    computing: float,
    underfilled: float,
    waits_for_kernels: float,
) -> list[BoundShare]:
    """The bounds, the largest first. `underfilled`: the share of the kernel time in which one small
    kernel ran alone; `waits_for_kernels`: share of the time in which the thread waited for
    kernels: less of them would shorten it."""
    unknown = [BoundShare(Bound.UNKNOWN, 0.0)]
    parts = [(cause.bound, cause.share) for cause in causes]
    if underfilled >= UNDERFILLED_BOUND:
        kernels = [BoundShare(Bound.SMALL_KERNELS, computing)]
    else:
        ran = max(1, sum(one.ns for one in classes))
        kernels = of_kernels([BoundShare(one.bound, computing * one.ns / ran) for one in classes])
    if sum(cause.share for cause in causes) >= STALLED or computing <= 0:
        named = waits_for_kernels >= SECOND_BOUND_SHARE
        return [*ranked_bounds(parts), *(kernels if named else [])] or unknown
    return with_stalls(kernels, parts) or unknown


def _evidence(
    stalls: Stalls,
    computing: float,
    idle: float,
    causes: list[CauseShare],
    classes: list[KernelClassShare],
    underfilled: tuple[float, int],
    bounds: list[BoundShare],
) -> list[str]:
    """Figures on the bounds, for people. `underfilled`: as `underfilled_share` returns it."""
    lines = [
        f"kernels ran for {100 * computing:.1f} % of {stalls.window_ns / 1e6:,.1f} ms, "
        f"nothing at all for {100 * idle:.1f} %"
    ]
    keys = {bound.key for bound in bounds}
    for cause in causes:
        if cause.bound in keys and cause.share >= 0.01:
            each = f", {_times(cause.count)}, at most {cause.longest_ns / 1e6:.2f} ms"
            lines.append(
                f"{cause.title}: {100 * cause.share:.1f} %{each * bool(cause.count)}"
                + "".join(f"; {fact}" for fact in cause.facts)
            )
    for one in classes:
        if one.bound in keys and one.ns:
            what = _KERNELS[one.bound]
            lines.append(f"{what}: {100 * one.share:.1f} % of the time, {one.count:,} kernels")
    if Bound.SMALL_KERNELS in keys:
        lines.append(
            f"{100 * underfilled[0]:.0f} % of the kernel time, one kernel ran alone that fills "
            f"less than half of the device; streams: {underfilled[1]}"
        )
    return lines


def _not_analysed(blamed: BlamedStalls) -> list[str]:
    if not blamed.threads_left:
        return []
    return [
        f"{blamed.threads_left:,} more threads launched late, for a shorter time each; their "
        "stalls were not analysed and count as unknown"
    ]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _throttled(found: Throttling | None) -> list[str]:
    if found is None:
        return []
    return [
        f"clocks throttled for {100 * found.share:.0f} % of the time "
        f"({found.reason.replace('_', ' ')}): {found.clock_hz / 1e6:,.0f} of "
        f"{found.highest_hz / 1e6:,.0f} MHz, {100 * found.lost:.1f} % of the time lost at most"
    ]


def _advice(
    causes: list[CauseShare], bounds: list[BoundShare], throttling: Throttling | None
) -> list[Advice]:
    found = [
        Advice(next_step_on(cause), cause.share)
        for cause in causes
        if cause.share >= 0.02  # of less, a next step is not worth it
    ]
    device = [
        Advice(next_step_of_bound(bound.key), 0.0) for bound in bounds if bound.key in _OF_KERNELS
    ]
    if not device and bounds[0].key != Bound.THROTTLED:
        return found
    # Steps with a known gain go before faster kernels, whose gain is not known.
    known = [one for one in found if one.gain >= KNOWN_GAIN]
    rest = [one for one in found if one.gain < KNOWN_GAIN]
    if throttling is not None and bounds[0].key == Bound.THROTTLED:
        text = next_step_of_bound(Bound.THROTTLED, throttling.detail)
        device.insert(0, Advice(text, throttling.lost))
        return [*device, *known, *rest]
    return [*known, *device, *rest]


class StallCauses:
    """(device, start_ns, end_ns, title of the cause) of every stall of every device, as columns:
    kept from `explain`, or found at the first iteration."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._found: dict[int, tuple[I64, I64, U8]] = {}

    def keep(self, blamed: BlamedStalls) -> None:
        """The causes of all stalls of a device."""
        self._found[blamed.stalls.device] = (blamed.stalls.start, blamed.stalls.end, blamed.cause)

    def __iter__(self) -> Iterator[tuple[int, int, int, str]]:
        for device in devices_of(self._timeline):
            if device not in self._found:
                self.keep(blame_device(self._timeline, device))
            columns = (column.tolist() for column in self._found[device])
            for start, end, cause in zip(*columns, strict=True):
                yield device, start, end, CAUSES[cause].description
