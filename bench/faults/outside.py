# SPDX-License-Identifier: Apache-2.0
"""The detector alone, on series that others labelled, by that benchmark's own score.

    python -m bench.faults.outside FOLDER [--json FILE]

FOLDER: series of the Numenta Anomaly Benchmark (NAME.csv.gz) and its `combined_windows.json`. The
score is NAB's (Lavin and Ahmad 2015, and its scorer): a detection in a window counts more the
earlier it is, one outside of them costs, a window without one costs; 0 is a detector that never
reports, 100 one that reports at the start of every window. Three profiles weigh false alarms
differently. The first 15 % of a series are for learning. NAB gives every detector the threshold at
which it scores best; ours is scored with its default, too. Beside it: NAB's windowed Gaussian,
by its description, with its best threshold as well.

Both sides of a series count here (ours sees lost time, which only rises), scaled by the spread of
the learning part, since these are no shares of time.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from sonde.diagnose.detector import RECENT_TICKS, risen
from sonde.diagnose.series import SURE, Series

BASELINE = 60
"""Ticks in the detector's baseline."""
REST = 48
"""Ticks in which it does not report the same again."""
LEARNS, MAX_LEARNT = 0.15, 5_000
GAUSSIAN_WINDOW = 6_400
TIMES = tuple(0.5 * 1.25**step for step in range(20))
"""Thresholds that are tried, by what is usual."""
PROFILES = {
    "standard": (1.0, 0.11, 1.0),
    "reward low false alarms": (1.0, 0.22, 1.0),
    "reward found": (1.0, 0.11, 2.0),
}
"""Weights: of what is found, of false alarms, of what is missed."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """One series."""

    name: str
    values: list[float]
    windows: list[tuple[int, int]]
    """First and last position of each."""

    @property
    def learns(self) -> int:
        """Values before anything counts."""
        return int(LEARNS * min(len(self.values), MAX_LEARNT))


def read(folder: Path) -> list[Labelled]:
    """All series of a folder."""
    named = json.loads((folder / "combined_windows.json").read_text())
    windows = {Path(name).name: spans for name, spans in named.items()}
    found = []
    for path in sorted(folder.glob("*.csv.gz")):
        with gzip.open(path, "rt") as file:
            rows = list(csv.DictReader(file))
        times = [datetime.fromisoformat(row["timestamp"]) for row in rows]
        spans = []
        for first, last in windows[path.name.removesuffix(".gz")]:
            since, until = datetime.fromisoformat(first), datetime.fromisoformat(last)
            inside = [at for at, time in enumerate(times) if since <= time <= until]
            if inside:
                spans.append((inside[0], inside[-1]))
        values = [float(row["value"]) for row in rows]
        found.append(Labelled(path.name.removesuffix(".csv.gz"), values, spans))
    return found


def sigmoid(position: float) -> float:
    """1 at the start of a window, 0 at its end, -1 long after it."""
    return -1.0 if position > 3.0 else 2.0 / (1.0 + math.exp(5.0 * position)) - 1.0


def score(one: Labelled, alarms: Sequence[int], weights: tuple[float, float, float]) -> float:
    """Of the alarms on one series, not normalized."""
    of_found, of_false, of_missed = weights
    best: dict[tuple[int, int], float] = {}
    total = 0.0
    for at in alarms:
        if at < one.learns:
            continue
        inside = next((it for it in one.windows if it[0] <= at <= it[1]), None)
        if inside is not None:
            position = -(inside[1] - at + 1) / (inside[1] - inside[0] + 1)
            worth = of_found * sigmoid(position) / sigmoid(-1.0)
            best[inside] = max(best.get(inside, 0.0), worth)
            continue
        before = [it for it in one.windows if it[1] < at]
        if before:
            first, last = before[-1]
            total += of_false * sigmoid((at - last) / max(1, last - first))
        else:
            total -= of_false
    return total + sum(best.values()) - of_missed * (len(one.windows) - len(best))


def normalized(
    every: Sequence[Labelled], alarms: Sequence[Sequence[int]], weights: tuple[float, float, float]
) -> float:
    """Over all series: 0 never reports, 100 is perfect."""
    windows = sum(len(one.windows) for one in every)
    raw = sum(score(one, found, weights) for one, found in zip(every, alarms, strict=True))
    nothing, perfect = -weights[2] * windows, weights[0] * windows
    return round(100 * (raw - nothing) / (perfect - nothing), 2)


def ours(one: Labelled, times: float) -> list[int]:
    """Positions at which the detector has a suspicion; `times`: what thresholds are taken by."""
    least, spread = SURE[Series.READY]
    learnt = sorted(one.values[: one.learns])
    low, high = learnt[len(learnt) // 20], learnt[-1 - len(learnt) // 20]
    unit = (high - low) or abs(high) or 1.0
    values = [value / unit for value in one.values]
    alarms: list[int] = []
    for at in range(BASELINE + RECENT_TICKS, len(values)):
        if alarms and at - alarms[-1] < REST:
            continue
        recent = values[at - RECENT_TICKS + 1 : at + 1]
        before = values[at - RECENT_TICKS + 1 - BASELINE : at - RECENT_TICKS + 1]
        for sign in (1.0, -1.0):
            if risen(
                [sign * it / times for it in before],
                [sign * it / times for it in recent],
                least,
                spread,
            ):
                alarms.append(at)
                break
    return alarms


def gaussian(one: Labelled, threshold: float) -> list[int]:
    """NAB's windowed Gaussian: how unlikely a value is, by mean and deviation of a window."""
    values, alarms = one.values, []
    total = squares = 0.0
    for at, value in enumerate(values):
        count = min(at, GAUSSIAN_WINDOW)
        if count > 1:
            mean = total / count
            deviation = math.sqrt(max(squares / count - mean * mean, 1e-12))
            if abs(value - mean) / deviation > threshold:
                alarms.append(at)
        total, squares = total + value, squares + value * value
        if at >= GAUSSIAN_WINDOW:
            old = values[at - GAUSSIAN_WINDOW]
            total, squares = total - old, squares - old * old
    return alarms


