# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""What a trial means: rates by phase, and the records held against the launches."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

RECORD = np.dtype(
    [
        ("start", "<u8"),
        ("end", "<u8"),
        ("node", "<u8"),
        ("corr", "<u4"),
        ("window", "<u4"),
        ("graph", "<u4"),
        ("name", "<u4"),
        ("stream", "<u4"),
        ("kind", "<u4"),
    ]
)
LAUNCH = np.dtype([("t", "<u8"), ("corr", "<u8"), ("window", "<u4"), ("cbid", "<u4")])
WINDOW = (
    "open0",
    "open1",
    "close0",
    "close1",
    "flushed",
    "open_dev",
    "open_mono",
    "close_dev",
    "close_mono",
    "records",
    "result",
    "cut",
    "dropped",
)
GRAPH_LAUNCH = (514, 515)
KERNEL, RUNTIME, DRIVER, GRAPH_TRACE = 10, 5, 4, 51


def rates(
    stamps: np.ndarray, marks: list[list[Any]], windows: list[dict[str, int]]
) -> dict[str, Any]:
    """Steps per second by phase; inside windows, after each close, and well outside them."""
    out: dict[str, Any] = {}
    for label, first, last in marks:
        if last - first < 20:
            continue
        t = stamps[first : last + 1]
        out.setdefault(label, []).append((last - first) / ((t[-1] - t[0]) / 1e9))
        if label != "windows":
            continue
        inside, outside, after = [], [], []
        for i, w in enumerate(windows):
            if w["result"] or w["cut"]:
                continue

            def rate(a: int, b: int, t: np.ndarray = t) -> float | None:
                n0, n1 = np.searchsorted(t, [a, b])
                return float((n1 - n0 - 1) / ((t[n1 - 1] - t[n0]) / 1e9)) if n1 - n0 > 5 else None

            nxt = windows[i + 1]["open0"] if i + 1 < len(windows) else int(t[-1])
            if w["open0"] < t[0] or nxt > t[-1]:
                continue
            inside.append(rate(w["open1"], w["close0"]))
            after.append(rate(w["close0"], w["close0"] + 50_000_000))
            outside.append(rate(w["flushed"] + 20_000_000, nxt))
        for name, values in (("inside", inside), ("after", after), ("outside", outside)):
            good = [v for v in values if v]
            if good:
                out[name] = good
    return {
        k: {"median": statistics.median(v), "all": [round(x, 1) for x in v]} for k, v in out.items()
    }


