# SPDX-License-Identifier: Apache-2.0
"""What runs of a device that were timed singly add to the verdict on the threads that feed it.

Their weighted totals, over the time in which they were timed, say how busy the device was. What a
copy moved is known exactly of all copies, timed or not, so those are told by their speed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from sonde.analyze.advice import next_step
from sonde.analyze.causes import CAUSES
from sonde.analyze.kernels import ALONE, class_by_counters, class_of
from sonde.analyze.ranking import LEAST_SHARE, STALLED, UNDERFILLED_BOUND, mixed, ranked_bounds
from sonde.model.timeline import CallKind, Total
from sonde.model.verdict import Advice, Bound, CauseShare, KernelShare, Verdict

_KERNELS = (CallKind.LAUNCH, CallKind.GRAPH_LAUNCH)
_WORKED = {"dram": "memory's bandwidth", "tensor": "tensor cores"}


def with_runs(
    verdict: Verdict,
    runs: list[Total],
    calls: list[Total],
    window: int,
    timed_ns: int,
    active: Mapping[str, float],
) -> Verdict:
    """The verdict with what is known of the device's own time.

    `calls`: totals of the threads' own; `window`: over which; `timed_ns`: in which runs were timed;
    `active`: parts of the time, by the device's counters (`sonde.analyze.kernels`).
    """
    if not runs:
        return _by_counters(verdict, active)
    kernels = [one for one in runs if one.call in _KERNELS]
    computed = min(1.0, sum(one.ns for one in kernels) / timed_ns)
    worked = {name: share for name, share in active.items() if share > 0}
    told = class_by_counters({name: part / max(computed, part) for name, part in worked.items()})
    rival = min(1.0 - computed, sum(one.ns for one in runs if one.name == "rival") / timed_ns)
    copied = min(1.0 - computed, _copied(runs, calls, window, timed_ns))
    classes: dict[str, list[Total]] = defaultdict(list)
    for one in kernels:
        known = class_of(one.name)
        classes[told if told and known == "kernels" else known].append(one)
    shares = [_share(name, group, timed_ns) for name, group in classes.items()]
    shares.sort(key=lambda one: -one.ns)
    causes, bounds = verdict.causes, verdict.bounds
    lines = [f"the device computed about {100 * computed:.0f} % of the time, by runs timed singly"]
    if told and any(class_of(one.name) == "kernels" for one in kernels):
        lines.append(_counted(active))
    computing = sum(one.ns for one in kernels)
    alone = sum(one.ns for one in runs if one.name == "underfilled" and one.call == CallKind.OTHER)
    if shares and computed >= 1 - STALLED and alone >= UNDERFILLED_BOUND * computing:
        bounds = [Bound("serial" if computing <= ALONE * timed_ns else shares[0].name, computed)]
        advice = [Advice(next_step(bounds[0].key), 0.0), *verdict.advice]
    elif shares and computed >= 1 - STALLED:
        bounds = mixed([Bound(one.name, one.share) for one in shares])
        advice = [Advice(next_step(bounds[0].key), 0.0), *verdict.advice]
    else:
        causes = _fed_anew(verdict, {"copy": copied, "rival": rival})
        bounds = ranked_bounds((one.bound, one.share) for one in causes) or bounds
        advice = [Advice(next_step(one.key), 0.0) for one in causes if one.share >= LEAST_SHARE]
    ranked = sorted(kernels, key=lambda one: -one.ns)
    return replace(
        verdict,
        bounds=bounds,
        causes=causes,
        kernels=[_share(one.name, [one], timed_ns) for one in ranked[:5]],
        kernel_classes=shares,
        evidence=[verdict.evidence[0], *lines, *verdict.evidence[1:]],
        advice=advice,
    )


def _by_counters(verdict: Verdict, active: Mapping[str, float]) -> Verdict:
    """Of a thread that waits for its device, of which no run was timed."""
    told = class_by_counters(active)
    if not told or verdict.bounds[0].key != "device":
        return verdict
    bounds = [Bound(told, verdict.bounds[0].share), *verdict.bounds[1:]]
    evidence = [verdict.evidence[0], _counted(active), *verdict.evidence[1:]]
    advice = [Advice(next_step(told), 0.0), *verdict.advice[1:]]
    return replace(verdict, bounds=bounds, evidence=evidence, advice=advice)


def _counted(active: Mapping[str, float]) -> str:
    worked = (f"{_WORKED[name]} {100 * active[name]:.0f} %" for name in sorted(active))
    return f"the device's own counters, of the time: {', '.join(worked)}"


def _share(name: str, group: list[Total], timed_ns: int) -> KernelShare:
    ns = sum(one.ns for one in group)
    return KernelShare(name, ns, ns / timed_ns, sum(one.count for one in group))


def _copied(runs: list[Total], calls: list[Total], window: int, timed_ns: int) -> float:
    """Part of the time in which the device copied."""
    share = 0.0
    for way in {one.way for one in runs if one.call == CallKind.COPY}:
        mine = [one for one in runs if one.call == CallKind.COPY and one.way == way]
        ns, moved = sum(one.ns for one in mine), sum(one.bytes for one in mine)
        asked = sum(one.bytes for one in calls if one.call == CallKind.COPY and one.way == way)
        share += ns / timed_ns if not moved or not asked else ns * asked / moved / window
    return share


def _fed_anew(verdict: Verdict, device: dict[str, float]) -> list[CauseShare]:
    """Its causes, with what the thread's waits for the device are to blame for.

    `device`: parts of the time in which the device did something else than compute; a thread that
    waited for it waited for that first.
    """
    left = verdict.computing
    extra: dict[str, float] = {}
    for key, share in device.items():
        extra[key] = min(left, share)
        left -= extra[key]
    causes = []
    due = 0.0
    for one in sorted(verdict.causes, key=lambda one: one.key != "launch"):
        part = min(left, one.share) if one.key in ("launch", "host") else 0.0
        left -= part
        due += part
        part -= extra.pop(one.key, 0.0)
        ns = one.ns - round(part * verdict.window_ns)
        if ns > 0:
            causes.append(replace(one, ns=ns, share=one.share - part))
    for key, share in {**extra, "synchronisation": due}.items():
        if share:
            known, ns = CAUSES[key], round(share * verdict.window_ns)
            causes.append(
                CauseShare(
                    key, known.title, known.bound, "", ns, share, 0, 0, verdict.device_name, [], []
                )
            )
    return sorted(causes, key=lambda one: -one.ns)
