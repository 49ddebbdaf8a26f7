# SPDX-License-Identifier: Apache-2.0
"""A verdict as text for people and as JSON for scripts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sonde.export import strict_json
from sonde.export.layout import columns, duration, one_line
from sonde.model.causes import Bound, Cause, in_host_words
from sonde.model.verdict import (
    CauseShare,
    DeviceShare,
    Explained,
    Explanation,
    PathPart,
    Sampling,
    Verdict,
)

FORMAT = 2
"""Raised when a field is renamed or removed; new fields leave it as it is."""

PLACES = 2
"""Places in a line of the text; smaller ones than the first are shown if they are large."""
LARGE_PLACE = 0.05
"""Of a cause's time, for a place that is always shown."""
LEAST_PLACE = 0.005
"""Of a cause's time, for a place that the text shows: less is 0 %."""
MOSTLY_IDLE = 0.5
"""Of the time, for a thread whose heading has it."""
REQUESTS, REQUEST_WAITS = 5, 2
"""Traced requests, and waits of each, that the text shows."""
CAUSE_ROWS = 6
KERNELS = 3
"""Causes, and kernels with device shares, that the text shows; the JSON has all."""
FURTHER, MAIN_BOUNDS = 4, 2
"""Verdicts beside the first one that the headline has a line for, and bounds of each."""
VERDICTS, LINES = 3, 99
"""Verdicts, and lines of evidence of each, that a page shows."""
_DIRECTIONS = {
    "h2d": "to the device",
    "d2h": "to the host",
    "d2d": "within the device",
    "p2p": "between devices",
    "unknown": "of unknown direction",
}
_OF_MANY = re.compile(r"of [\d,]+ threads, the ")
"""The note on a capture of which some threads were chosen."""
_WORD = re.compile(r"\w+")
_FUNCTOR = re.compile(r"[Ff]unctor|_kernel_cuda|launch_")
"""Words among the template arguments of a kernel of PyTorch that show what it computes."""


def render(explanation: Explanation, steps: int = 0) -> str:
    """The answer, without a line end behind its last line. `steps`: how many steps are listed."""
    lines: list[str] = []
    for verdict in explanation.verdicts:
        if lines:
            lines.append("")
        lines += of_verdict(verdict, steps)
    if requests := of_requests(explanation):
        lines += ["", *requests]
    for note in explanation.notes:
        lines.append(f"note: {note}")
    return "\n".join(map(one_line, lines))


def headline(explanation: Explanation, command: str = "") -> str:
    """Some lines for the first verdict: what limits the work, where in the program and by whom, and
    the next step; a line for each further one; '' where there is none. `command`: it shows all that
    is left out."""
    if not explanation.verdicts:
        return ""
    verdict = explanation.verdicts[0]
    lines = of_verdict(verdict)
    short = lines[1:2] if verdict.is_short else []
    shown = [f"VERDICT  {lines[0]}", *short, *_main_cause(verdict)]
    shown += [line for line in lines if line.startswith("  next: ")]
    shown += _further(explanation.verdicts[1:], command)
    shown += [f"  note: {note}" for note in explanation.notes if _OF_MANY.match(note)]
    if requests := of_requests(explanation):
        shown += ["", *requests]
    return "\n".join(map(one_line, shown))


def _further(verdicts: Sequence[Verdict], command: str) -> list[str]:
    """A line for each verdict: what it is about, and what has most of its time, with the share."""
    lines = []
    for one in verdicts[:FURTHER]:
        bounds = [f"{each.key.label} {100 * each.share:.0f} %" for each in one.bounds[:MAIN_BOUNDS]]
        text = ", ".join(bounds)
        lines.append(
            f"  also: {_about(one)} — {in_host_words(text) if one.without_device else text}"
        )
    if more := len(verdicts) - len(lines):
        lines.append(f"  also: {more} more")
    return [*lines, f"  the rest: {command}"] if lines and command else lines


def headline_or_why(explained: Explained) -> str:
    """The headline, or why there is none; '' where there is nothing to explain."""
    if explained.explanation is not None:
        return headline(explained.explanation, explained.command)
    command = f": {explained.command}" if explained.command else ""
    return one_line(f"VERDICT  none: {explained.missing}{command}") if explained.missing else ""


