# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""Every CUPTI build against every workload and every way to use it, each in its own child process.

    python3 matrix.py --cupti DIR --out DIR --set first|second [--deadline-s 480]

DIR/NAME/libcupti.so.N are the builds (NAME such as 13.5). Builds the programs with gcc and nvcc, attaches as Sonde does (root, and Sonde in the same Python), runs
the trials in order of weight until the deadline, writes ground.json and prints a short table last.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from building import build
from children import Zygote, launch_costs, stages
from summary import table
from traces import read
from trials import plan, script


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
            report[binary] = launch_costs(tmp, builds, binary, cupti)
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


if __name__ == "__main__":
    main()
