# SPDX-License-Identifier: Apache-2.0
"""Holds verdicts on captures of Sonde's own device time against the program's own truth."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.explain import truth as truths
from bench.explain.expected import PARTS, is_right, planted, right_bound
from bench.explain.score import programs_right, proportion
from sonde.analyze.bound import explain
from sonde.query.capture import Capture, read
from sonde.recording.timelines import open_timeline

_ON_DEVICE = {"kernel", "replay", "copy", "set"}


@dataclass(frozen=True)
class OwnScore:
    """One recording of one program."""

    kind: str
    seed: int
    recording: str
    verdict: str
    expected: str
    right: bool
    full: str
    """The verdict on a full trace of the same process, right after."""
    dilated: float
    """What the step took longer in that trace, in points of the step alone."""
    on_device: bool
    """Whether runs made streams of a device, so that its gaps are known."""
    runs: int
    """Of the device, timed."""
    mean_weight: float
    """How many each stands for."""
    share: float
    """Of the time, in points: of the planted cause."""
    truth: float | None
    """The same by the step times with and without the cause, nobody watching."""
    slower: float
    """What the step took longer while it was recorded, in points of the step alone."""
    step_error: float | None
    """Of the mean step found against the program's own, in parts; None: no steps found."""
    busy: float | None
    """Points of the time in which the device was busy, by the weights of the timed runs."""
    busy_half: float | None
    """Half of its 95 % interval."""
    busy_truth: float
    """The same by torch.profiler's trace of the same process, right after."""


def score(folder: Path, recording: str) -> OwnScore:
    """Explain one recording and compare."""
    known = json.loads((folder / "truth.json").read_text())
    kind, phases = known["kind"], known["phases"]
    free_s, off_s = phases["free"]["step_s"], phases["off"]["step_s"]
    compared = off_s and off_s != free_s and _has_without(kind)
    cost = 1 - off_s / free_s if compared else None
    path = folder / f"{recording}.sonde"
    capture = read(path)
    timeline = open_timeline([path])
    verdicts = explain(timeline).verdicts
    verdict = verdicts[0] if verdicts else None
    expected = right_bound(kind, cost, 0.0)
    parts = PARTS.get(kind, (planted(kind),))
    run = capture.tables["device_run"]
    kinds = np.array(run.column("kind").cast("string").to_pylist())
    mine = np.isin(kinds, list(_ON_DEVICE))
    weight = run.column("weight").to_numpy()[mine]
    steps = verdict.steps if verdict else None
    found_s = sum(steps.duration_ns) / steps.count / 1e9 if steps else 0.0
    here = phases[recording]
    busy, half = _busy(capture, timeline.timed_ns)
    return OwnScore(
        kind=kind,
        seed=known["seed"],
        recording=recording,
        verdict="+".join(one.key for one in verdict.bounds) if verdict else "",
        expected=expected,
        right=bool(verdict and is_right(verdict.bounds[0].key, expected, bool(timeline.busy_of))),
        full=_full(folder),
        dilated=100 * (phases["traced"]["step_s"] / free_s - 1),
        on_device=bool(len(timeline.device)),
        runs=int(mine.sum()),
        mean_weight=float(weight.mean()) if mine.any() else 0.0,
        share=100 * sum(one.share for one in verdict.causes if one.bound in parts)
        if verdict
        else 0.0,
        truth=None if cost is None else 100 * cost,
        slower=100 * (here["step_s"] / free_s - 1),
        step_error=abs(found_s / here["step_s"] - 1) if found_s else None,
        busy=busy,
        busy_half=half,
        busy_truth=_busy_truth(folder),
    )


def _has_without(kind: str) -> bool:
    """Whether the program has a step without its cause."""
    return kind not in {
        *("memory_bound", "compute_bound", "serialised_streams", "graph_replay"),
        *("compiled_pointwise", "jax_products"),
    }


