# SPDX-License-Identifier: Apache-2.0
"""Fuzz every reader of what others wrote, each for a while.

python -m fuzz [--seconds S] [--only NAME,…] [--campaign] [--keep] [--build]

One table at the end and build/fuzz/results.json: executions, coverage, slowest input, peak memory,
crashes. What was done adds up in build/fuzz/state.json; `--campaign` goes on until every target had
its seconds of processor time, a slice at a time, however often it is ended and started again. On
another machine it goes on from fuzz/campaign.json, which `--keep` writes.
Exit code 1 where a target crashed, hung or took too much memory; its input is in
build/fuzz/crashes, and belongs into tests/data/fuzz/regressions once its cause is fixed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fuzz.targets import (
    RSS_MB,
    TARGETS,
    TIMEOUT_S,
    WORK,
    Outcome,
    Target,
    build,
    environment,
    outcome,
)

STATE = WORK / "state.json"
RESULTS = WORK / "results.json"
KEPT = Path(__file__).parent / "campaign.json"
"""Of the campaign so far, in the repository."""
STARTS_S = 1
"""What a target may take to start."""
SLICE_S = 300
"""Of a campaign: targets take turns."""
SLICES_S = {"kineto": 90}
"""Shorter, so that what atheris keeps of a run stays below the limit of memory."""


@dataclass(slots=True)
class Done:
    """What was done with one target so far."""

    executions: int = 0
    cpu_s: float = 0.0
    edges: int = 0
    features: int = 0
    slowest_s: float = 0.0
    peak_mb: int = 0
    crashes: list[str] = field(default_factory=list)

    def add(self, run: Outcome, cpu_s: float, crashes: Iterable[str]) -> None:
        """One more run."""
        self.executions += run.executions
        self.cpu_s += cpu_s
        self.edges, self.features = max(self.edges, run.edges), max(self.features, run.features)
        self.slowest_s = max(self.slowest_s, run.slowest_s)
        self.peak_mb = max(self.peak_mb, run.peak_mb)
        self.crashes += [name for name in crashes if name not in self.crashes]


def timed(command: list[str], log: Path, limit_s: float) -> tuple[int, float]:
    """Run a command: its exit code, its processor time."""
    began = os.times()
    with log.open("wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment())
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.wait()
    ended = os.times()
    own_s = began.children_user + began.children_system
    return code, ended.children_user + ended.children_system - own_s


def log_of(target: Target, what: str) -> Path:
    """Of this process: a campaign may run beside it."""
    folder = WORK / "logs"
    folder.mkdir(exist_ok=True)
    return folder / f"{target.name}{what}-{os.getpid()}.log"


def is_crash(target: Target, found: Path) -> bool:
    """Whether an input breaks something. By libFuzzer's clock, the wall's, every input is slow on a
    busy machine: those are tried again by processor time. Memory adds up over a run (atheris keeps
    some kilobytes for each call of an instrumented comparison): an input is tried again alone."""
    if found.name.startswith("slow-unit"):
        return False
    if found.name.startswith("oom"):
        command = target.command(f"-rss_limit_mb={RSS_MB}", str(found))
        return bool(timed(command, log_of(target, "-again"), 600)[0])
    if not found.name.startswith("timeout"):
        return True
    command = target.command("-timeout=600", str(found))
    code, cpu_s = timed(command, log_of(target, "-again"), 600)
    return bool(code) or cpu_s > TIMEOUT_S + STARTS_S


def fuzz_once(target: Target, seconds: int, done: Done) -> None:
    """Run a target for a while and add up what came of it."""
    command = target.fuzz(seconds)
    before = {it.name for it in target.crashes.iterdir()}
    limit_s = seconds * 2 + 120
    log = log_of(target, "")
    code, cpu_s = timed(command, log, limit_s)
    found = sorted({it.name for it in target.crashes.iterdir()} - before)
    crashes = [name for name in found if is_crash(target, target.crashes / name)]
    if code and not found:
        crashes = [f"exit code {code}: {log}"]
    done.add(outcome(log.read_text(errors="replace")), cpu_s, crashes)


def table(known: dict[str, Done]) -> str:
    """The figures, a line a target."""
    head = ("target", "executions", "per CPU s", "edges", "features", "CPU min", "slowest", "peak")
    lines = ["{:14} {:>12} {:>10} {:>7} {:>9} {:>8} {:>8} {:>7}  crashes".format(*head)]
    for name, it in known.items():
        rate = it.executions / it.cpu_s if it.cpu_s else 0
        lines.append(
            f"{name:14} {it.executions:12,} {rate:10,.0f} {it.edges:7,} {it.features:9,} "
            f"{it.cpu_s / 60:8.1f} {f'{it.slowest_s:.0f} s':>8} {f'{it.peak_mb} MB':>7}  "
            f"{len(it.crashes) or '-'}"
        )
    lines.append(f"(limits: {TIMEOUT_S} s an input, {RSS_MB} MB a target)")
    return "\n".join(lines)


def write(path: Path, known: dict[str, Done]) -> None:
    """Keep the figures."""
    document = {"limits": {"timeout_s": TIMEOUT_S, "rss_mb": RSS_MB}, "targets": {}}
    document["targets"] = {name: asdict(it) for name, it in known.items()}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    part.replace(path)


def load(path: Path) -> dict[str, Done]:
    """Figures that were kept."""
    if path == STATE and not path.exists():
        path = KEPT
    if not path.exists():
        return {}
    targets = json.loads(path.read_text())["targets"]
    return {name: Done(**it) for name, it in targets.items()}


def campaign(targets: list[Target], seconds: int, progress: Path) -> dict[str, Done]:
    """Turn by turn until each target had its seconds of processor time; one that crashed waits
    until it is run by hand. Campaigns of different targets may run side by side."""
    while True:
        known = load(STATE)
        waiting = [
            target
            for target in targets
            if (it := known.setdefault(target.name, Done())).cpu_s < seconds and not it.crashes
        ]
        write(progress, known)
        if not waiting:
            return known
        target = min(waiting, key=lambda it: known[it.name].cpu_s)
        began = time.monotonic()
        fuzz_once(target, SLICES_S.get(target.name, SLICE_S), known[target.name])
        write(STATE, load(STATE) | {target.name: known[target.name]})
        if time.monotonic() - began < 1:
            time.sleep(1)  # it ended at once: not to spin


def runnable(targets: list[Target]) -> list[Target]:
    """Those that can run here; the others are named."""
    if importlib.util.find_spec("atheris"):
        return targets
    left_out = [target.name for target in targets if not target.is_native]
    if left_out:
        print(f"not run, there is no atheris for this Python: {', '.join(left_out)}")
    return [target for target in targets if target.is_native]


def main() -> int:
    """Run what was asked for."""
    names = [target.name for target in TARGETS]
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=int, default=30, help="of each target (default 30)")
    parser.add_argument("--only", default=",".join(names), metavar="NAME,…", help="these alone")
    parser.add_argument("--campaign", action="store_true", help="go on where it was left")
    parser.add_argument("--keep", action="store_true", help="write fuzz/campaign.json, and no more")
    parser.add_argument("--progress", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--build", action="store_true", help="compile, and no more")
    args = parser.parse_args()
    chosen = [target for target in TARGETS if target.name in args.only.split(",")]
    WORK.mkdir(parents=True, exist_ok=True)
    if args.keep:
        write(KEPT, load(STATE))
        print(table(load(STATE)))
        return 0
    if args.build or any(target.is_native for target in chosen):
        build()
    if args.build:
        return 0
    if args.campaign:
        known = campaign(runnable(chosen), args.seconds, args.progress)
    else:
        known = {}
        for target in runnable(chosen):
            print(f"{target.name} ({args.seconds} s)", file=sys.stderr, flush=True)
            fuzz_once(target, args.seconds, known.setdefault(target.name, Done()))
    write(args.progress, known)
    print(table(known))
    for name, it in known.items():
        for crash in it.crashes:
            print(f"{name}: {crash}")
    return int(any(it.crashes for it in known.values()))


if __name__ == "__main__":
    sys.exit(main())
