# SPDX-License-Identifier: Apache-2.0
"""The command line; prints two tables, rows of programs and columns of tools."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bench.stacks
from bench.stacks import otel
from bench.stacks.entries import Entries
from bench.stacks.programs import Program, programs
from bench.stacks.share import Share, pooled
from bench.stacks.tools import TOOLS, Otel, Outcome, Watched, missing, otel_or_none, watch
from bench.tools import require_root

TARGET = 0.99
POINT = 0.01
"""The most that Sonde may be below OpenTelemetry's profiler."""
COLUMNS = ("sonde", "perf fp", "perf dwarf", "otel", "py-spy")
NAMING = ("sonde", "otel")
Results = dict[str, dict[str, Share]]
"""By program and tool."""


def main() -> int:
    """1 where Sonde stays below its target, or below a peer by more than chance."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.stacks", description=bench.stacks.__doc__
    )
    parser.add_argument("--seconds", type=float, default=8, help="a program (default: %(default)s)")
    parser.add_argument("--only", default="", help="programs whose name has one of these, by comma")
    parser.add_argument("--results", type=Path, help="JSON to add to, and to print in whole")
    parser.add_argument("--captures", type=Path, help="folder to keep Sonde's captures in")
    parser.add_argument("--no-otel", action="store_true")
    args = parser.parse_args()
    require_root()
    for tool in filter(missing, TOOLS):
        print(f"bench: {tool} is not here; `scripts/setup bench` installs it", file=sys.stderr)
    wanted = [it for it in programs() if any(part in it.name for part in args.only.split(","))]
    whole, named = load(args.results)
    with tempfile.TemporaryDirectory(prefix="bench-stacks-") as name:
        peer = None if args.no_otel else otel.program()
        with otel_or_none(Path(name), peer) as watcher:
            for program in wanted:
                outcomes = _measure(program, args.seconds, Path(name), watcher)
                whole[program.name] = {tool: it.share for tool, it in outcomes.items()}
                if program.passes:
                    named[program.name] = {
                        tool: outcomes[tool].named for tool in NAMING if tool in outcomes
                    }
                if args.captures:
                    args.captures.mkdir(parents=True, exist_ok=True)
                    shutil.copy(Path(name) / "sonde.sonde", args.captures / f"{program.name}.sonde")
                for tool, it in outcomes.items():
                    if it.failed:
                        print(f"bench: {program.name}, {tool}: {it.failed}", file=sys.stderr)
                _save(args.results, whole, named)
    print(f"{table(whole, COLUMNS)}\n\n{table(named, NAMING)}")
    missed = misses(whole) + misses_of_names(named)
    print("".join(f"missed: {text}\n" for text in missed), end="")
    return 1 if missed else 0


def _measure(
    program: Program, seconds: float, folder: Path, watcher: Otel | None
) -> dict[str, Outcome]:
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(list(program.command), stdout=quiet, stderr=quiet, cwd=folder)
    try:
        time.sleep(program.warm_up_s)
        names = [it for it in TOOLS if not missing(it) and (it != "py-spy" or program.is_python)]
        entries = Entries(process.pid, program.symbols)
        kinds = program.is_native, program.is_python
        watched = Watched(process.pid, seconds, folder, entries, program.passes, *kinds)
        return watch(watched, names, watcher)
    finally:
        process.kill()
        process.wait()


def table(results: Results, columns: tuple[str, ...]) -> str:
    """In Markdown."""
    lines = ["| program | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    rows = [*results.items()]
    rows.append(("**pooled**", {tool: pooled(_column(results, tool)) for tool in columns}))
    for name, shares in rows:
        cells = [str(shares.get(tool, Share())) for tool in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def misses(results: Results) -> list[str]:
    """Where Sonde is below its target, or below a peer by more than chance or a point."""
    found = []
    for name, shares in results.items():
        ours = shares.get("sonde", Share())
        if ours.value < TARGET:
            found.append(f"{name}: {ours}, less than {TARGET:.0%}")
        for tool, theirs in shares.items():
            if tool != "py-spy" and theirs.total and theirs.interval[0] > ours.interval[1]:
                found.append(f"{name}: below {tool}")
        found += _below_otel(name, shares)
    return found


def misses_of_names(results: Results) -> list[str]:
    """Where Sonde names fewer stacks than OpenTelemetry's profiler, by more than a point."""
    return [f"{it}, names" for name, shares in results.items() for it in _below_otel(name, shares)]


def _below_otel(name: str, shares: dict[str, Share]) -> list[str]:
    ours, theirs = shares.get("sonde", Share()), shares.get("otel", Share())
    if not theirs.total or ours.value >= theirs.value - POINT:
        return []
    return [f"{name}: {100 * (theirs.value - ours.value):.2f} points below otel"]


def _column(results: Results, tool: str) -> list[Share]:
    return [shares[tool] for shares in results.values() if tool in shares]


def load(path: Path | None) -> tuple[Results, Results]:
    """Shares of whole stacks and of named ones; none where there is no file."""
    if path is None or not path.exists():
        return {}, {}
    kept = json.loads(path.read_text())
    whole, named = (
        {
            name: {tool: Share(*pair) for tool, pair in shares.items()}
            for name, shares in kept[what].items()
        }
        for what in ("whole", "named")
    )
    return whole, named


def _save(path: Path | None, whole: Results, named: Results) -> None:
    if path is not None:
        plain = {
            what: {
                name: {tool: [it.hits, it.total] for tool, it in shares.items()}
                for name, shares in results.items()
            }
            for what, results in (("whole", whole), ("named", named))
        }
        path.write_text(json.dumps(plain, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