def _busy(capture: Capture, timed: tuple[int, int] | None) -> tuple[float | None, float | None]:
    """(points of the time in which runs were timed that all of them stand for, half of the 95 %
    interval)."""
    run = capture.tables["device_run"]
    kinds = np.array(run.column("kind").cast("string").to_pylist())
    start = run.column("start_time_ns").to_numpy().astype(np.int64)
    length = (run.column("end_time_ns").to_numpy().astype(np.int64) - start).astype(float)
    weight = run.column("weight").to_numpy()
    if timed is None:
        return None, None
    whole, variance = float(timed[1] - timed[0]), 0.0
    for (
        kind
    ) in _ON_DEVICE:  # counts are known to within a block: what is left is how long each took
        mine = kinds == kind
        heavy, off = weight[mine], length[mine] - (length[mine].mean() if mine.any() else 0.0)
        variance += float((heavy * (heavy - 1) * off**2).sum())
    rows = np.isin(kinds, list(_ON_DEVICE))
    return 100 * float((weight * length)[rows].sum()) / whole, 196 * variance**0.5 / whole


def _trace(folder: Path) -> Path:
    return next(one for one in folder.iterdir() if one.name.startswith("trace.json"))


def _full(folder: Path) -> str:
    verdicts = explain(open_timeline([_trace(folder), folder / "waits.sonde"])).verdicts
    return verdicts[0].bounds[0].key if verdicts else ""


def _busy_truth(folder: Path) -> float:
    return 100 * (1 - truths.of_trace(_trace(folder), []).idle)


def rows_of(scores: list[OwnScore]) -> list[str]:
    """A line for each."""
    lines = []
    for one in scores:
        cells = (
            f"{one.truth:5.1f}" if one.truth is not None else "    -",
            f"{one.slower:6.1f}",
            f"{100 * one.step_error:7.2f}%" if one.step_error is not None else "       -",
            f"{one.busy:5.1f}" if one.busy is not None else "    -",
            f"{one.busy_truth:5.1f} {one.dilated:6.1f}",
        )
        lines.append(
            f"{one.kind:20s} {one.recording:8s} {'+' if one.right else '-'} {one.verdict:24s} "
            f"{one.full:15s} {one.expected:15s} "
            f"{one.runs:6} {one.mean_weight:9.1f} {one.share:5.1f} " + " ".join(cells)
        )
    return lines


def table(scores: list[OwnScore]) -> str:
    """All recordings, then the sums."""
    lines = [
        "kind                 recording verdict                   "
        "full trace      expected         runs  each for share truth "
        "slower step-off  busy  true traced"
    ]
    lines += rows_of(scores)
    for recording in dict.fromkeys(one.recording for one in scores):
        mine = [one for one in scores if one.recording == recording]
        lines.append(
            f"{recording}: right {proportion(sum(one.right for one in mine), len(mine))}; "
            f"with streams of the device {sum(one.on_device for one in mine)}; "
            f"step within 1 % {sum((one.step_error or 1) <= 0.01 for one in mine)}"
        )
        lines.append(f"  programs right in all of their runs: {programs_right(mine)}")
        same = sum(one.verdict.split("+")[0] == one.full for one in mine)
        lines.append(f"  the full trace's verdict: {proportion(same, len(mine))}")
        right = sum(one.full == one.expected for one in mine)
        lines.append(f"  right itself: {proportion(right, len(mine))}")
        known = [(abs(one.busy - one.busy_truth), one.busy_half or 0.0) for one in mine
                if one.busy is not None]  # fmt: skip
        slower = sorted(one.slower for one in mine)[len(mine) // 2]
        lines.append(
            f"  busy within a point of torch.profiler's: {sum(off <= 1 for off, _ in known)} of "
            f"{len(known)}; within a point and its own interval "
            f"{sum(off <= 1 + half for off, half in known)}; recorded {slower:.2f} points slower"
        )
    return "\n".join(lines)
