# SPDX-License-Identifier: Apache-2.0
"""Holds a verdict against what is known of a run, and sums up runs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench.explain import kept
from bench.explain import truth as truths
from bench.explain.expected import (
    EXPECTED,
    MATTERS,
    PARTS,
    PLANTED,
    is_right,
    planted,
    right_bound,
)
from sonde.analyze.bound import explain
from sonde.model.causes import Bound
from sonde.model.verdict import Verdict
from sonde.recording.timelines import open_timeline

CORES = range(8, 16)
"""Of those that explain, while the next runs are measured on others."""
WITHIN = 5.0
"""Points that blame may be off."""


@dataclass(frozen=True)
class Score:
    """One run."""

    kind: str
    seed: int
    verdict: str
    expected: str
    """What it is bound by, by what was measured of it (`expected.right_bound`)."""
    share: float
    """Of the time, in points: the planted cause's."""
    truth: float | None
    """The same by the steps with and without the cause; None where there is no without."""
    clock: float | None
    """The same by the clock around the loops, their ends with them."""
    rest: float
    """What the device waits for without the cause, in points of the step with it."""
    right: bool
    by_name: bool
    """Whether the verdict is the bound that the program is named for, however little that costs."""
    detail: str
    detail_right: bool
    sum_error: float
    """Of blame against the stalls, in parts."""
    idle: float
    """Points of the time with nothing on the device."""
    idle_error: float
    """Off what a plain sweep over the same trace gives, in points."""
    step_error: float | None
    """Of the mean step found against the program's own over the same time, in parts; None: none."""
    median_error: float | None
    """The same of the usual step."""
    windowed: str
    """The verdict from windows of it: a quarter of the time, in five pieces."""

    @property
    def blame_error(self) -> float | None:
        return None if self.truth is None else abs(self.share - self.truth)


def score(folder: Path, with_waits: bool = True) -> Score:
    """Explain one run and compare. Raises NothingRanError where a trace is empty."""
    known = json.loads((folder / "truth.json").read_text())
    kind = known["kind"]
    details = EXPECTED[kind][1]
    trace = _file(folder, "trace.json")
    assert trace is not None
    true = truths.of_trace(trace, known.get("stamps_ns"))
    found = measured(folder, known, true)
    cost, rest = found.cost, found.rest
    expected = right_bound(kind, cost, rest)
    waits = [folder.parent / known["waits"]] if with_waits else []
    timeline = open_timeline([trace, *waits])
    verdict = explain(timeline).verdicts[0]
    windows = _windows(verdict, random.Random(f"{kind}-{known['seed']}"))
    windowed = explain(replace(timeline, windows_ns=windows)).verdicts[0]
    parts = PARTS.get(kind, (planted(kind),))
    share = sum(cause.share for cause in verdict.causes if cause.bound in parts)
    found_cause = next(
        (cause for cause in verdict.causes if cause.bound == EXPECTED[kind][0]), None
    )
    texts = (
        [found_cause.key, found_cause.detail, *(one.function for one in found_cause.locations)]
        if found_cause
        else []
    )
    stalled = sum(cause.ns for cause in verdict.causes)
    expected_ns = verdict.window_ns * (1 - verdict.computing)
    steps = verdict.steps
    starts = np.array(steps.start_ns if steps else (), np.int64)
    ends = starts + np.array(steps.duration_ns if steps else (), np.int64)
    return Score(
        kind=kind,
        seed=known["seed"],
        verdict="+".join(one.key for one in verdict.bounds),
        expected=expected,
        share=100 * share,
        truth=None if cost is None else 100 * cost,
        clock=None if found.clock is None else 100 * found.clock,
        rest=100 * rest,
        right=is_right(verdict.bounds[0].key, expected, bool(timeline.busy_of)),
        by_name=verdict.bounds[0].key == EXPECTED[kind][0],
        detail=found_cause.detail if found_cause else "",
        detail_right=not details or any(word in text for word in details for text in texts),
        sum_error=abs(stalled - expected_ns) / max(1.0, expected_ns),
        idle=100 * verdict.idle,
        idle_error=100 * abs(verdict.idle - true.idle),
        step_error=true.step_error(starts.tolist(), ends.tolist()),
        median_error=true.median_error(steps.median_ns) if steps else None,
        windowed=windowed.bounds[0].key,
    )


def _file(folder: Path, name: str) -> Path | None:
    return next((path for path in folder.iterdir() if path.name in (name, f"{name}.gz")), None)


@dataclass(frozen=True)
class Measured:
    """What a run costs, by nothing of Sonde's."""

    cost: float | None
    """Of the planted cause, in parts of the step: by the device's begin with each step in both
    traces, or by the clock around both loops where not every step is known."""
    clock: float | None
    """By the clock."""
    rest: float
    """What the device waits for without the cause, in parts of the step with it."""


def measured(folder: Path, known: dict[str, Any], true: truths.Truth) -> Measured:
    """`true`: of the trace with the cause."""
    on_s, off_s = known["step_on_s"], known["step_off_s"]
    if not off_s or EXPECTED[known["kind"]][0] == Bound.SMALL_KERNELS:
        return Measured(None, None, 0.0)
    clock = 1 - off_s / on_s
    path = _file(folder, "off.json")
    if path is None:
        return Measured(known.get("cost", clock), clock, known.get("rest", 0.0) / 100)
    stamps = known.get("stamps_off_ns", [])
    without = truths.of_trace(path, stamps)
    with_ns, without_ns = true.step_ns(known["steps"]), without.step_ns(len(stamps) - 1)
    cost = 1 - without_ns / with_ns if with_ns and without_ns else clock
    return Measured(cost, clock, without.stalled * (1 - cost))


