# SPDX-License-Identifier: Apache-2.0
"""Kernels within replays: are `sonde trace`'s shares of the time true, and what does it leave?

    python -m bench.replay_kernels [--only LOOP…] [--at-most 0.5] [--trace 0.5] [--out FILE]

Each loop is a process that CUPTI was never used in. In turns: steps a second; `sonde trace
--at-most`, which bounds what it leaves behind or refuses; steps a second; torch.profiler (CUDA's
activity alone) in the same process. The truth of a kernel's share is what a step takes by
torch.profiler, times the steps a second before the trace. Where it is refused, that is all, unless
`--refused-too`: then it is asked for without a bound. Root; PyTorch, a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.device_truth.__main__ import Loop
from bench.device_truth.graph_loops import GRAPHS
from bench.device_truth.kernel_names import plain

SMALL = ("decode", "graph_short")
"""Loops of short replays, whose lasting price is more than half a percent."""
RATES = 4
POINTS = 0.03
_CUT = "…"
LEAST = 0.005
"""Smaller shares are not compared."""


def rate(loop: Loop, seconds: float) -> float:
    """Steps a second, from now on."""
    steps, began_ns = loop.ask("count")
    time.sleep(seconds)
    more, ended_ns = loop.ask("count")
    return float((more - steps) / (ended_ns - began_ns) * 1e9)


def trace(pid: int, seconds: float, at_most: float, folder: Path) -> dict[str, Any]:
    """`sonde trace`: its outcome, or `refused` with the reason; and the price it stated."""
    words = [str(pid), "-d", f"{seconds:g}", "--no-stacks", "--json", "--at-most", f"{at_most:g}"]
    began = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-m", "sonde", "trace", *words, "-o", str(folder / "x.json.gz")],
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    lines = ran.stderr.strip().splitlines()
    found: dict[str, Any] = {"took_s": round(time.monotonic() - began, 1), "exit": ran.returncode}
    found["price"] = next((line for line in lines if "at most" in line and "launches" in line), "")
    if ran.returncode:
        return found | {"refused": " ".join(lines[-2:])}
    found.update(json.loads(ran.stdout))
    return found


def _share_of(name: str, traced: dict[str, float]) -> float:
    """The share of a kernel among those of a trace, whose long names lack their middle or end."""
    if name in traced:
        return traced[name]
    cut = [key for key in traced if _CUT in key and _is_cut_from(key, name)]
    return traced[cut[0]] if len(cut) == 1 else 0.0


def _is_cut_from(key: str, name: str) -> bool:
    begin, _, end = key.partition(_CUT)
    # What a name ends with is written in other ways: as the return type's end, as its parameters.
    return name.startswith(begin) and (not end or end.rstrip(")") in name)


def compared(
    outcome: dict[str, Any], windows: list[dict[str, Any]], steps_a_second: float
) -> list[dict[str, Any]]:
    """Shares of kernels within replays beside what CUPTI measures: the largest ones, and all."""
    traced: dict[str, float] = {}
    for one in outcome["in_replays"]:
        traced[plain(one["name"])] = traced.get(plain(one["name"]), 0.0) + one["share"]
    rows = []
    for name in windows[0]["kernels"]:
        each = [one["kernels"].get(name, 0) / one["steps"] for one in windows]
        rows.append([name, sum(each) / len(each), _share_of(plain(name), traced)])
    whole = sum(one["kernels_ns"] / one["steps"] for one in windows) / len(windows)
    rows.append(["all kernels within replays", whole, sum(traced.values())])
    return [
        {"name": name[:60], "truth": ns * steps_a_second / 1e9, "share": share,
         "points": 100 * (share - ns * steps_a_second / 1e9)}
        for name, ns, share in rows
        if ns * steps_a_second / 1e9 >= LEAST
    ]  # fmt: skip


def trial(name: str, args: argparse.Namespace, log: Path) -> dict[str, Any]:
    """All of one loop."""
    row: dict[str, Any] = {"loop": name}
    loop = Loop(name, log)
    try:
        row |= loop.ask("begin")
        rate(loop, 1.0)
        row["before"] = [rate(loop, args.rate_s) for _ in range(RATES)]
        with tempfile.TemporaryDirectory() as folder:
            row["trace"] = trace(loop.pid, args.trace, args.at_most, Path(folder))
            row["bounded"] = "refused" not in row["trace"]
            if not row["bounded"] and args.refused_too:
                row["refused"] = row["trace"]["refused"]
                row["after_refused"] = [rate(loop, args.rate_s) for _ in range(RATES)]
                row["trace"] = trace(loop.pid, args.trace, 1000, Path(folder))
        row["after"] = [rate(loop, args.rate_s) for _ in range(RATES)]
        row["slower"] = 100 * (median(row["before"]) / median(row["after"]) - 1)
        windows = [loop.ask(f"profile {args.profiled}") for _ in range(2)]
        row["windows"] = windows
        if "refused" not in row["trace"]:
            row["kernels"] = compared(row["trace"], windows, median(row["before"]))
    except (RuntimeError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
        row["error"] = repr(error)
    finally:
        loop.close()
    return row


def is_well(row: dict[str, Any], at_most: float) -> bool:
    """Whether shares are within 3 points, and steps not slower than what was allowed."""
    if "error" in row:
        return False
    is_true = all(abs(one["points"]) <= 100 * POINTS for one in row.get("kernels", ()))
    if not row["bounded"]:
        return is_true
    return is_true and bool(row.get("kernels")) and row["slower"] <= at_most


def line(row: dict[str, Any], at_most: float) -> str:
    """For people."""
    head = f"{row['loop']:16} {'well' if is_well(row, at_most) else 'NOT WELL'}: "
    if "error" in row:
        return f"{head}{row['error']}"
    most = max((abs(one["points"]) for one in row.get("kernels", ())), default=float("nan"))
    text = f"{median(row['before']):.1f} steps/s, {row['slower']:+.2f} % slower afterwards; "
    text += f"{len(row.get('kernels', ()))} shares, {most:.2f} points off at most"
    if not row["bounded"]:
        text += f"; at {at_most:g} %: {row.get('refused') or row['trace']['refused']}"
    return head + text


def main() -> int:
    """1 where a loop is not well, or fewer than three were traced within the bound."""
    names = (*GRAPHS, *SMALL)
    parser = argparse.ArgumentParser(
        prog="python -m bench.replay_kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="LOOP", help=", ".join(names))
    parser.add_argument("--at-most", type=float, default=0.5, help="percent slower afterwards")
    parser.add_argument("--trace", type=float, default=0.5, help="seconds of the trace")
    parser.add_argument("--rate-s", type=float, default=1.5)
    parser.add_argument("--profiled", type=float, default=0.6)
    parser.add_argument("--refused-too", action="store_true", help="trace those without a bound")
    parser.add_argument("--log", type=Path, default=Path("/dev/null"), help="what loops print")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for name in args.only or names:
        rows.append(trial(name, args, args.log))
        print(line(rows[-1], args.at_most), flush=True)
        if args.out:
            args.out.write_text(json.dumps(rows, indent=1) + "\n")
    bounded = sum(one.get("bounded", False) for one in rows)
    print(f"{bounded} of {len(rows)} within {args.at_most:g} % by what was stated")
    return int(bounded < 3 or not all(is_well(one, args.at_most) for one in rows))


if __name__ == "__main__":
    sys.exit(main())
