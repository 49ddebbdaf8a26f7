# SPDX-License-Identifier: Apache-2.0
"""The command line; prints one table, rows of programs and columns of tools."""

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
COLUMNS = ("sonde", "perf fp", "perf dwarf", "otel", "py-spy")
Results = dict[str, dict[str, Share]]


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
    results = _load(args.results)
    with tempfile.TemporaryDirectory(prefix="bench-stacks-") as name:
        peer = None if args.no_otel else otel.program()
        with otel_or_none(Path(name), peer) as watcher:
            for program in wanted:
                outcomes = _measure(program, args.seconds, Path(name), watcher)
                results[program.name] = {tool: it.share for tool, it in outcomes.items()}
                if args.captures:
                    args.captures.mkdir(parents=True, exist_ok=True)
                    shutil.copy(Path(name) / "sonde.sonde", args.captures / f"{program.name}.sonde")
                for tool, it in outcomes.items():
                    if it.failed:
                        print(f"bench: {program.name}, {tool}: {it.failed}", file=sys.stderr)
                _save(args.results, results)
    print(table(results))
    missed = misses(results)
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
        watched = Watched(process.pid, seconds, folder, Entries(process.pid))
        return watch(watched, names, watcher)
    finally:
        process.kill()
        process.wait()


def table(results: Results) -> str:
    """In Markdown."""
    lines = ["| program | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    rows = [*results.items()]
    rows.append(("**pooled**", {tool: pooled(_column(results, tool)) for tool in COLUMNS}))
    for name, shares in rows:
        cells = [str(shares.get(tool, Share())) for tool in COLUMNS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def misses(results: Results) -> list[str]:
    """Where Sonde is below its target, or below a peer with intervals that do not meet."""
    found = []
    for name, shares in results.items():
        ours = shares.get("sonde", Share())
        if ours.value < TARGET:
            found.append(f"{name}: {ours}, less than {TARGET:.0%}")
        for tool, theirs in shares.items():
            if tool != "py-spy" and theirs.total and theirs.interval[0] > ours.interval[1]:
                found.append(f"{name}: below {tool}")
    return found


def _column(results: Results, tool: str) -> list[Share]:
    return [shares[tool] for shares in results.values() if tool in shares]


def _load(path: Path | None) -> Results:
    if path is None or not path.exists():
        return {}
    return {
        name: {tool: Share(*pair) for tool, pair in shares.items()}
        for name, shares in json.loads(path.read_text()).items()
    }


def _save(path: Path | None, results: Results) -> None:
    if path is not None:
        plain = {
            name: {tool: [it.hits, it.total] for tool, it in shares.items()}
            for name, shares in results.items()
        }
        path.write_text(json.dumps(plain, indent=1))


if __name__ == "__main__":
    sys.exit(main())
