# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.beside BEFORE NOW OUT`: benches of two trees in turns, before and now.

Each tree runs its own copy of a bench over its own code, with this interpreter and its packages, so
that only the code differs. The figure is the median over the turns of now less before: what the
machine does slowly stays in neither. `--only`, `--turns`; turns are added to what OUT has already.
CPU time is the sum over a bench's process and its children, by the kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

TRACES = ("transformer", "small_kernels", "slow_loader", "lock_held", "jax_products", "page_faults")
"""Of tests/data/explain, which both trees have."""
WAITS = ("sleeper", "futex_waiter", "pipe_reader", "starved")
"""As in bench.accuracy, which is not imported: a child's peak is at least its parent's memory."""
LOADS = {"cpu": "CPU-bound", "switches": r"[\d,]+ switches", "python": "Python, one"}


@dataclass(frozen=True, slots=True)
class Bench:
    """A command and the figures in what it prints."""

    commands: tuple[tuple[str, ...], ...]
    figures: dict[str, str]
    """Name (with its unit) and pattern; its only group is the number."""
    has_cpu: bool = False
    """Its CPU time and memory are figures as well: nothing runs in it for as long as it likes."""
    texts: str = ""
    """A pattern of what must be the same in both, as the verdict of a trace."""


def _overhead(load: str) -> Bench:
    title = LOADS[load]
    row = rf"{title}[^\n]*\nsonde\s+"
    figures = {
        "slowdown (%)": rf"{row}([+-][\d.]+)%",
        "CPU of the recorder (% of a core)": rf"{row}\S+\s+\S+\s+([\d.]+)%",
        "CPU to start (s)": rf"{row}\S+\s+\S+\s+\S+\s+([\d.]+) s",
        "memory (MB)": rf"{row}\S+\s+\S+\s+\S+\s+\S+ s\s+(\d+) MB",
        "kernel programs (% of a core)": (
            rf"{row}[^\n]*\n\s+sonde's programs in the kernel: ([\d.]+)%"
        ),
    }
    return Bench((("bench", "--quick", "--tools", "sonde", "--loads", load),), figures)


def _explain(trace: str) -> tuple[str, ...]:
    at = f"tests/data/explain/{trace}"
    return ("sonde", "explain", "--json", f"{at}.json.gz", f"{at}.sonde")


RECORD = (
    "sonde",
    "record",
    "-q",
    "-f",
    "-d",
    "3",
    "-o",
    "/tmp/beside.sonde",
    "-p",
    str(os.getpid()),
)
"""Of this process, which waits: what a recorder costs however busy the machine is."""
BENCHES = {
    "record": Bench((RECORD,), {}, True),
    "explain": Bench(
        tuple(map(_explain, TRACES)), {}, True, r'"bounds": \[\s*\{\s*"key": "([^"]+)"'
    ),
    "explain.scale": Bench(
        (("bench.explain.scale", "2"),),
        {"CPU to explain (s)": r"\(([\d.]+) s CPU", "peak (MB)": r"peak ([\d,]+) MB"},
        texts=r"MB: ([\w-]+), ",
    ),
    "explain.simulate": Bench(
        (("bench.explain.simulate", "60"),), {}, True, r"all\s+(\d+ of\s+\d+) within"
    ),
    "fleet": Bench(
        (("bench.fleet", "--nodes", "1000", "--workers", "1", "--skip", "errors"),),
        {
            "CPU of a node's report (ms)": r"report: ([\d.]+) ms CPU",
            "sampling 1,000 records (ms)": r"records: ([\d.]+) ms",
            "CPU a report, aggregators (ms)": r"(?s)== histogram,.*\(([\d.]+) ms CPU each",
            "peak (MB)": r"(?s)== histogram,.*peak memory (\d+) MB",
        },
        True,
        r"sums before noise: (\w+);",
    ),
    "fleet_services": Bench(
        (("bench.fleet_services", "--reports", "600"),),
        {
            "CPU of an upload (ms)": r"connection: ([\d.]+) ms CPU",
            "leader's CPU a report (ms)": r"leader: ([\d.]+) ms CPU",
            "helper's CPU a report (ms)": r"helper: ([\d.]+) ms CPU",
        },
    ),
    "telemetry": Bench(
        (("bench.telemetry", "8"),),
        {
            "idle, on by default (% of a core)": r"on by default\s+([\d.]+)%\s+bound 0.3%",
            "busy, on by default (% of the node)": r"on by default\s+([\d.]+)%\s+bound 0.5%",
        },
    ),
    "stacks.limits": Bench(
        (("bench.stacks.limits", "--only", "process,walks", "--seconds", "4"),),
        {
            "300 libraries ready (s)": r"ready in ([\d.]+) s",
            "their tables in the kernel (MB)": r"tables, (\d+) MB in the kernel",
            "a walk of 60 frames, median (µs)": r"median ([\d.]+) µs",
            "a walk of 60 frames, p99 (µs)": r"p99 ([\d.]+) µs",
        },
    ),
    "stacks.truth": Bench(
        (
            (
                "bench.stacks.truth",
                "--seconds",
                "3",
                "--seeds",
                "2",
                "--only",
                "native,CPython 3.11,CPython 3.13",
            ),
        ),
        {"right stacks (%)": r"\*\*pooled\*\* \| ([\d.]+) ?%"},
    ),
    **{f"overhead.{load}": _overhead(load) for load in LOADS},
    "accuracy": Bench(
        (("bench", "--quick", "--no-overhead"),),
        {
            f"error, {row} (%)": rf"{row}.*?\s([+-][\d.]+)%"
            for row in ("CPU share of a function", *(f"wait of {it}" for it in WAITS))
        },
    ),
}


