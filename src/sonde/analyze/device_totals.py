# SPDX-License-Identifier: Apache-2.0
"""Adds device time to the verdict on a launching thread, where single runs were timed.

The weighted totals of the runs, over the time in which they were timed, give the share of time in
which the device computed. The bytes of all copies are known, timed or not, so the time of copies
follows from the speed of the timed ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sonde.analyze.advice import next_step_of_bound, next_step_on
from sonde.analyze.device_waits import RESULT_BYTES
from sonde.analyze.kernels import ALONE, class_by_counters, class_of
from sonde.analyze.offenders import OtherUse
from sonde.analyze.ordered_streams import ordered_copies, work_of_second_stream
from sonde.analyze.ranking import (
    LEAST_SHARE,
    MOSTLY_COMPUTING,
    SECOND_BOUND_SHARE,
    STALLED,
    UNDERFILLED_BOUND,
    of_kernels,
    ranked_bounds,
    with_stalls,
)
from sonde.analyze.slowed_launches import without_hand_overs
from sonde.analyze.thread_time import ThreadTime, cause_lines, locations
from sonde.analyze.trace_totals import ExactTime
from sonde.model.causes import Bound, Cause
from sonde.model.collectives import is_collective
from sonde.model.timeline import CallKind, CopyDirection, Total, TotalKind, WaitDetail
from sonde.model.verdict import (
    Advice,
    BoundShare,
    CauseShare,
    CodeLocation,
    DeviceShare,
    KernelClassShare,
    KernelShare,
    Verdict,
)

_KERNELS = (CallKind.LAUNCH, CallKind.GRAPH_LAUNCH)
_OF_WAITS = (Cause.SYNCHRONIZATION, Cause.GPU_CONTENTION, Cause.COLLECTIVE)
"""Causes that show in the thread's waits for the device."""
SAME_SHARE = 0.005
"""Shares of the time that differ by less are printed alike."""
_COUNTERS = {Bound.MEMORY: "memory bandwidth", Bound.COMPUTE: "tensor cores"}


@dataclass(frozen=True, slots=True)
class _Waits:
    """What a thread's waits for the device stand for. Shares of the time."""

    for_kernels: float
    """Waits while the device computed: faster kernels would shorten them."""
    counted: float
    """Stalls that count as synchronization."""
    before_code: float
    """Stalls of code and launches that would not be if the thread did not wait: code and launches
    would run while the device computes."""
    before_launches: float
    """The stalls of launches among them: fewer launches would save these, too."""

    def serializing(self, parts: Iterable[tuple[Bound, float]]) -> float:
        """What not waiting would save, if that is worth a next step beside that for the code, whose
        stalls it would save, too; else 0. It is never more than the code's stalls."""
        code = sum(share for bound, share in parts if bound == Bound.HOST)
        saved = max(self.counted, min(self.before_code, code))
        return saved if saved >= SECOND_BOUND_SHARE and saved > self.counted else 0.0

    def with_launches(self, parts: Iterable[tuple[Bound, float]]) -> float:
        """What fewer launches would save, where not waiting saves a part of the same; else 0."""
        alone = sum(share for bound, share in parts if bound == Bound.LAUNCH)
        return alone + self.before_launches if self.before_launches >= SECOND_BOUND_SHARE else 0.0


