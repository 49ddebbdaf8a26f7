# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501  the plans and the table are rows
"""Every CUPTI build against every workload and every way to use it, each in its own child process.

    python3 matrix.py --cupti DIR --out DIR --set first|second [--deadline-s 480] [--rehearse]

DIR/NAME/libcupti.so.N are the builds (NAME such as 13.5). Builds the programs with gcc and nvcc, runs
the trials in order of weight until the deadline, writes ground.json and prints a short table last.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
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


# ---- building ---------------------------------------------------------------------------------


def includes(cupti: Path) -> list[str]:
    found = [str(cupti / "include")]
    for place in ("/usr/local/cuda/include", "/usr/local/cuda/extras/CUPTI/include"):
        if Path(place).is_dir():
            found.append(place)
    nvcc = shutil.which("nvcc")
    if nvcc:
        found.append(str(Path(nvcc).resolve().parent.parent / "include"))
    return [f"-I{p}" for p in found if Path(p).is_dir()]


def build(to: Path, cupti: Path) -> list[str]:
    said = []
    commands = [
        ["gcc", "-O2", "-o", f"{to}/inject", f"{HERE}/inject.c"],
        [
            "gcc",
            "-O2",
            "-shared",
            "-fPIC",
            "-Wl,-z,nodelete",
            *includes(cupti),
            "-o",
            f"{to}/windows.so",
            f"{HERE}/windows.c",
            "-ldl",
            "-lpthread",
        ],
    ]
    nvcc = shutil.which("nvcc") or (
        "/usr/local/cuda/bin/nvcc" if Path("/usr/local/cuda/bin/nvcc").exists() else ""
    )
    if nvcc:
        commands.append(
            [
                nvcc,
                "-O2",
                "-arch=sm_90",
                "-cudart",
                "shared",
                "-o",
                f"{to}/launch",
                f"{HERE}/launch.cu",
                "-ldl",
            ]
        )
        commands.append(
            [
                nvcc,
                "-O2",
                "-std=c++17",
                "-arch=sm_90",
                "-cudart",
                "shared",
                "-o",
                f"{to}/stages",
                f"{HERE}/stages.cu",
                "-ldl",
            ]
        )
        commands.append(
            [nvcc, "-O2", "-arch=sm_90", "-o", f"{to}/launch_static", f"{HERE}/launch.cu", "-ldl"]
        )
    running = [
        subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for c in commands
    ]
    for c, p in zip(commands, running, strict=True):
        text, _ = p.communicate(timeout=120)
        if p.returncode:
            said.append(f"{c[0]} {c[-2]}: {text[-800:]}")
    return said


def library_path() -> dict[str, str]:
    """For the dynamic CUDA runtime: the toolkit's folder, then the one that torch came with."""
    nvcc = shutil.which("nvcc")
    places = (
        [str(Path(nvcc).resolve().parent.parent / "lib64")] if nvcc else ["/usr/local/cuda/lib64"]
    )
    for entry in sys.path:
        places += [str(p) for p in Path(entry or ".").glob("nvidia/cu13/lib") if p.is_dir()]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join([*places, os.environ.get("LD_LIBRARY_PATH", "")]),
    }


# ---- the children -----------------------------------------------------------------------------


