# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.diff`: how often `sonde diff --fail-above` is right about whole programs.

Twenty changes of 3 to 50 % in five small programs (more of the same work, slower work, other work)
and twenty pairs without a change. Both sides are recorded at the same time on the same CPU, several
times: the scheduler gives them that CPU in turns of milliseconds, so that what else happens on the
machine meets both alike. On a CPU each, two runs of the same program differ by 10 % or more where
other machines share the cores, since each core is slowed by its own neighbour. Every pair is kept
at once; run it again and it goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from sonde.query.capture import read

RESULT = Path(__file__).parent / "results" / "diff.json"
ABOVE = "2%"
ROUNDS = 8
"""Even: each side starts first, and has each CPU, equally often."""
HZ = "499"
"""Five times the default: a change of 3 % of a second is 15 samples, not 3."""
PROGRAMS = ("numbers", "texts", "sorting", "packing", "objects")
SHARES = (0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
KINDS = ("more", "slower", "other")

_PROGRAM = """
import json, sys, zlib
name, kind, share = sys.argv[1], sys.argv[2], float(sys.argv[3])
DATA = json.dumps([{"a": i, "b": str(i) * 3} for i in range(400)])
def numbers():
    total = 0
    for i in range(12000): total += i * i % 7
def texts():
    for i in range(500): "-".join(DATA[i:i + 900].split(",")).upper().replace("A", "b")
def sorting():
    sorted(range(5000), key=lambda x: -x % 97)
def packing():
    zlib.compress(DATA[:9000].encode(), 6)
def objects():
    json.loads(DATA); json.dumps(DATA)
def other_work(unit):
    unit()
def slower_work(unit, again):
    unit()
    if again: unit()
unit = globals()[name]
units = {"numbers": 1000, "texts": 400, "sorting": 1500, "packing": 4000, "objects": 4000}[name]
extra, owed = share if kind != "none" else 0.0, 0.0
for i in range(units):
    owed += extra
    again = owed >= 1
    owed -= again
    slower_work(unit, again and kind == "slower")
    if again and kind == "more": slower_work(unit, False)
    if again and kind == "other": other_work(unit)
"""


def pairs() -> list[tuple[str, str, float]]:
    """(program, kind of change, share): changed and unchanged pairs in turns."""
    changed = [
        (PROGRAMS[number % 5], KINDS[number % 3], SHARES[number % 10]) for number in range(20)
    ]
    unchanged = [(PROGRAMS[number % 5], "none", 0.0) for number in range(20)]
    return [one for both in zip(changed, unchanged, strict=True) for one in both]


def start(out: Path, cpu: int, program: str, kind: str, share: float) -> subprocess.Popen[bytes]:
    """Start to record one run to its end. `cpu`: the one the program runs on; the recorder may run
    on any."""
    command = [sys.executable, "-m", "sonde", "record", "-q", "-f", "-F", HZ, "--no-device"]
    command += ["-o", str(out), "--", "taskset", "-c", str(cpu)]
    command += [sys.executable, "-c", _PROGRAM, program, kind, str(share)]
    return subprocess.Popen(command)


def judged(program: str, kind: str, share: float) -> dict[str, object]:
    """One pair: whether the gate failed, and over what."""
    cpus = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(ROUNDS):
            sides = {"a": ("none", 0.0), "b": (kind, share)}
            order = sorted(sides, reverse=number % 2 == 1)
            cpu = cpus[number // 2 % len(cpus)]
            started = [start(folder / f"{it}{number}", cpu, program, *sides[it]) for it in order]
            codes = [one.wait() for one in started]
            if any(codes):
                raise RuntimeError("a run was not recorded")
        command = [sys.executable, "-m", "sonde", "diff", str(folder / "a0"), str(folder / "b0")]
        for number in range(1, ROUNDS):
            command += ["--before", str(folder / f"a{number}")]
            command += ["--after", str(folder / f"b{number}")]
        command += ["--fail-above", ABOVE, "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
        ratios = [cpu_time(folder / f"b{it}") / cpu_time(folder / f"a{it}") for it in range(ROUNDS)]
    found = json.loads(done.stdout)
    exact = {one["name"]: one["weight"] for one in found["changes"] if one["kind"] == "run"}
    return {
        "program": program,
        "kind": kind,
        "share": share,
        "failed": done.returncode == 1,
        "over": [one["name"] for one in found["failed"]][:4],
        "changes": {name: round(weight, 4) for name, weight in exact.items()},
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def cpu_time(path: Path) -> int:
    """CPU time in ns of the program that was recorded into that file."""
    program = read(path).info.program
    assert program is not None
    return program.cpu_ns


def main() -> None:
    """Judge the pairs that are not in the result yet, and print the score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40, help="how many pairs in all")
    arguments = parser.parse_args()
    kept = json.loads(RESULT.read_text())["pairs"] if RESULT.exists() else []
    for pair in pairs()[len(kept) : arguments.pairs]:
        kept.append(judged(*pair))
        changed = [one for one in kept if one["kind"] != "none"]
        same = [one for one in kept if one["kind"] == "none"]
        score = {
            "changed": len(changed),
            "found": sum(one["failed"] for one in changed),
            "unchanged": len(same),
            "false": sum(one["failed"] for one in same),
        }
        whole = {"above": ABOVE, "rounds": ROUNDS, "cpus": os.cpu_count(), **score, "pairs": kept}
        RESULT.write_text(json.dumps(whole, indent=1) + "\n")
        print(kept[-1], score, flush=True)


if __name__ == "__main__":
    main()