def with_runs(
    verdict: Verdict,
    runs: list[Total],
    calls: list[Total],
    window: int,
    timed_ns: int,
    active: Mapping[Bound, float],
    others: Sequence[OtherUse],
    time: ThreadTime,
    reported: float | None = None,
    shares_of_runs: Sequence[DeviceShare] = (),
    exact: ExactTime | None = None,
) -> Verdict:
    """The verdict on a thread with the device's time in it.

    `runs`: totals of the device's runs; `calls`: totals of the thread; `window`: the time of
    `calls`, in ns; `timed_ns`: the time in which runs were timed; `active`: shares of that time by
    the device's counters (`sonde.analyze.kernels`); `others`: other processes that used the device
    meanwhile; `time`: of the thread; `reported`: share of the time with kernels of its process, by
    the driver; `shares_of_runs`: what runs took of the time, with intervals; `exact`: where a
    trace has all runs. Runs overlap, and their sum has an error of sampling: it is an upper limit.
    """
    if not runs:
        return _by_counters(verdict, active)
    ran = [one for one in runs if one.kind == TotalKind.RUN and _is_work(one)]
    kernels = [one for one in ran if not is_collective(one.name)]
    exchanged = sum(one.ns for one in ran if is_collective(one.name)) / timed_ns
    summed = sum(one.ns for one in kernels) / timed_ns
    computed = min(1.0, summed)
    by_driver = reported is not None and reported < computed
    if reported is not None:
        computed = min(computed, reported)
    if exact is not None:
        computed = exact.computed
    built = computed * _for_building(runs)
    counted = {bound: share for bound, share in active.items() if share > 0}
    by_counters = class_by_counters(
        {bound: part / max(computed, part) for bound, part in counted.items()}
    )
    interrupted = sum(one.ns for one in runs if one.kind == TotalKind.INTERRUPTED)
    copied = min(1.0 - computed, _copied(runs, calls, window, timed_ns))
    if exact is not None:
        copied, exchanged = min(copied, exact.copying), exact.exchanging
    # Collectives that kernels hide are no stalls: while the thread waits, the rest is.
    exposed = min(exchanged, max(0.0, verdict.computing - computed - copied))
    held_up = min(1.0 - computed, interrupted / timed_ns)
    by_others = sum(one.share for one in others)
    if others:
        # The thread waited for a device that ran none of its work, and others' work meanwhile.
        unexplained = verdict.computing - computed - copied - exposed
        # Kernels that others interrupt take longer, and so explain the waits for them. Others have
        # the device as often while the thread waits for its kernels as at other times.
        beside = min(computed, verdict.computing) * by_others
        held_up = max(held_up, min(max(unexplained, beside), by_others, 1.0 - computed))
        if unexplained <= 0 and computed + by_others >= 1 - STALLED:
            # The device is full: what others have of it, this process has not. Its own kernels
            # take longer meanwhile, and so explain all of its waits.
            held_up = max(held_up, min(by_others, 1.0 - computed))
    classes: dict[Bound, list[Total]] = defaultdict(list)
    for one in kernels:
        by_name = class_of(one.name) if one.call in _KERNELS else Bound.MEMORY
        classes[by_counters if by_counters and by_name == Bound.KERNELS else by_name].append(one)
    shares = [
        KernelClassShare(bound, *_sum_of(group, timed_ns)) for bound, group in classes.items()
    ]
    if computed < summed:
        shares = [replace(one, share=one.share * computed / summed) for one in shares]
    shares.sort(key=lambda one: -one.ns)
    bounds = verdict.bounds
    how = "by the driver's reports" if by_driver else "by runs timed singly"
    lines = [f"the device computed {_with_interval(computed, shares_of_runs)} of the time, {how}"]
    if exact is not None:
        lines = [f"kernels ran for {100 * computed:.1f} % of the traced time"]
    elif summed - computed >= LEAST_SHARE:
        lines.append(
            f"runs timed singly sum up to {100 * summed:.0f} % of the time: they overlap, or are "
            "few; the driver's report is an upper limit"
        )
    if built >= LEAST_SHARE:
        lines.append(f"of it, {100 * built:.0f} points for graphs that were captured")
    if by_counters and any(class_of(one.name) == Bound.KERNELS for one in kernels):
        lines.append(_counter_evidence(active))
    if exchanged >= LEAST_SHARE:
        lines.append(f"collectives ran for about {100 * exchanged:.0f} % of the time")
    asking = _asking(runs, time)
    if exact is not None:  # a trace has no stacks of launches; samples of the thread show them
        path = time.places[Cause.LAUNCH]
        asking = locations(path, sum(path.values()), time.callers)
        asking = [one for one in asking if one.function and one.share >= LEAST_SHARE]
    elif asking:
        named = ", ".join(f"{one.text} {100 * one.share:.0f} %" for one in asking)
        lines.append(f"kernels by the code that launched them, of their time: {named}")
    whom = [one.text for one in others[:2]]
    computing = sum(one.ns for one in kernels)
    alone = sum(one.ns for one in runs if one.kind == TotalKind.UNDERFILLED)
    of_device = {Cause.COPY: copied, Cause.COLLECTIVE: exposed, Cause.GPU_CONTENTION: held_up}
    reading = _reading(runs, time)
    causes, waits = _attributed(verdict, computed - built, of_device, time, reading)
    causes = without_hand_overs(causes, time.count, window)
    contended = [one for one in causes if one.key == Cause.GPU_CONTENTION]
    if any(one.share >= LEAST_SHARE for one in contended):  # its line of evidence has its facts
        causes = [replace(one, facts=whom) if one in contended else one for one in causes]
    else:
        lines += whom
    advice = [Advice(next_step_on(one), 0.0) for one in causes if one.share >= LEAST_SHARE]
    parts = [(one.bound, one.share) for one in causes]
    ranked_kernels = (
        of_kernels([BoundShare(one.bound, one.share) for one in shares]) if shares else []
    )
    if shares and alone >= UNDERFILLED_BOUND * computing and computing <= ALONE * timed_ns:
        ranked_kernels = [BoundShare(Bound.SMALL_KERNELS, computed)]
    ranked_kernels = [replace(it, locations=asking) for it in ranked_kernels]
    if shares and computed - built >= 1 - STALLED:
        bounds = with_stalls(ranked_kernels, parts)
        advice.append(Advice(next_step_of_bound(bounds[0].key), 0.0))
        names_kernels = True
    else:
        serial = waits.serializing(parts)
        bounds = ranked_bounds(parts) or bounds
        if serial:
            lines.append(
                f"waits for the device keep {100 * serial:.0f} % of the time from running beside "
                "it: where code behind them needs no result, reading results later saves as much"
            )
            bounds = _with_share(bounds, Bound.SYNCHRONIZATION, serial)
        joint = waits.with_launches(parts)
        if joint:
            lines.append(
                f"launches keep the device waiting for {100 * joint:.0f} % of the time, in part "
                "because they begin after a wait for it: fewer launches save that, too"
            )
            bounds = _with_share(bounds, Bound.LAUNCH, joint)
        least = LEAST_SHARE if computed >= MOSTLY_COMPUTING else SECOND_BOUND_SHARE
        names_kernels = waits.for_kernels >= least
        if names_kernels:  # what the thread waits for limits the work, too
            bounds = [*bounds, *ranked_kernels]
    ordered = None
    if names_kernels:
        ordered = work_of_second_stream(runs, calls, timed_ns, computed, time)
    exposed_copies = sum(one.share for one in causes if one.key == Cause.COPY)
    ordered = ordered or ordered_copies(calls, exposed_copies, window, time)
    if ordered:
        bounds = [*bounds, ordered.bound]
        lines.append(ordered.evidence)
    before, after = set(cause_lines(verdict.causes)), cause_lines(causes)
    evidence = [*after, *(line for line in verdict.evidence[1:] if line not in before)]
    ranked = sorted(ran, key=lambda one: -one.ns)
    return replace(
        verdict,
        bounds=bounds,
        causes=causes,
        kernels=[KernelShare(one.name, *_sum_of([one], timed_ns)) for one in ranked[:5]],
        kernel_classes=shares,
        device_shares=shares_of_runs,
        evidence=[verdict.evidence[0], *lines, *evidence],
        advice=advice,
    )


