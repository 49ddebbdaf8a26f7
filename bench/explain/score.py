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
from dataclasses import dataclass, replace
from pathlib import Path

from bench.explain.expected import EXPECTED
from sonde.analyze.bound import explain
from sonde.cli.timelines import open_timeline
from sonde.model.verdict import Verdict

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
    share: float
    """Of the time, in points: the expected bound's."""
    truth: float | None
    """The same by the step times with and without the cause; None where there is no without."""
    right: bool
    detail: str
    detail_right: bool
    sum_error: float
    """Of blame against the stalls, in parts."""
    step_error: float | None
    """Of the step time found against the measured one, in parts."""
    windowed: str
    """The verdict from windows of it: a quarter of the time, in five pieces."""

    @property
    def blame_error(self) -> float | None:
        return None if self.truth is None else abs(self.share - self.truth)


def score(folder: Path, with_waits: bool = True) -> Score:
    """Explain one run and compare."""
    truth = json.loads((folder / "truth.json").read_text())
    bound, details, _ = EXPECTED[truth["kind"]]
    trace = next(path for path in folder.iterdir() if path.name.startswith("trace.json"))
    waits = [folder.parent / truth["waits"]] if with_waits else []
    timeline = open_timeline([trace, *waits])
    verdict = explain(timeline).verdicts[0]
    windows = _windows(verdict, random.Random(f"{truth['kind']}-{truth['seed']}"))
    windowed = explain(replace(timeline, windows_ns=windows)).verdicts[0]
    share = sum(cause.share for cause in verdict.causes if cause.bound == bound)
    said = next((cause for cause in verdict.causes if cause.bound == bound), None)
    texts = [said.detail, *(place.function for place in said.places)] if said else []
    off = truth["step_off_s"]
    stalled = sum(cause.ns for cause in verdict.causes)
    expected_ns = verdict.window_ns * (1 - verdict.computing)
    measured = truth["step_on_s"] * 1e9
    found = sum(verdict.steps.duration_ns) / verdict.steps.count if verdict.steps else 0
    return Score(
        kind=truth["kind"],
        seed=truth["seed"],
        verdict="+".join(one.key for one in verdict.bounds),
        share=100 * share,
        truth=100 * (1 - off / truth["step_on_s"]) if off and bound != "serial" else None,
        right=verdict.bounds[0].key == bound,
        detail=said.detail if said else "",
        detail_right=not details or any(word in text for word in details for text in texts),
        sum_error=abs(stalled - expected_ns) / max(1.0, expected_ns),
        step_error=abs(found - measured) / measured if found else None,
        windowed=windowed.bounds[0].key,
    )


def _windows(verdict: Verdict, rng: random.Random) -> list[tuple[int, int]]:
    """One window at random in each fifth of the time."""
    part = verdict.window_ns // 5
    starts = [verdict.start_ns + i * part + rng.randrange(max(1, 3 * part // 4)) for i in range(5)]
    return [(start, start + part // 4) for start in starts]


def keep_away() -> None:
    """Leave the cores of the runs to them."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, set(CORES))


def scored(folder: Path) -> Score:
    """Score a run, and remove what it left unless the verdict was wrong."""
    made = score(folder)
    if made.right and made.detail_right:
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
        "kind                  runs right detail  blame: share truth worst-off  step-off  verdicts"
    ]
    for kind, runs in by_kind.items():
        errors = [one.blame_error for one in runs if one.blame_error is not None]
        steps = sorted(one.step_error for one in runs if one.step_error is not None)
        truths = [one.truth for one in runs if one.truth is not None]
        lines.append(
            f"{kind:20s} {len(runs):5} {sum(one.right for one in runs):5} "
            f"{sum(one.detail_right for one in runs):6} "
            f"{sum(one.share for one in runs) / len(runs):12.1f} "
            f"{sum(truths) / len(truths) if truths else float('nan'):5.1f} "
            f"{max(errors) if errors else float('nan'):9.1f} "
            f"{100 * steps[len(steps) // 2] if steps else float('nan'):8.1f}% "
            f" {','.join(sorted({one.verdict for one in runs}))}"
        )
    right = sum(one.right for one in scores)
    low, high = wilson(right, len(scores))
    detail = sum(one.right and one.detail_right for one in scores)
    errors = [one.blame_error for one in scores if one.blame_error is not None]
    near = sum(error <= WITHIN for error in errors)
    worst = max((one.sum_error for one in scores), default=0.0)
    lines += [
        f"right: {right} of {len(scores)} = {100 * right / max(1, len(scores)):.1f} % "
        f"(Wilson 95 %: {100 * low:.1f} to {100 * high:.1f} %); with the right detail: {detail}",
        f"blame within {WITHIN:g} points: {near} of {len(errors)}; "
        f"median off {sorted(errors)[len(errors) // 2] if errors else 0:.1f} points",
        f"blame sums to the stalls within {100 * worst:.4f} %",
        f"from windows (a quarter of the time) the same verdict: "
        f"{sum(one.windowed == one.verdict.split('+')[0] for one in scores)} of {len(scores)}",
    ]
    return "\n".join(lines)
