# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.explain.scale [MILLIONS]`: time and memory to explain ten minutes of events.

A recorded trace (tests/data/explain) is repeated to that many rows. A separate process explains it,
so that its peak memory excludes the repetition.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sonde.analyze.bound import explain
from sonde.model.timeline import COLUMNS, Events, Timeline
from sonde.recording.timelines import open_timeline

RUN = Path(__file__).parents[2] / "tests" / "data" / "explain"
LENGTH_NS = 600_000_000_000


def tiled(timeline: Timeline, rows: int) -> Timeline:
    """The timeline repeated, ten minutes long, with about `rows` rows."""
    tables = {name: getattr(timeline, name) for name in ("device", "calls", "host", "states")}
    have = sum(map(len, tables.values()))
    times = max(1, rows // have)
    begin = timeline.start_ns
    step = LENGTH_NS // times
    ids = int(timeline.calls.correlation.max(initial=0)) + 1

    def repeated(table: Events) -> Events:
        shift = np.repeat(np.arange(times, dtype=np.int64), len(table))
        made = {name: np.tile(getattr(table, name), times) for name in COLUMNS}
        made["start_ns"] = made["start_ns"] - begin + shift * step
        made["end_ns"] = made["end_ns"] - begin + shift * step
        known = made["correlation"] > 0
        made["correlation"] = np.where(known, made["correlation"] + shift * ids, 0)
        order = np.argsort(made["start_ns"], kind="stable")
        return Events(**{name: column[order] for name, column in made.items()})

    larger: dict[str, Any] = {name: repeated(table) for name, table in tables.items()}
    return replace(timeline, **larger)


def main() -> int:
    """Exit code 1 above 5 s or 1 GB for five million."""
    rows = round(float(sys.argv[1] if len(sys.argv) > 1 else 5) * 1e6)
    kind = sys.argv[2] if len(sys.argv) > 2 else "transformer"
    small = open_timeline([RUN / f"{kind}.json.gz", RUN / f"{kind}.sonde"])
    large = tiled(small, rows)
    count = sum(len(getattr(large, name)) for name in ("device", "calls", "host", "states"))
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    verdict = explain(large).verdicts[0]
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    peak_mb = after.ru_maxrss / 1024
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(
        f"{kind}: {count:,} rows, {verdict.window_ns / 1e9:.0f} s: explained in {wall:.1f} s "
        f"({cpu:.1f} s CPU, {os.cpu_count()} CPUs), peak {peak_mb:,.0f} MB: {verdict.bound}, "
        f"{verdict.steps.count if verdict.steps else 0:,} steps"
    )
    return int(wall > 5 or peak_mb > 1000)


if __name__ == "__main__":
    raise SystemExit(main())