def _with_share(bounds: Iterable[BoundShare], bound: Bound, share: float) -> list[BoundShare]:
    """Bounds with this share of the time in place of what the bound had, the largest first. It is
    of stalls that others have, too, and takes no place of theirs."""
    found = [*(one for one in bounds if one.key != bound), BoundShare(bound, share)]
    return sorted(found, key=lambda one: -one.share)


def _is_work(run: Total) -> bool:
    """Whether a run is work of the device itself: a kernel, or a copy within its memory, which
    takes the place of one in its stream and uses nothing else."""
    return run.call in _KERNELS or (
        run.call == CallKind.COPY and run.direction == CopyDirection.D2D
    )


def _reads_results(run: Total) -> bool:
    return run.direction == CopyDirection.D2H and run.bytes <= RESULT_BYTES * run.count


def _with_interval(computed: float, shares: Sequence[DeviceShare]) -> str:
    """The share of the time with an interval, where `shares` begins with the same one: of kernels
    alone, which no report of the driver limits."""
    if shares and abs(shares[0].share - computed) < SAME_SHARE:
        return shares[0].text
    return f"about {100 * computed:.0f} %"


def _for_building(runs: Iterable[Total]) -> float:
    """The part of the kernels' time that warmed up graphs which were captured again and again."""
    asked = [one for one in runs if one.kind == TotalKind.STREAM]
    built = sum(one.ns for one in asked if one.wait_detail == WaitDetail.GRAPH_CAPTURE)
    return built / max(1, sum(one.ns for one in asked))


def _reading(runs: Iterable[Total], time: ThreadTime) -> float:
    """The part of the launch path at places that wait for the device, longer than they copy, and
    launch no kernel: it is what the calls that wait cost on a CPU (`.item()`), and would go with
    them. 0 where waits are for copies, or no place is known that launches kernels."""
    launching = {one.location for one in runs if one.kind == TotalKind.STREAM} - {""}
    if time.for_copies or not launching:
        return 0.0
    path, copies = time.places[Cause.LAUNCH], time.places[Cause.COPY]
    waits = {place for place, ns in time.wait_places.items() if ns > copies.get(place, 0)}
    ns = sum(path[place] for place in path.keys() & waits - launching)
    return ns / max(1, time.ns[Cause.LAUNCH])