def truth(
    records: np.ndarray,
    launches: np.ndarray,
    windows: list[dict[str, int]],
    work: dict[str, Any],
    stamps: np.ndarray,
    label: str,
) -> dict[str, Any]:
    """Kernels recorded against kernels launched, window by window."""
    kernels = records[records["kind"] == KERNEL]
    per: list[dict[str, Any]] = []
    node_count = work["kernels"] - (work["launches"] - 1) if label == "decode" else work["kernels"]
    for i, w in enumerate(windows):
        k = kernels[kernels["window"] == i]
        c = launches[launches["window"] == i]
        offset = w["open_dev"] - w["open_mono"]
        start = k["start"].astype(np.int64) - offset
        length = k["end"].astype(np.int64) - k["start"].astype(np.int64)
        n0, n1 = np.searchsorted(stamps, [w["open1"], w["close0"]])
        row: dict[str, Any] = {
            "n": len(k),
            "steps": int(n1 - n0),
            "result": w["result"],
            "cut": w["cut"],
            "dropped": w["dropped"],
            "open_ms": (w["open1"] - w["open0"]) / 1e6,
            "close_ms": (w["close1"] - w["close0"]) / 1e6,
            "flush_ms": (w["flushed"] - w["close1"]) / 1e6,
            "early": int((start < w["open0"] - 1000).sum()),
            "long": int((length > 20_000_000).sum()),
            "bad": int((length <= 0).sum()),
        }
        if len(c):
            # Launches well inside the window: at its edges a launch may have passed one switch and not the other.
            sure = c[(c["t"] > w["open1"] + 200_000) & (c["t"] < w["close0"] - 200_000)]
            graphs = sure[np.isin(sure["cbid"], GRAPH_LAUNCH)]["corr"]
            singles = sure[~np.isin(sure["cbid"], GRAPH_LAUNCH)]["corr"]
            got = k["corr"].astype(np.uint64)
            # a launch of this window, recorded here or (late) with a later one
            everywhere, counts = np.unique(kernels["corr"].astype(np.uint64), return_counts=True)
            table = dict(zip(everywhere.tolist(), counts.tolist(), strict=True))
            mine = np.isin(got, c["corr"])
            row |= {
                "launches": len(c),
                "singles": len(singles),
                "graphs": len(graphs),
                "single_lost": sum(1 for s in singles.tolist() if table.get(s, 0) != 1),
                "graph_whole": sum(1 for g in graphs.tolist() if table.get(g, 0) == node_count),
                "graph_none": sum(1 for g in graphs.tolist() if table.get(g, 0) == 0),
                "stale": int((~mine).sum()),
                "early_mine": int(((start < w["open0"] - 1000) & mine).sum()),
                "long_mine": int(((length > 20_000_000) & mine).sum()),
                "busy_ms": float(length[mine].sum()) / 1e6,
                "mean_ns": float(length[mine].mean()) if mine.any() else 0,
            }
        per.append(row)
    live = [r for r in per if not r["cut"] and not r["result"]]
    total: dict[str, Any] = {
        "windows": len(per),
        "failed": sum(1 for r in per if r["result"]),
        "cut": sum(1 for r in per if r["cut"]),
        "empty": sum(1 for r in live if r["steps"] > 5 and not r["n"]),
    }
    for key in (
        "n",
        "early",
        "long",
        "bad",
        "dropped",
        "singles",
        "graphs",
        "single_lost",
        "graph_whole",
        "graph_none",
        "stale",
        "early_mine",
        "long_mine",
    ):
        total[key] = sum(r.get(key, 0) for r in live)
    for key in ("open_ms", "close_ms", "flush_ms", "mean_ns"):
        values = [r[key] for r in live if r.get(key)]
        if values:
            total[key] = statistics.median(values)
            total[key + "_max"] = max(values)
    total["other_kinds"] = {
        str(k): int((records["kind"] == k).sum()) for k in (RUNTIME, DRIVER, GRAPH_TRACE)
    }
    # Kernels only: is the count what the steps inside launch?
    low = sum(max(0, r["steps"] - 1) * work["kernels"] for r in live)
    high = sum((r["steps"] + 1) * work["kernels"] for r in live)
    total["steps_low"], total["steps_high"] = low, high
    total["each"] = per
    return total


def read(cell: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    base = Path(cell["out"])
    row: dict[str, Any] = {k: cell[k] for k in ("name", "build", "workload", "mode")} | answer
    text = (
        base.with_suffix(".log").read_text(errors="replace")
        if base.with_suffix(".log").exists()
        else ""
    )
    if answer["exit"] != 0:
        row["log"] = text[-3000:]
    work_file = Path(cell["out"] + ".work.json")
    if not work_file.exists():
        return row
    work = json.loads(work_file.read_text())
    row["work"] = {k: v for k, v in work.items() if k != "marks"}
    stamps = np.load(cell["out"] + ".stamps.npy")
    dump = Path(cell["out"] + ".dump.json")
    windows: list[dict[str, int]] = []
    if dump.exists():
        summary = json.loads(dump.read_text())
        windows = [dict(zip(WINDOW, w, strict=True)) for w in summary.pop("windows")]
        row["cupti"] = summary
        records = np.fromfile(cell["out"] + ".dump.records", dtype=RECORD)
        launches = np.fromfile(cell["out"] + ".dump.launches", dtype=LAUNCH)
        row["truth"] = truth(records, launches, windows, work, stamps, cell["workload"])
    row["rates"] = rates(stamps, work["marks"], windows)
    row["window_times"] = (
        [[w["open0"], w["close1"], w["records"]] for w in windows]
        if cell["mode"].startswith("kineto")
        else []
    )
    return row