def _windows(verdict: Verdict, rng: random.Random) -> list[tuple[int, int]]:
    """One window at random in each fifth of the time."""
    part = verdict.window_ns // 5
    starts = [verdict.start_ns + i * part + rng.randrange(max(1, 3 * part // 4)) for i in range(5)]
    return [(start, start + part // 4) for start in starts]


def keep_away() -> None:
    """Leave the cores of the runs to them."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, set(CORES))


def scored(folder: Path, keep: bool = False) -> Score:
    """Score a run, and remove what it left unless something is off, or all is kept."""
    made = score(folder)
    near = (made.blame_error or 0.0) <= WITHIN and (made.step_error or 0.0) <= 0.01
    if keep or not (made.right and made.detail_right and near):
        known = {} if made.truth is None else {"cost": made.truth / 100}
        kept.shrink(folder, rest=made.rest, **known)
    else:
        shutil.rmtree(folder)
    return made


def wilson(right: int, of: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a proportion (E. B. Wilson, 1927)."""
    if not of:
        return 0.0, 1.0
    share = right / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return middle - half, middle + half


def table(scores: list[Score]) -> str:
    """All runs by kind, then the sums."""
    by_kind: dict[str, list[Score]] = defaultdict(list)
    for one in scores:
        by_kind[one.kind].append(one)
    lines = [
        "kind                  runs right detail  blame: share truth worst-off  "
        "step-off idle-off  verdicts"
    ]
    for kind, runs in by_kind.items():
        errors = [one.blame_error for one in runs if one.blame_error is not None]
        steps = [one.step_error for one in runs if one.step_error is not None]
        costs = [one.truth for one in runs if one.truth is not None]
        lines.append(
            f"{kind:20s} {len(runs):5} {sum(one.right for one in runs):5} "
            f"{sum(one.detail_right for one in runs):6} "
            f"{sum(one.share for one in runs) / len(runs):12.1f} "
            f"{sum(costs) / len(costs) if costs else float('nan'):5.1f} "
            f"{max(errors) if errors else float('nan'):9.1f} "
            f"{100 * max(steps) if steps else float('nan'):8.2f}% "
            f"{max(one.idle_error for one in runs):8.2f}"
            f"  {','.join(sorted({one.verdict for one in runs}))}"
        )
    count = len(scores)
    detail = sum(one.right and one.detail_right for one in scores)
    errors = [one.blame_error for one in scores if one.blame_error is not None]
    by_clock = [abs(one.share - one.clock) for one in scores if one.clock is not None]
    near = sum(error <= WITHIN for error in errors)
    worst = max((one.sum_error for one in scores), default=0.0)
    costly = [one for one in scores if one.truth is not None and one.kind not in PLANTED]
    costly = [one for one in costly if (one.truth or 0) >= 100 * MATTERS]
    steps = [one.step_error for one in scores if one.step_error is not None]
    usual = [one.median_error for one in scores if one.median_error is not None]
    lines += [
        f"programs right in all of their runs: {programs_right(scores)}",
        f"right, by what was measured: {proportion(sum(one.right for one in scores), count)}; "
        f"with the right detail: {detail}",
        f"the bound that the program is named for, whatever it costs: "
        f"{proportion(sum(one.by_name for one in scores), count)}; of those whose planted cause "
        f"costs {100 * MATTERS:.0f} % of the step or more {sum(one.by_name for one in costly)} of "
        f"{len(costly)}",
        f"blame within {WITHIN:g} points: {near} of {len(errors)}; "
        f"median off {sorted(errors)[len(errors) // 2] if errors else 0:.1f} points; "
        f"by the clock around the loops {sum(off <= WITHIN for off in by_clock)}",
        f"blame sums to the stalls within {100 * worst:.4f} %",
        f"idle within 1 point: {sum(one.idle_error <= 1 for one in scores)} of {count}; "
        f"worst {max((one.idle_error for one in scores), default=0):.3f} points",
        f"step within 1 %: {sum(error <= 0.01 for error in steps)} of {count}, "
        f"the usual one {sum(error <= 0.01 for error in usual)}; "
        f"without steps {count - len(steps)}",
        f"from windows (a quarter of the time) the same verdict: "
        f"{sum(one.windowed == one.verdict.split('+')[0] for one in scores)} of {count}",
    ]
    return "\n".join(lines)


class Judged(Protocol):
    """A score of one run of a program."""

    @property
    def kind(self) -> str:
        """The program."""

    @property
    def right(self) -> bool:
        """Whether the verdict is right."""


def programs_right(scores: Sequence[Judged]) -> str:
    """How many programs were right in all of their runs: what an accuracy counts."""
    right: dict[str, bool] = {}
    for one in scores:
        right[one.kind] = right.get(one.kind, True) and one.right
    wrong = sorted(kind for kind, is_right in right.items() if not is_right)
    found = proportion(len(right) - len(wrong), len(right))
    return found + (f"; not {', '.join(wrong)}" if wrong else "")


def proportion(right: int, of: int) -> str:
    """With its 95 % interval."""
    low, high = wilson(right, of)
    return (
        f"{right} of {of} = {100 * right / max(1, of):.1f} % "
        f"(Wilson 95 %: {100 * low:.1f} to {100 * high:.1f} %)"
    )