def _asking(runs: Iterable[Total], time: ThreadTime) -> list[CodeLocation]:
    """The places that asked for most of the kernels' time; shares below `LEAST_SHARE` are left
    out."""
    places: dict[str, int] = defaultdict(int)
    for one in runs:
        if one.kind == TotalKind.STREAM:
            places[one.location] += one.ns
    ranked = locations(places, sum(places.values()), time.callers)
    return [one for one in ranked if one.function and one.share >= LEAST_SHARE]


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
    """Share of the time in which the device copied from or to other memory than its own. Copies to
    the host that read results take no time: their calls wait (`sonde.analyze.thread_time`)."""
    share = 0.0
    copies = [
        one
        for one in runs
        if one.call == CallKind.COPY and not _is_work(one) and not _reads_results(one)
    ]
    for direction in {one.direction for one in copies}:
        mine = [one for one in copies if one.direction == direction]
        ns, moved = sum(one.ns for one in mine), sum(one.bytes for one in mine)
        asked = sum(
            one.bytes for one in calls if one.call == CallKind.COPY and one.direction == direction
        )
        share += ns / timed_ns if not moved or not asked else ns * asked / moved / window
    return share


def _attributed(
    verdict: Verdict,
    computed: float,
    device: Mapping[Cause, float],
    time: ThreadTime,
    reading: float,
) -> tuple[list[CauseShare], _Waits]:
    """The causes of the time in which the device did not compute, and what waits stand for.

    `computed`: without kernels that only build graphs. A thread works while the device does, too:
    only `1 - computed` of the time are stalls. What the device did in them comes first (`device`:
    shares of the time), then what the thread was blocked by. Code and launches are left:

    - Waits behind copies to the device, one for one, are the copies', as far as they are longer
      than the device computed.
    - Code keeps its time: without it the device would have had its work that much earlier.
    - The thread's waits for the device delay all launches behind them: launches count as
      synchronization up to the length of the waits, and so do waits that are longer than the
      device computed.
    - Launches come last: they go on while the device computes.
    """
    stalled = max(0.0, 1.0 - computed)
    waits = verdict.computing
    found: dict[Cause, float] = {}
    for cause, share in device.items():
        found[cause] = min(waits, share, stalled)
        waits -= found[cause]
        stalled -= found[cause]
    if time.for_copies:
        copying = min(stalled, max(0.0, waits - computed))
        found[Cause.COPY] += copying
        waits -= copying
        stalled -= copying
    own = {one.key: one.share for one in verdict.causes}
    code, launch = own.pop(Cause.HOST, 0.0), own.pop(Cause.LAUNCH, 0.0)
    unknown = own.pop(Cause.UNKNOWN, 0.0)
    reads = reading * launch
    blocked = sum(own.values())
    for cause, share in own.items():
        found[cause] = found.get(cause, 0.0) + share * min(1.0, stalled / max(blocked, 1e-9))
    stalled = max(0.0, stalled - blocked)
    kept = min(code, stalled)
    in_vain = max(0.0, waits - computed)  # waits while the device ran nothing
    synchronized = min(waits + reads, stalled - kept, launch + in_vain)
    left = max(0.0, stalled - synchronized - kept)
    found[Cause.HOST] = kept
    found[Cause.SYNCHRONIZATION] = found.get(Cause.SYNCHRONIZATION, 0.0) + synchronized
    found[Cause.LAUNCH] = min(max(0.0, launch - synchronized), left)
    found[Cause.UNKNOWN] = min(unknown, left - found[Cause.LAUNCH])
    known = {one.key: one for one in verdict.causes}
    waited = locations(time.wait_places, time.waited, time.callers)
    causes = []
    for cause, share in found.items():
        ns = round(share * verdict.window_ns)
        if ns <= 0:
            continue
        at = waited if cause in _OF_WAITS else []
        empty = CauseShare.empty(cause, thread=verdict.device_name, locations=at)
        causes.append(replace(known.get(cause, empty), ns=ns, share=share))
    # A full queue is polled: nothing that the program asked for, and no place is known.
    asked = min(1.0, sum(time.wait_places.values()) / max(1, time.waited))
    stand = _Waits(
        for_kernels=min(max(0.0, waits), computed),
        counted=synchronized,
        before_code=asked * min(waits, kept + synchronized),
        before_launches=asked * min(max(0.0, synchronized - reads), launch - reads),
    )
    return sorted(causes, key=lambda one: -one.ns), stand