def _main_cause(verdict: Verdict) -> list[str]:
    """The largest cause of the bound that is named first: with its place, and who is behind it."""
    mine = (one for one in verdict.causes if one.bound == verdict.bounds[0].key)
    cause = max(mine, key=lambda one: one.ns, default=None)
    causes = [] if cause is None else [cause]
    steps = (one for number, one in enumerate(verdict.advice[:2]) if one.with_former or not number)
    keys = {key for step in steps for key in step.causes}
    # Time without a CPU beside another cause that is large.
    causes += [one for one in verdict.causes if one.key in keys and one is not cause]
    lines = []
    for one in causes:
        if one.locations or one.facts:
            place = one.locations[0].text if one.locations else ""
            share, title, _ = _rows(one)[0]
            lines.append(f"  {share}  {title}  {place}".rstrip())
            lines += [f"  {fact}" for fact in one.facts]
    return lines


def of_verdict(verdict: Verdict, steps: int = 0) -> list[str]:
    """The lines of one verdict, on a device or a thread. `steps`: how many steps are listed."""
    bound = verdict.bounds[0].key.description
    if len(verdict.bounds) > 1:
        keys = {one.key for one in verdict.bounds}
        whole = Bound.KERNELS if keys & {Bound.COMPUTE, Bound.MEMORY} else None
        shares = (
            f"{'all kernels' if one.key == whole else one.key.label} {100 * one.share:.0f} %"
            for one in verdict.bounds
        )
        bound = f"mix: {', '.join(shares)}"
    if verdict.without_device:
        bound = in_host_words(bound)
        idle = sum(one.share for one in verdict.causes if one.key == Cause.IDLE)
        if idle >= MOSTLY_IDLE and verdict.bounds[0].key != Bound.IDLE:
            bound = f"idle {100 * idle:.0f} %, else {bound}"
    did, did_not = "computed", "stalls by cause"
    if verdict.device < 0:
        did = "waited for its device"
        # Where the device's runs are known, causes are of the time in which it did not compute.
        did_not = "stalls by cause" if verdict.kernel_classes else "other time by cause"
    lines = [f"{_about(verdict)} — {bound}"]
    if verdict.is_short:
        lines.append(
            f"  only {duration(verdict.window_ns)} were recorded: what is rare is not in it, and "
            "shares are rough; record longer to be sure"
        )
    if verdict.without_device:
        did_not = f"time by cause, of {duration(verdict.window_ns)}"
        if verdict.request_ns:
            did_not = f"time of requests by cause, of {duration(verdict.request_ns)}"
    else:
        lines.append(f"  {did} {100 * verdict.computing:.1f} % of {duration(verdict.window_ns)}")
    if verdict.sampling is not None:
        lines += _sampled(verdict, verdict.sampling)
    lines += _on_device(verdict.device_shares)
    shown = [cause for cause in verdict.causes if cause.share >= 0.005][:CAUSE_ROWS]
    if shown:
        lines.append(f"  {did_not}:")
        lines += columns([row for cause in shown for row in _rows(cause)], (-10, 0, 0))
    for line in verdict.evidence[1:]:
        lines.append(f"  evidence: {one_line(line)}")
    if verdict.steps is not None:
        table = verdict.steps
        lines.append(
            f"  {table.count:,} steps of {duration(table.median_ns)} (p10 "
            f"{duration(table.p10_ns)}, p90 {duration(table.p90_ns)}), {table.operations:,} "
            f"operation{'s' * (table.operations != 1)} each, {100 * table.regularity:.0f} % alike"
        )
    for phase in verdict.phases:
        bounds = ", ".join(one.key.label for one in phase.bounds)
        lines.append(
            f"  phase: {phase.name}, {duration(phase.window_ns)}, computed "
            f"{100 * phase.computing:.0f} %: {bounds}"
        )
    if verdict.critical_path:
        lines.append(f"  critical path of a typical step: {_path(verdict.critical_path)}")
    if steps and verdict.steps is not None:
        lines += _steps(verdict, steps)
    for number, one in enumerate(verdict.advice):
        if number and not one.with_former:
            break
        gain = f" → up to −{100 * one.gain:.0f} % time" if one.gain else ""
        lines.append(f"  next: {'and ' * one.with_former}{one.text}{gain}")
    return lines


