# SPDX-License-Identifier: Apache-2.0
"""Runs trials beside one `sonde diagnose`, and scores them.

    sudo python -m bench.faults run [--trials 8] [--seed 1] [--only NAME …] [--out FILE.jsonl]
    python -m bench.faults score FILE.jsonl … [--json FILE.json]

    sudo python -m bench.faults run --gpu --lanes 4 --out FOLDER   (on_gpu/run.py)

`run` goes on where it was ended: trials that are in the file are not done again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from bench.faults import score
from bench.faults.on_gpu import run as on_gpu
from bench.faults.stage import GROUPS, SHARES
from bench.faults.trial import OURS, Programs, Trial, as_dict, plan, run

GAP_S = 2.5
"""After a trial, for what is explained late."""
CPU_CLOCK = os.sysconf("SC_CLK_TCK")


class Diagnosis:
    """`sonde diagnose` at work."""

    def __init__(self, rows: Path | None, keep: Path | None) -> None:
        command = [sys.executable, "-m", "sonde", "diagnose", "--json", "--all"]
        command += ["--rows", str(rows)] if rows else []
        command += ["--keep", str(keep)] if keep else []
        # As a service manager would: a separate weight, beside what tenants have.
        group = GROUPS / "cpu/sonde-faults-agent"
        group.mkdir(exist_ok=True)
        (group / "cpu.shares").write_text(str(SHARES))
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())),
        )  # fmt: skip
        self.incidents: list[dict[str, Any]] = []
        self._watching = threading.Event()
        for target in (self._read, self._read_errors):
            threading.Thread(target=target, daemon=True).start()
        if not self._watching.wait(60):
            raise SystemExit("sonde diagnose did not start")
        time.sleep(4)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.incidents.append(json.loads(line))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("sonde: watching"):
                self._watching.set()
            else:
                print(line, end="", file=sys.stderr)

    def cpu_s(self) -> float:
        """Of it and its child."""
        return sum(_cpu_s(pid) for pid in (self.process.pid, *_children(self.process.pid)))

    def end(self) -> None:
        """End it."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += list(map(int, (task / "children").read_text().split()))
    return found


def _cpu_s(pid: int) -> float:
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / CPU_CLOCK


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults")
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--trials", type=int, default=8)
    runs.add_argument("--seed", type=int, default=1)
    runs.add_argument("--only", nargs="+", metavar="NAME")
    runs.add_argument("--out", type=Path, default=Path("build/faults.jsonl"))
    runs.add_argument(
        "--programs", type=Path, metavar="FILE.py",
        help="faults and victims of others: a module with EVERY and start_victim (trial.Programs)",
    )  # fmt: skip
    runs.add_argument("--gpu", action="store_true", help="faults of programs on GPUs")
    on_gpu.add_arguments(runs)
    runs.add_argument("--rows", type=Path, help="keep the rows of all ticks, for baselines")
    runs.add_argument("--keep", type=Path, help="keep incidents, with their rows")
    runs.add_argument("--minutes", type=float, default=1e9)
    scores = commands.add_parser("score")
    scores.add_argument("files", nargs="+", type=Path)
    scores.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.command == "score":
        score.main(args.files, args.json)
    elif args.gpu:
        on_gpu.check_only(args.only or [])
        on_gpu.Run(args).all()
    else:
        programs = _programs_of(args.programs) if args.programs else OURS
        if unknown := [name for name in args.only or [] if name not in programs.every]:
            parser.error(f"{unknown} are no faults; there are: {', '.join(programs.every)}")
        _run_all(args, programs)


def _programs_of(path: Path) -> Programs:
    sys.path[:0] = [str(path.resolve().parent), str(Path(__file__).parent)]  # for `import stage`
    module = importlib.import_module(path.stem)
    return Programs(module.EVERY, module.start_victim)


def _key(line: dict[str, Any]) -> str:
    """Of a trial that was written to the file, where it has a field more."""
    names = ("fault", "victim", "level", "seed")
    return Trial(**{name: line[name] for name in names}).key


def _run_all(args: argparse.Namespace, programs: Programs) -> None:
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = {_key(line) for line in map(json.loads, lines) if "fault" in line}
    names = args.only or programs.every
    plans = [plan(programs.every[name], args.trials, args.seed) for name in names]
    # In rounds, so that one that is ended early has something of each.
    todo = [trials[number] for number in range(args.trials) for trials in plans]
    todo = [trial for trial in todo if trial.key not in done]
    until_s = time.monotonic() + 60 * args.minutes
    diagnosis = Diagnosis(args.rows, args.keep)
    try:
        for trial in todo:
            if time.monotonic() > until_s:
                break
            if diagnosis.process.poll() is not None:
                args.rows = args.rows and args.rows.with_suffix(f".{len(done)}.jsonl")
                diagnosis = Diagnosis(args.rows, args.keep)
            done.add(trial.key)
            before = len(diagnosis.incidents)
            cpu_s, start_s = diagnosis.cpu_s(), time.monotonic()
            run(trial, programs)
            time.sleep(GAP_S)
            trial.incidents = diagnosis.incidents[before:]
            passed_s = time.monotonic() - start_s
            used = (diagnosis.cpu_s() - cpu_s) / passed_s
            line = {**as_dict(trial), "agent_cpu": round(used, 4)}
            with args.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(score.one_line(line), flush=True)
    finally:
        diagnosis.end()


if __name__ == "__main__":
    main()
