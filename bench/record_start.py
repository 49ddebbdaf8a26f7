# SPDX-License-Identifier: Apache-2.0
"""What `sonde record -p PID` costs by two trees in turns, beside a program with some 300 libraries.

    python -m bench.record_start BEFORE NOW OUT [--times 10] [--seconds 6] [--first 2]

Each tree runs its own code with this interpreter and its packages. CPU time is the kernel's account
of the recorder's group, with its children. A first recording sees no unwind table and nothing kept
of files: /var/cache/sonde is an empty tmpfs there, for that recorder alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bench.cgroup import Cgroup
from bench.tools import require_root

PROGRAM: Final = """
import importlib, time
for name in ("numpy", "scipy.linalg", "scipy.sparse", "scipy.optimize", "scipy.signal",
             "scipy.stats", "scipy.ndimage", "sklearn.ensemble", "sklearn.cluster", "pyarrow",
             "pyarrow.compute", "pyarrow.dataset", "pyarrow.flight", "duckdb", "ssl", "sqlite3"):
    try:
        importlib.import_module(name)
    except ImportError:
        pass
import numpy
one = numpy.random.rand(200, 200)
print("ready", flush=True)
while True:
    one = one @ one
    one /= numpy.abs(one).max() or 1
    sum(it * it for it in range(2000))
    time.sleep(0.05)
"""
ALONE: Final = 'mount -t tmpfs -o mode=700 none /var/cache/sonde && exec "$@"'


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one recording; s."""

    tree: str
    is_first: bool
    ready_s: float
    """Wall time until samples flow."""
    ready_cpu_s: float
    cpu_s: float
    wall_s: float
    load: float
    """Average of the machine's run queue over a minute."""


def cost_of(tree: str, path: Path, pid: int, seconds: float, *, is_first: bool) -> Cost:
    """Record a process once."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", "-m", "sonde", "record", "--json", "-d", str(seconds)]
        command += ["-p", str(pid), "-o", f"{folder}/x.sonde"]
        if is_first:
            command = ["unshare", "-m", "sh", "-c", ALONE, "sh", *command]
        group, began_s, ready_s, ready_cpu_s = Cgroup(), time.monotonic(), 0.0, 0.0
        process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": str(path / "src")}, cwd="/",
            preexec_fn=group.enter, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:
            if "recording" in line:
                ready_s, ready_cpu_s = time.monotonic() - began_s, group.cpu_s()
        if process.wait():
            raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
        wall_s, cpu_s = time.monotonic() - began_s, group.cpu_s()
        group.close()
    return Cost(tree, is_first, ready_s, ready_cpu_s, cpu_s, wall_s, os.getloadavg()[0])


def summary(costs: list[Cost]) -> str:
    """Medians and ranges, and those of the differences of the turns."""
    lines = []
    for is_first in (True, False):
        of = {
            tree: [it for it in costs if it.tree == tree and it.is_first is is_first]
            for tree in ("before", "now")
        }
        if not of["now"]:
            continue
        lines.append("first" if is_first else "later")
        for name in ("ready_s", "ready_cpu_s", "cpu_s", "wall_s"):
            before, now = ([getattr(it, name) for it in of[tree]] for tree in ("before", "now"))
            change = [after - first for first, after in zip(before, now, strict=False)]
            texts = [
                f"{statistics.median(them):6.2f} ({min(them):.2f} to {max(them):.2f})"
                for them in (before, now, change)
            ]
            lines.append(f"  {name:12} before {texts[0]}  now {texts[1]}  change {texts[2]}")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.record_start", description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("now", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--first", type=int, default=2)
    args = parser.parse_args()
    require_root()
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    program = subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM], env={**os.environ, **threads},
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert program.stdout is not None
    costs: list[Cost] = []
    try:
        program.stdout.readline()
        mappings = len(Path(f"/proc/{program.pid}/maps").read_bytes().splitlines())
        trees = {"before": args.before.resolve(), "now": args.now.resolve()}
        for tree, path in trees.items():  # what it keeps is there from here on
            cost_of(tree, path, program.pid, 2.0, is_first=False)
        for turn in range(args.first + args.times):
            order = list(trees) if turn % 2 == 0 else list(reversed(trees))
            for tree in order:
                is_first = turn < args.first
                seconds = 1.0 if is_first else args.seconds
                cost = cost_of(tree, trees[tree], program.pid, seconds, is_first=is_first)
                costs.append(cost)
                machine = f"{os.cpu_count()} CPUs, {platform.machine()}, Linux {platform.release()}"
                kept = {
                    "machine": machine, "date": time.strftime("%Y-%m-%d"), "mappings": mappings,
                    "seconds": args.seconds, "costs": [asdict(it) for it in costs],
                }  # fmt: skip
                args.out.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    finally:
        program.kill()
        program.wait()
    print(summary(costs))


if __name__ == "__main__":
    main()