def _about(verdict: Verdict) -> str:
    """What a verdict is about: 'GPU0 (H200)', 'threads t60 (60) and 5 more', 'requests of ...'."""
    if verdict.device >= 0:
        return f"GPU{verdict.device}" + f" ({verdict.device_name})" * bool(verdict.device_name)
    # 'thread 4130 of train.py (4121)' is the name of one that has none.
    plain = verdict.device_name.removeprefix("thread ")
    name = f"thread{'s' * (verdict.threads > 1)} {plain}"
    if verdict.threads > 1:
        name += f" and {verdict.threads - 1:,} more"
    if not verdict.request_ns:
        return name
    where = name if verdict.threads == 1 else f"{verdict.threads:,} threads"
    return f"requests{' of ' * bool(verdict.service)}{verdict.service}, in {where}"


def of_requests(explanation: Explanation) -> list[str]:
    """A table of the slowest traced requests; none where none were traced."""
    if not explanation.requests:
        return []
    rows: list[tuple[str, ...]] = [("  trace", "observed", "on CPU", "ready", "waits")]
    for one in explanation.requests[:REQUESTS]:
        waits = ", ".join(f"{duration(wait.ns)} {wait.text}" for wait in one.waits[:REQUEST_WAITS])
        times = map(duration, (one.ns, one.cpu_ns, one.runqueue_ns))
        rows.append((f"  {one.trace_id}", *times, f"{waits or 'none'}"))
    head = f"slowest of {explanation.requests_in_all:,} traced requests:"
    return [head, *columns(rows, (34, -8, -8, -8, 0))]


def _sampled(verdict: Verdict, sampling: Sampling) -> list[str]:
    shares = [f"computed ± {100 * sampling.half_width['computing']:.1f}"]
    shares += [
        f"{one.key.label} {100 * one.share:.1f} ± {100 * sampling.half_width[one.key]:.1f}"
        for one in verdict.bounds
        if one.key in sampling.half_width
    ]
    share = 100 * sampling.traced_ns / max(1, sampling.whole_ns)
    lines = [
        f"  seen in {sampling.windows:,} windows, {share:.0f} % of {duration(sampling.whole_ns)}: "
        f"{', '.join(shares)} points (95 %)"
    ]
    return lines + [f"  limits of sampling: {text}" for text in sampling.cannot]


def _on_device(shares: Sequence[DeviceShare]) -> list[str]:
    """A line on what runs that were timed one by one took of the time; the share of all kernels
    together is in the evidence."""
    large = [one for one in shares if one.share >= 0.01]
    texts = {
        "kernels": [f"{_short(one.name)} {one.text}" for one in large if one.kind == "kernel"][
            :KERNELS
        ],
        "copies": [
            f"{_DIRECTIONS.get(one.name, one.name)} {one.text}"
            for one in large
            if one.kind == "copy"
        ],
        "sets": [one.text for one in large if one.kind == "set"],
    }
    parts = [f"{title} {', '.join(found)}" for title, found in texts.items() if found]
    return [f"  on the device, of the time (95 %): {'; '.join(parts)}"] if parts else []


def _rows(cause: CauseShare) -> list[tuple[str, str, str]]:
    """The line of a cause with its first places, and further lines with the other ones that are
    large."""
    kind = f" ({cause.detail})" if cause.detail and cause.detail not in cause.title else ""
    places = [
        place.text + (f" {100 * place.share:.0f} %" if place.share < 0.95 else "")
        for number, place in enumerate(cause.locations)
        if place.share >= (LEAST_PLACE if number < PLACES else LARGE_PLACE)
    ]
    lines = [", ".join(places[at : at + PLACES]) for at in range(0, len(places), PLACES)] or [""]
    first = (f"{100 * cause.share:.1f} %", f"{cause.title}{kind}", lines[0])
    return [first, *(("", "", line) for line in lines[1:])]