def best(
    every: Sequence[Labelled], find: Callable[[Labelled, float], list[int]], tried: Sequence[float]
) -> dict[str, Any]:
    """The scores at the threshold that is best under the standard profile, as NAB does, by it."""
    found: dict[str, Any] = {}
    sweeps = {times: [find(one, times) for one in every] for times in tried}
    for name, weights in PROFILES.items():
        scores = {times: normalized(every, alarms, weights) for times, alarms in sweeps.items()}
        times = max(scores, key=lambda it: scores[it])
        found[name] = {"score": scores[times], "threshold": round(times, 3)}
    return found


def counts(every: Sequence[Labelled], alarms: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What was found, and how often it was wrong."""
    found = windows = false = 0
    delays = []
    for one, its in zip(every, alarms, strict=True):
        windows += len(one.windows)
        good = [at for at in its if at >= one.learns]
        for first, last in one.windows:
            inside = [at for at in good if first <= at <= last]
            if inside:
                found += 1
                delays.append((inside[0] - first) / (last - first + 1))
        false += sum(not any(a <= at <= b for a, b in one.windows) for at in good)
    values = sum(len(one.values) - one.learns for one in every)
    return {
        "windows": windows,
        "found": found,
        "false_alarms": false,
        "false_alarms_per_1000_values": round(1000 * false / values, 3),
        "delay_in_window": round(statistics.median(delays), 3) if delays else None,
    }


def main() -> None:
    """Score, and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults.outside")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    every = read(args.folder)
    as_is = [ours(one, 1.0) for one in every]
    found = {
        "series": len(every),
        "values": sum(len(one.values) for one in every),
        "as it is": {
            **counts(every, as_is),
            **{name: normalized(every, as_is, weights) for name, weights in PROFILES.items()},
        },
        "best threshold": best(every, ours, TIMES),
        "windowed Gaussian, best threshold": best(every, gaussian, [2 * it for it in TIMES]),
    }
    text = json.dumps(found, indent=1)
    if args.json is not None:
        args.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
