# SPDX-License-Identifier: Apache-2.0
"""What other methods find in the same trials, from the same series.

    python -m bench.faults.baselines TRIALS.jsonl ROWS.jsonl [--json FILE]

**Spikes and lags**: as published for host telemetry of GPU nodes ("Host-Side Telemetry for
Performance Diagnosis in Cloud and HPC GPU Infrastructure"): windows of 5 s; the victim's lost time
is scored against the windows before; the cause is the metric whose lagged cross-correlation with it
is largest, weighted by its own spike score. Its code is not published: this is ours, by that text.

**BARO** (Pham, Ha, Zhang 2024): metrics ranked by their largest robust z-score after the change, by
`RCAEval.e2e.baro` of PyPI's rcaeval 1.8.1 (`requirements/bench.txt` has it). It is given the onset:
it ranks, and detects by other means.

Both rank metrics; a table maps each metric to a cause. They get what diagnosis reads
from files only when it has noticed something, too: throttled time and hits of the memory limit, all
the time, four times a second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.faults.score import HURT, Line, slowdown

STEP_S = 0.5
WINDOW_S = 5.0
SPIKE = 3.0
MAX_LAG = 4
"""Steps of half a second."""
CAUSE_OF = {
    "victim.ready": "cpu-contention",
    "others.cpu": "cpu-contention",
    "group.throttled": "cpu-quota",
    "group.memory_hits": "reclaim",
    "victim.reclaim": "reclaim",
    "victim.disk": "disk-throttle",
    "victim.disk_bytes": "reclaim",
    "others.disk_bytes": "disk-contention",
    "victim.sync": "fsync",
    "victim.served": "slow-file-system",
    "worker.cpu": "slow-loader",
    "worker.sleep": "slow-loader",
    "victim.interpreter-lock": "interpreter-lock",
    "victim.lock": "lock",
    "victim.stopped": "frozen",
    "victim.garbage": "garbage-collection",
    "host.retransmits": "slow-network",
    "victim.network": "remote-dependency",
}
"""Bad pinning shows in none of them."""
Series = dict[str, list[float]]


def series_of(trial: Line, ticks: Sequence[Line]) -> tuple[list[float], Series]:
    """(times, metrics by name) of a trial, in steps of half a second."""
    start, end = trial["onset_ns"] - 6.5e9, trial["end_ns"]
    count = int((end - start) / 1e9 / STEP_S)
    times = [start + (number + 0.5) * STEP_S * 1e9 for number in range(count)]
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * count)
    seen = [0.0] * count
    victim = str(max(trial["victim_pids"][:1], default=0))
    own = {str(pid) for pid in trial["victim_pids"]}
    for tick in ticks:
        at = int(((tick["from"] + tick["to"]) / 2 - start) / 1e9 / STEP_S)
        if not 0 <= at < count:
            continue
        seen[at] += 1
        for pid, row in tick["processes"].items():
            if pid == victim:
                for name, value in row.items():
                    if f"victim.{name}" in CAUSE_OF:
                        sums[f"victim.{name}"][at] += value
            elif pid in own:
                sums["worker.cpu"][at] += row["cpu"]
            else:
                sums["others.cpu"][at] += row["cpu"]
                sums["others.disk_bytes"][at] += row["disk_bytes"]
    found = {
        name: [value / max(1.0, number) for value, number in zip(values, seen, strict=True)]
        for name, values in sums.items()
    }
    for place, name in enumerate(("group.throttled", "group.memory_hits", "host.retransmits"), 1):
        found[name] = _rates(trial["groups"], place, start, count)
    return times, found


def _rates(rows: list[list[float]], place: int, start: float, count: int) -> list[float]:
    found = [0.0] * count
    for before, now in itertools.pairwise(rows):
        at = int((now[0] - start) / 1e9 / STEP_S)
        if 0 <= at < count:
            found[at] += (now[place] - before[place]) / STEP_S
    return found


def spikes_and_lags(trial: Line, metrics: Series) -> dict[str, Any]:
    """Detected after how long, and causes ranked."""
    count = len(next(iter(metrics.values()), []))
    onset = int(6.5 / STEP_S)
    # Its latency: what it lost of its time, as far as its own waits show.
    slow = [
        sum(metrics.get(f"victim.{name}", [0.0] * count)[at]
            for name in ("ready", "disk", "sync", "served", "lock", "stopped", "garbage"))
        for at in range(count)
    ]  # fmt: skip
    width = int(WINDOW_S / STEP_S)
    detected = math.inf
    for at in range(onset + 1, count + 1):
        before = slow[max(0, at - 2 * width) : max(1, at - width // 2)][:width]
        now = slow[max(0, at - width // 2) : at]
        if _spike(before, now) > SPIKE:
            detected = (at - onset) * STEP_S
            break
    scored = []
    for name, values in metrics.items():
        spike = _spike(values[:onset], values[onset:])
        scored.append((spike * max(0.0, _correlation(slow, values)), name))
    ranked = [CAUSE_OF[name] for score, name in sorted(scored, reverse=True) if score > 0]
    return {"detected_s": detected, "causes": list(dict.fromkeys(ranked))}


def _spike(before: Sequence[float], now: Sequence[float]) -> float:
    if not before or not now:
        return 0.0
    spread = statistics.pstdev(before) or 1e-3
    return min(1e6, (statistics.fmean(now) - statistics.fmean(before)) / max(spread, 1e-3))


def _correlation(one: Sequence[float], other: Sequence[float]) -> float:
    best = 0.0
    for lag in range(MAX_LAG + 1):
        a, b = one[lag:], other[: len(other) - lag]
        if len(a) > 2 and statistics.pstdev(a) > 0 and statistics.pstdev(b) > 0:
            best = max(best, statistics.correlation(a, b))
    return best


def baro(trial: Line, times: Sequence[float], metrics: Series) -> list[str]:
    """Causes ranked; empty where rcaeval is not there."""
    try:
        import pandas  # type: ignore[import-untyped,import-not-found,unused-ignore]
        from RCAEval import utility  # type: ignore[import-not-found,import-untyped,unused-ignore]

        # On this version of Python, too, methods whose dependencies are missing are passed over.
        utility.is_py310 = lambda: True
        from RCAEval.e2e.baro import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
            baro as rank,
        )
    except ImportError:
        return []
    frame = pandas.DataFrame({"time": [it / 1e9 for it in times], **metrics})
    ranks = rank(frame, inject_time=trial["onset_ns"] / 1e9, dataset=None)["ranks"]
    return list(dict.fromkeys(CAUSE_OF[name] for name in ranks if name in CAUSE_OF))


def main() -> None:
    """Score both."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults.baselines")
    parser.add_argument("trials", type=Path)
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    trials = [json.loads(line) for line in args.trials.read_text().splitlines()]
    ticks = [json.loads(line) for file in args.rows for line in file.read_text().splitlines()]
    results: dict[str, dict[str, list[tuple[bool, bool]]]] = defaultdict(lambda: defaultdict(list))
    delays: list[float] = []
    for trial in trials:
        hurts = not trial["fault"].startswith("benign") and slowdown(trial) * HURT >= 1
        if trial["trouble"] or not hurts:
            continue
        times, metrics = series_of(trial, ticks)
        if not metrics:
            continue
        spikes = spikes_and_lags(trial, metrics)
        delays.append(spikes["detected_s"])
        for method, causes in (
            ("spikes and lags", spikes["causes"]),
            ("BARO", baro(trial, times, metrics)),
        ):
            right = causes[:1] == [trial["fault"]], trial["fault"] in causes[:3]
            results[method][trial["fault"]].append(right)
    found: dict[str, Any] = {
        method: {
            "top1": _macro(of_cause, 0),
            "top3": _macro(of_cause, 1),
            "causes": {
                cause: {"trials": len(its), "top1": sum(it[0] for it in its) / len(its)}
                for cause, its in sorted(of_cause.items())
            },
        }
        for method, of_cause in results.items()
    }
    inside = [delay for delay in delays if delay < math.inf]
    found["spikes and lags"] |= {
        "detected": round(len(inside) / max(1, len(delays)), 4),
        "detection_s_median": statistics.median(inside) if inside else None,
    }
    text = json.dumps(found, indent=1)
    if args.json is not None:
        args.json.write_text(text + "\n")
    print(text)


def _macro(of_cause: dict[str, list[tuple[bool, bool]]], place: int) -> float:
    means = [statistics.fmean(it[place] for it in its) for its in of_cause.values()]
    return round(statistics.fmean(means), 4) if means else 0.0


if __name__ == "__main__":
    main()