def _path(parts: Sequence[PathPart]) -> str:
    """The four largest parts, those with the same short name summed up."""
    shares: dict[str, float] = {}
    for part in parts:
        name = _short(part.name)
        shares[name] = shares.get(name, 0.0) + part.share
    ranked = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{100 * share:.0f} % {name}" for name, share in ranked[:4] if share >= 0.005)


def _short(name: str) -> str:
    """A kernel's name without its types, but for the one that shows what it computes."""
    template, _, types = name.partition("<")
    text = one_line(template.removeprefix("void ").removeprefix("at::native::").strip() or name)
    does = [word for word in _WORD.findall(types) if _FUNCTOR.search(word)]
    if does:
        text = f"{text.split('::')[-1].removesuffix('_kernel')}: {does[-1]}"
    return text if len(text) <= 48 else text[:47] + "…"


def _steps(verdict: Verdict, limit: int) -> list[str]:
    table = verdict.steps
    assert table is not None
    origin = verdict.start_ns
    rows: list[tuple[str, ...]] = [("step", "at", "length", "computing")]
    for number, (start, length, computing) in enumerate(
        zip(table.start_ns, table.duration_ns, table.computing_ns, strict=True)
    ):
        if number == limit:
            rows.append(("…", "", "", ""))
            break
        share = f"{100 * computing / length:.1f} %" if length else "-"
        rows.append((str(number), duration(start - origin), duration(length), share))
    return columns(rows, (-8, -10, -10, -10))


def document(explanation: Explanation) -> dict[str, Any]:
    """The same for scripts: times in ns, shares of 1."""
    return {
        "format": FORMAT,
        "verdicts": [
            {
                **asdict(verdict),
                "bound": verdict.bound,
                "device_shares": [
                    {**asdict(one), "half_width": one.half_width} for one in verdict.device_shares
                ],
            }
            for verdict in explanation.verdicts
        ],
        "requests": [asdict(one) for one in explanation.requests],
        "requests_in_all": explanation.requests_in_all,
        "sources": list(explanation.sources),
        "notes": list(explanation.notes),
    }


def shown(explained: Explained) -> dict[str, Any]:
    """What a page shows of it (`web/src/report.tsx`): the first verdicts, without causes and lines
    that would not be drawn."""
    found = explained.explanation
    drawn = None
    if found is not None:
        verdicts = [*map(_shown, found.verdicts[:VERDICTS])]
        drawn = {"verdicts": verdicts, "notes": found.notes[:LINES]}
    return {"missing": explained.missing, "command": explained.command, "explanation": drawn}


def _shown(verdict: Verdict) -> dict[str, Any]:
    fields = ("device", "device_name", "computing", "window_ns", "without_device", "threads")
    return {
        **{name: getattr(verdict, name) for name in fields},
        "bounds": [asdict(one) for one in verdict.bounds],
        "causes": [
            {
                "key": one.key,
                "title": one.title,
                "bound": one.bound,
                "share": one.share,
                "locations": [asdict(place) for place in one.locations[:1]],
                "facts": [*one.facts],
            }
            for one in verdict.causes
            if one.share >= 0.005
        ],
        "evidence": verdict.evidence[:LINES],
        "advice": [asdict(one) for one in verdict.advice[:LINES]],
    }


def to_json(explanation: Explanation) -> str:
    """The document as text."""
    return strict_json.dumps(document(explanation), indent=1)


def several_to_json(explained: Sequence[tuple[Sequence[str], Explanation]]) -> str:
    """The document on several records, each (its files, the explanation): of more than one, each
    verdict and request has its `files`, and each note names them."""
    if len(explained) == 1:
        return to_json(explained[0][1])
    parts = [(list(files), document(one)) for files, one in explained]
    notes = [f"{' + '.join(files)}: {note}" for files, one in parts for note in one["notes"]]
    lists = {
        name: [it | {"files": files} for files, one in parts for it in one[name]]
        for name in ("verdicts", "requests")
    }
    return strict_json.dumps(
        {
            "format": FORMAT,
            **lists,
            "requests_in_all": sum(one["requests_in_all"] for _, one in parts),
            "sources": [source for _, one in parts for source in one["sources"]],
            "notes": notes,
        },
        indent=1,
    )