class Zygote:
    """A process that has imported torch, with the given CUPTI (if any) loaded before torch's own."""

    def __init__(self, preload: Path | None) -> None:
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "CUDA_MODULE_LOADING": "LAZY"}
        if preload:
            env["LD_PRELOAD"] = str(preload)
        self.p = subprocess.Popen(
            [sys.executable, str(HERE / "work.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.torch = ""

    def ready(self) -> str:
        assert self.p.stdout
        if not self.torch:
            self.torch = json.loads(self.p.stdout.readline() or '{"ready":"died"}')["ready"]
        return self.torch

    def run(self, cell: dict[str, Any]) -> dict[str, Any]:
        self.ready()
        assert self.p.stdin and self.p.stdout
        self.p.stdin.write(json.dumps(cell) + "\n")
        self.p.stdin.flush()
        line = self.p.stdout.readline()
        return json.loads(line) if line else {"exit": "zygote died"}

    def stop(self) -> None:
        assert self.p.stdin
        self.p.stdin.close()
        try:
            self.p.wait(5)
        except subprocess.TimeoutExpired:
            self.p.kill()


def stages(
    bins: Path, builds: dict[str, Path], names: list[str], limit_s: float = 14
) -> dict[str, Any]:
    """stages.cu with every build: costs one after the other, finalize cycles three at a time."""
    out: dict[str, Any] = {}

    def start(build: str, mode: str, cycles: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [f"{bins}/stages", f"{bins}/windows.so", str(builds[build]), mode, str(cycles)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=library_path(),
        )

    def end(p: subprocess.Popen[str]) -> Any:
        try:
            text, _ = p.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            p.kill()
            text, _ = p.communicate()
            return {"exit": "hang", "said": text[-600:]}
        try:
            return {"exit": p.returncode, **json.loads(text)}
        except json.JSONDecodeError:
            return {"exit": p.returncode, "said": text[-600:]}

    for b in names:
        out[f"{b} cost"] = end(start(b, "cost", 0))
    for b in names:
        running = {m: start(b, m, 20) for m in ("idle", "exit", "busy")}
        for m, p in running.items():
            out[f"{b} {m}"] = end(p)
    return out


# ---- what a trial means -----------------------------------------------------------------------


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
        said = json.loads(dump.read_text())
        windows = [dict(zip(WINDOW, w, strict=True)) for w in said.pop("windows")]
        row["cupti"] = said
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


# ---- which trials -----------------------------------------------------------------------------


def script(
    mode: str, spec: str, rate: float, dump: str, phase_s: float, windows_s: float
) -> tuple[list[list[Any]], float]:
    """The lines of one trial and its length in seconds of steps."""
    a, w = max(60, int(rate * phase_s)), max(60, int(rate * windows_s))
    on, off = 50, 250
    n = max(2, int(windows_s * 1000 / (on + off) * 1.05))
    end = [["command", "flush"], ["command", f"dump {dump}"], ["wait"]]
    begin: list[list[Any]] = [
        ["steps", a, "before"],
        ["attach"],
        ["command", f"init {spec}"],
        ["wait"],
        ["steps", a, "idle"],
    ]
    if mode == "none":
        return [["steps", a, "before"], ["steps", w, "more"]], phase_s + windows_s
    if mode == "idle":
        return [["steps", a, "before"], ["attach"], ["steps", a, "idle"], *end], 3 * phase_s
    if mode == "hook":
        ops: list[list[Any]] = [["steps", a // 2, "before"], ["attach"]]
        for _ in range(5):
            ops += [
                ["command", "hook 1"],
                ["wait"],
                ["steps", a // 3, "hooked"],
                ["command", "hook 0"],
                ["wait"],
                ["steps", a // 3, "free"],
            ]
        return [*ops, *end], phase_s * 5
    if mode in ("kineto", "kineto-yield"):
        flags = "ry" if mode.endswith("yield") else "r"
        watch = [["command", "watch"]]
        kinds = "k"  # Kineto keeps CUPTI's one subscription for good once it was used
        return [
            ["kineto", 20],
            *begin[:3],
            *watch,
            ["wait"],
            ["command", f"windows {kinds} {on} 150 {int(windows_s * 5)} {flags}"],
            ["steps", w // 3, "windows1"],
            ["kineto", 20],
            ["steps", w // 3, "windows2"],
            ["kineto", 20],
            ["steps", w // 3, "windows3"],
            ["wait"],
            ["kineto", 20],
            ["steps", a, "later"],
            *end,
        ], windows_s * 2 + phase_s * 3
    if mode == "fork":
        return [
            *begin,
            ["command", f"windows kc {on} 50 {n} r"],
            ["fork", 8],
            ["steps", w, "windows"],
            ["wait"],
            *end,
        ], windows_s + 4 * phase_s + 4
    if mode == "fork-control":
        return [["fork", 8], ["steps", a, "before"]], phase_s + 4
    if mode == "exit":
        return [*begin, ["command", f"windows kc {on} {off} 2 r"], ["wait"], *end], 4 * phase_s
    if mode == "cycles":  # many attaches' worth of windows: short, dense
        return [
            *begin,
            ["command", "windows kc 10 20 100 r"],
            ["steps", w, "windows"],
            ["wait"],
            ["steps", a, "later"],
            *end,
        ], windows_s + 4 * phase_s + 2
    kinds, _, flags = mode.partition("/")
    return [
        *begin,
        ["command", f"windows {kinds} {on} {off} {n} {flags or 'r'}"],
        ["steps", w, "windows"],
        ["wait"],
        ["steps", a, "later"],
        *end,
    ], windows_s + 4 * phase_s + 1


def plan(which: str, builds: list[str]) -> list[tuple[str, str, str]]:
    """(build, workload, mode): a build is own, pre-X (loaded before torch's) or late-X (a second copy)."""
    works = ("eager", "graph", "decode")
    pre = [f"pre-{b}" for b in builds if not b.startswith("12")]
    cells = [("own", w, "none") for w in works]
    if which == "first":
        cells += [("own", w, "kc") for w in works]
        cells += [("own", w, m) for w in ("eager", "graph") for m in ("kineto-yield", "kineto")]
        cells += [("own", w, m) for m in ("k", "kr") for w in works]
        cells += [(b, w, "kc") for b in reversed(pre) for w in works]
        cells += [("own", w, "hook") for w in works]
        cells += [(pre[-1], w, "kineto-yield") for w in ("eager", "graph")] if pre else []
        cells += [
            (f"late-{b}", w, "kc")
            for b in (builds[-1], "12.9")
            if b in builds
            for w in ("eager", "graph")
        ]
        cells += [
            ("own", "graph", "exit"),
            ("own", "eager", "fork"),
            ("own", "eager", "fork-control"),
        ]
        cells += [
            ("own", "graph", "k/rf"),
            ("own", "decode", "kineto-yield"),
            ("own", "decode", "cycles"),
        ]
    else:
        cells += [("own", w, m) for m in ("idle", "kc", "k/rz") for w in works]
        cells += [
            ("own", "eager", "kineto-yield"),
            ("own", "graph", "kineto-yield"),
            ("own", "eager", "kineto"),
        ]
        cells += [(b, w, "kc") for b in reversed(pre) if b != "pre-13.0" for w in works]
        cells += [(pre[-1], w, "k/rz") for w in works] if pre else []
        cells += [
            (f"late-{b}", w, "kc")
            for b in (builds[-1], "12.9")
            if b in builds
            for w in ("eager", "graph")
        ]
        cells += [("own", w, "hook") for w in ("eager", "decode")]
        cells += [
            ("own", "graph", "exit"),
            ("own", "eager", "fork"),
            ("own", "eager", "fork-control"),
        ]
        cells += [(pre[-1], w, "kineto-yield") for w in ("eager", "graph")] if pre else []
        cells += [
            ("own", "decode", "cycles"),
            ("own", "graph", "cycles"),
            ("own", "eager", "kr"),
            ("own", "decode", "kineto-yield"),
        ]
        cells += [("own", w, m) for m in ("none", "k/rz", "idle") for w in ("graph", "decode")]
    return cells


def main() -> None:
    args = argparse.ArgumentParser()
    args.add_argument("--cupti", type=Path, required=True)
    args.add_argument("--out", type=Path, required=True)
    args.add_argument("--set", default="first")
    args.add_argument(
        "--only", default="", help="build:workload:mode, separated by commas, instead of a set"
    )
    args.add_argument("--deadline-s", type=float, default=480)
    args.add_argument("--phase-s", type=float, default=0.8)
    args.add_argument("--windows-s", type=float, default=2.4)
    args.add_argument("--no-launch", action="store_true")
    a = args.parse_args()
    began = time.monotonic()
    a.out.mkdir(parents=True, exist_ok=True)
    tmp = Path(tempfile.mkdtemp(prefix="ground-", dir="/dev/shm"))
    builds = {p.parent.name: p for p in sorted(a.cupti.glob("*/libcupti.so.1?"))}
    names = sorted(builds, key=lambda s: [int(x) for x in s.split(".")])
    cells = [tuple(c.split(":")) for c in a.only.split(",")] if a.only else plan(a.set, names)
    wanted = {b for b, _, _ in cells}
    zygotes = {
        b: Zygote(builds[b[4:]] if b.startswith("pre-") else None)
        for b in wanted
        if not b.startswith("late-")
    }
    zygotes.setdefault("own", Zygote(None))
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "kernel": platform.release(),
        "set": a.set,
        "builds": names,
        "build_errors": build(tmp, a.cupti),
        "rows": [],
    }
    print("built", report["build_errors"], f"{time.monotonic() - began:.0f} s", flush=True)
    smi = (
        subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
        if shutil.which("nvidia-smi")
        else None
    )
    report["gpu"] = smi.stdout.strip() if smi else None
    if not a.no_launch:
        for binary, cupti in (
            ("launch", names[0] if "13.0" not in names else "13.0"),
            ("launch_static", names[-1]),
        ):
            if not (tmp / binary).exists():
                continue
            try:
                done = subprocess.run(
                    [f"{tmp}/{binary}", f"{tmp}/windows.so", str(builds[cupti]), "5"],
                    capture_output=True,
                    text=True,
                    timeout=40,
                    check=False,
                    env=library_path(),
                )
                report[binary] = (
                    json.loads(done.stdout)
                    if done.returncode == 0
                    else {"exit": done.returncode, "err": done.stderr[-500:]}
                )
            except (subprocess.TimeoutExpired, json.JSONDecodeError) as e:
                report[binary] = {"failed": repr(e)[:500]}
            print(binary, f"{time.monotonic() - began:.0f} s", flush=True)
        if (tmp / "stages").exists():
            report["stages"] = stages(tmp, builds, names)
            print("stages", f"{time.monotonic() - began:.0f} s", flush=True)
    report["torch"] = zygotes["own"].ready()
    rate: dict[str, float] = {}
    for i, (b, workload, mode) in enumerate(cells):
        left = a.deadline_s - (time.monotonic() - began)
        if left < 15:
            report["rows"].append(
                {"build": b, "workload": workload, "mode": mode, "exit": "not run"}
            )
            continue
        if workload not in rate:  # how fast it is here, once
            probe = {
                "workload": workload,
                "out": f"{tmp}/probe-{workload}",
                "timeout_s": 60,
                "total": 1,
                "bins": str(tmp),
                "script": [["steps", 100, "warm"], ["steps", 400, "before"]],
                "name": "probe",
                "build": "own",
                "mode": "none",
            }
            row = read(probe, zygotes["own"].run(probe))
            rate[workload] = row.get("rates", {}).get("before", {}).get("median", 0)
            if not rate[workload]:
                print(json.dumps(row)[:3000])
                rate.pop(workload)
                report["rows"].append(row)
                continue
        zygote = zygotes["own"] if b.startswith("late-") else zygotes[b]
        spec = str(builds[b[5:]]) if b.startswith("late-") else "loaded"
        out = f"{tmp}/{i}-{b}-{workload}-{re.sub('[^a-z]+', '-', mode)}"
        lines, _ = script(mode, spec, rate[workload], out + ".dump", a.phase_s, a.windows_s)
        cell = {
            "name": f"{b} {workload} {mode}",
            "build": b,
            "workload": workload,
            "mode": mode,
            "out": out,
            "bins": str(tmp),
            "script": lines,
            "total": int(rate[workload] * (a.phase_s * 4 + a.windows_s) * 1.15),
            "timeout_s": min(left - 5, 30),
            "exit_in_window": mode == "exit",
        }
        answer = zygote.run(cell)
        if answer["exit"] == "zygote died":
            zygotes[b if not b.startswith("late-") else "own"] = Zygote(
                builds[b[4:]] if b.startswith("pre-") else None
            )
        try:
            row = read(cell, answer)
        except Exception as e:  # a trial whose traces cannot be read is a result too
            row = {
                "build": b,
                "workload": workload,
                "mode": mode,
                "name": cell["name"],
                **answer,
                "unread": repr(e),
            }
        report["rows"].append(row)
        for leaf in tmp.glob(f"{i}-*"):
            leaf.unlink()
        print(
            f"{time.monotonic() - began:4.0f} s {b} {workload} {mode}: exit {row['exit']} {row.get('unread', '')}",
            flush=True,
        )
        (a.out / f"ground-{a.set}.json").write_text(json.dumps(report) + "\n")
    for z in zygotes.values():
        z.stop()
    table(report)
    (a.out / f"ground-{a.set}.json").write_text(json.dumps(report) + "\n")
    shutil.rmtree(tmp, ignore_errors=True)


def table(report: dict[str, Any]) -> None:
    for name in ("launch", "launch_static"):
        if "exit" in report.get(name, {}) or "failed" in report.get(name, {}):
            print(name, report[name])
            continue
        for k, v in sorted(
            report.get(name, {}).items(),
            key=lambda kv: kv[1]["median_ns"] if isinstance(kv[1], dict) else 0,
        ):
            print(
                f"{name:14} {k:42} {v if not isinstance(v, dict) else round(v['median_ns'])} {v.get('seen') if isinstance(v, dict) else ''}"
            )
    for k, v in report.get("stages", {}).items():
        print(k, json.dumps(v).replace('"', "").replace(", ", ","))
    digests: dict[str, str] = {}
    for r in report["rows"]:
        if r["mode"] == "none" and "work" in r:
            digests.setdefault(r["workload"], r["work"]["digest"])
    print(
        "build workload mode | exit digest | steps/s before idle out in after later | n win fail empty | "
        "lost whole/graphs none stale early>mine long>mine | open close flush ms | kineto got/expected | yields foreign"
    )
    print("not run:", sum(r["exit"] == "not run" for r in report["rows"]))
    for r in report["rows"]:
        if r["exit"] == "not run":
            continue
        w, t, c, x = r.get("work", {}), r.get("truth", {}), r.get("cupti", {}), r.get("rates", {})

        def m(k: str, x: dict[str, Any] = x) -> str:
            return f"{x[k]['median']:.0f}" if k in x else "-"

        same = (
            {True: "same", False: "DIFF"}[w.get("digest") == digests[r["workload"]]]
            if w.get("digest") and r["workload"] in digests
            else "-"
        )
        if w.get("over"):
            same = "over"
        kineto = " ".join(
            f"{s['kernels']}/{s['expected']}{'!' + str(s['strange']) if s['strange'] else ''}"
            for s in w.get("sessions", [])
        )
        print(
            r["build"],
            r["workload"],
            r["mode"],
            "|",
            r["exit"],
            same,
            f"{w.get('attach', {}).get('stop_us', '-')}us",
            "|",
            *(m(k) for k in ("before", "idle", "outside", "inside", "after", "later")),
            m("hooked"),
            m("free"),
            "|",
            t.get("n", "-"),
            t.get("windows", "-"),
            t.get("failed", "-"),
            t.get("empty", "-"),
            "|",
            t.get("single_lost", "-"),
            f"{t.get('graph_whole', '-')}/{t.get('graphs', '-')}",
            t.get("graph_none", "-"),
            t.get("stale", "-"),
            f"{t.get('early', '-')}>{t.get('early_mine', '-')}",
            f"{t.get('long', '-')}>{t.get('long_mine', '-')}",
            "|",
            *(f"{t.get(k, 0):.1f}" for k in ("open_ms", "close_ms", "flush_ms")),
            "|",
            kineto,
            "|",
            c.get("yields", "-"),
            c.get("foreign_buffers", "-"),
            f"hooked {c['hooked']}" if c.get("hooked") else "",
            w.get("kids") or "",
            f"fin {c['finalizes']}-{c['finalize_missed']} {c['finalize_result']}"
            if c.get("finalizes") or c.get("finalize_missed")
            else "",
            (str(r.get("threads", ""))[:200] + r.get("log", "")[-150:]) if r["exit"] else "",
            "STUCK" if w.get("stuck") else "",
            r.get("unread", ""),
        )


if __name__ == "__main__":
    main()
