# SPDX-License-Identifier: Apache-2.0
"""What host memory by stack costs a program that does nothing but fault, beside perf.

    python -m bench.memory [--rounds N]

The load maps 4 MiB, touches every page and unmaps it. By turns nothing watches, Sonde with and
without --memory, and `perf record -e page-faults` at the same 100 stacks a second; ns of the load's
own CPU time a fault.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.tools import require_root

SETTLE_S = 1.5
STRETCH_S = 2.0
SOURCE = Path(__file__).parent / "loads" / "faults.c"


def main() -> int:
    """Print one line for each way of watching."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    rounds: int = parser.parse_args().rounds
    require_root()
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as name:
        folder = Path(name)
        load = folder / "faults"
        subprocess.run(["cc", "-O2", "-o", load, SOURCE], check=True)
        costs: dict[str, list[float]] = defaultdict(list)
        for _ in range(rounds):
            for tool in _tools(folder):
                costs[tool].append(_measure(load, _tools(folder)[tool], folder))
    base = statistics.median(costs["nothing"])
    for tool, found in costs.items():
        median = statistics.median(found)
        spread = f"{min(found):,.0f}–{max(found):,.0f}"
        more = f"{median - base:+,.0f} ns, {100 * (median / base - 1):+.1f} %"
        print(f"{tool:18} {median:8,.0f} ns a fault ({spread})  {more}")
    return 0


def _tools(folder: Path) -> dict[str, list[str]]:
    sonde = [sys.executable, "-m", "sonde", "record", "-q", "-f", "-o", f"{folder}/run.sonde", "-p"]
    found = {"nothing": [], "sonde": sonde, "sonde --memory": [*sonde[:4], "--memory", *sonde[4:]]}
    if perf := shutil.which("perf"):
        options = ["-F", "100", "-e", "page-faults", "--call-graph", "fp"]
        found["perf page-faults"] = [perf, "record", "-q", *options, "-o", f"{folder}/run", "-p"]
    return found


@contextmanager
def _running(command: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            yield process
        finally:
            process.terminate()
            process.communicate()


def _measure(load: Path, tool: list[str], folder: Path) -> float:
    """ns of CPU time a fault."""
    with _running([str(load)], folder) as program:
        watcher = subprocess.Popen([*tool, str(program.pid)]) if tool else None
        try:
            assert program.stdout is not None
            began = time.monotonic()
            first = last = (0, 0.0)
            for line in program.stdout:
                faults, seconds = line.split()
                last = (int(faults), float(seconds))
                if time.monotonic() < began + SETTLE_S:
                    first = last
                elif time.monotonic() > began + SETTLE_S + STRETCH_S:
                    break
            return 1e9 * (last[1] - first[1]) / (last[0] - first[0])
        finally:
            if watcher:
                watcher.terminate()
                watcher.wait()


if __name__ == "__main__":
    sys.exit(main())
