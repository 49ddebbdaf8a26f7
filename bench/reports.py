# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.reports CAPTURE`: CPU time, time and memory of each format of `sonde report`.

Each format is a fresh process, as for a person: start, reading and writing count. CPU time is the
sum of all threads, by the kernel; memory is the greatest resident set.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

FORMATS = ("table", "summary", "html", "pprof", "folded", "speedscope", "json")
RESULT = Path(__file__).parent / "results" / "reports.json"


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians over the rounds; memory is the greatest of them."""

    format: str
    cpu_s: float
    wall_s: float
    peak_mb: float
    written_mb: float


def measure(capture: Path, name: str, rounds: int) -> Cost:
    """The cost of one format. Raises subprocess.CalledProcessError where a report fails."""
    cpu, wall, peak, size = [], [], [], 0
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report"
        command = [sys.executable, "-m", "sonde", "report", str(capture)]
        command += ["--format", name, "-o", str(out)]
        for _ in range(rounds):
            began = time.monotonic()
            child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            if child.returncode:
                raise subprocess.CalledProcessError(child.returncode, command)
            wall.append(time.monotonic() - began)
            cpu.append(usage.ru_utime + usage.ru_stime)
            peak.append(usage.ru_maxrss / 1e3)
        size = out.stat().st_size
    middle = statistics.median
    return Cost(
        name, round(middle(cpu), 2), round(middle(wall), 2), round(max(peak)), round(size / 1e6, 2)
    )


def main() -> None:
    """Measure every format, print a table and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("capture", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    costs = []
    print("format       CPU s  wall s  peak MB  written MB")
    for name in FORMATS:
        cost = measure(arguments.capture, name, arguments.rounds)
        costs.append(cost)
        print(
            f"{cost.format:10} {cost.cpu_s:7.2f} {cost.wall_s:7.2f} {cost.peak_mb:8.0f}"
            f" {cost.written_mb:11.2f}",
            flush=True,
        )
    result = {
        "capture_mb": round(arguments.capture.stat().st_size / 1e6, 1),
        "rounds": arguments.rounds,
        "load_average": round(os.getloadavg()[0], 1),
        "costs": [asdict(cost) for cost in costs],
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