def run(tree: Path, bench: Bench) -> tuple[dict[str, float], list[str]]:
    """(figures, texts) of one run in a tree. Raises RuntimeError where it printed no figure."""
    figures: dict[str, float] = {}
    texts: list[str] = []
    cpu_s = peak_mb = 0.0
    environment = os.environ | {"PYTHONPATH": str(tree / "src")}
    for command in bench.commands:
        with tempfile.TemporaryFile("w+") as out:
            child = subprocess.Popen(
                [sys.executable, "-m", *command], cwd=tree, stdout=out, env=environment
            )
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            out.seek(0)
            printed = out.read()
        cpu_s += usage.ru_utime + usage.ru_stime
        peak_mb = max(peak_mb, usage.ru_maxrss / 1e3)
        if bench.texts:
            texts += re.findall(bench.texts, printed)
        for name, pattern in bench.figures.items():
            if found := re.search(pattern, printed):
                figures[name] = float(found[1].replace(",", ""))
    if bench.has_cpu:
        figures |= {"CPU (s)": round(cpu_s, 2), "peak of a process (MB)": round(peak_mb, 1)}
    if not figures:
        raise RuntimeError(f"{command} in {tree} printed no figure: {printed[-2000:]}")
    return figures, texts


def summary(turns: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float | int]]:
    """By figure: medians of both; median, least and greatest of the differences of a turn."""
    names = turns[0]["before"]
    found = {}
    for name in names:
        pairs = [
            (turn["before"][name], turn["now"][name])
            for turn in turns
            if name in turn["before"] and name in turn["now"]
        ]
        if not pairs:
            continue
        differences = sorted(now - before for before, now in pairs)
        found[name] = {
            "turns": len(pairs),
            "before": round(statistics.median(before for before, _ in pairs), 3),
            "now": round(statistics.median(now for _, now in pairs), 3),
            "difference": round(statistics.median(differences), 3),
            "least": round(differences[0], 3),
            "greatest": round(differences[-1], 3),
        }
    return found


def main() -> int:
    """Run, print a table and keep the result. Exit code 1 where texts of the trees differ."""
    parser = argparse.ArgumentParser(prog="python -m bench.beside", description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("now", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", default=",".join(BENCHES))
    args = parser.parse_args()
    kept = json.loads(args.out.read_text()) if args.out.exists() else {}
    differ = False
    for name in args.only.split(","):
        bench = BENCHES[name]
        result = kept.setdefault(name, {"load_average": [], "runs": [], "texts_differ": []})
        for _ in range(args.turns):
            result["load_average"].append(round(os.getloadavg()[0], 1))
            before, was = run(args.before, bench)
            now, found = run(args.now, bench)
            result["runs"].append({"before": before, "now": now})
            if was != found:
                result["texts_differ"].append([was, found])
            result["figures"] = summary(result["runs"])
            args.out.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        differ |= bool(result["texts_differ"])
        for figure, it in result["figures"].items():
            print(
                f"{name}: {figure}: {it['before']} → {it['now']}, difference {it['difference']} "
                f"[{it['least']}, {it['greatest']}] in {it['turns']} turns",
                flush=True,
            )
        if result["texts_differ"]:
            print(f"{name}: not the same: {result['texts_differ'][0]}", flush=True)
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
