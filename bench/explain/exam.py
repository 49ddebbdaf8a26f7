# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.explain.exam PROGRAMS OUT`: records programs that nobody here wrote.

A program (p*.py) is started with `--seed S --seconds T`. It warms up, prints `READY {"pid": …}`,
runs with its cause for T seconds, prints `PHASE2`, runs without it in the same process, and prints
`TRUTH {…}`: the share of a step that the cause costs, measured by itself. While the cause is on,
`sonde record --device-time -p PID` records it at the default budget, nobody else watching; with
`--trace S`, `sonde trace PID -d S` traces it instead, into OUT/NAME-SEED.json.gz beside the .sonde.

With `--traced NAME …` those programs are traced for a second as well, after the recording, in a
first phase that is longer by `TRACED_S`: where their truth does not come from that phase alone. A
trace that is later than that phase is removed.

With `--lanes N` N programs run at once, each with a device and an equal part of the CPUs, which
no other lane has.

OUT/NAME-SEED.sonde and .truth.json are what `bench.explain.exam_score` judges, later and elsewhere:
programs stay sealed until the rules are frozen.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gzip
import json
import math
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

RECORDED_LESS_S = 1.0
"""The recording ends this long before the program's first phase, whenever it became ready."""
TRACED_S = 7.0
"""What a trace of a second takes, its preparation included."""
BASE_NS = 1e9
"""How long before a trace its times count from."""
START_S = 120.0
"""Deadline for a program to warm up."""


@dataclass(slots=True)
class Outcome:
    """What became of one run."""

    program: str
    seed: int
    failure: str = ""
    lost_share: float = 0.0
    took_s: float = 0.0
    recorder: str = ""


def main() -> int:
    """Run what was asked for; 1 where a run gave no result."""
    parser = argparse.ArgumentParser(prog="python -m bench.explain.exam")
    parser.add_argument("programs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--recorded", type=float, help="seconds; default: one less than --seconds")
    parser.add_argument(
        "--trace", type=float, metavar="S", help="a full trace of S seconds instead"
    )
    parser.add_argument("--traced", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--traced-s", type=float, default=1.0, help="length of these traces")
    parser.add_argument("--traced-seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds; the rest is left out")
    parser.add_argument("--lanes", type=int, default=1, help="programs at once, one to a device")
    parser.add_argument("--smoke", action="store_true", help="tiny, unrecorded, several at once")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found = sorted(args.programs.glob("p*.py"))
    wanted = [
        (path, seed)
        for seed in args.seeds
        for path in found
        if not args.only or path.stem in args.only
    ]
    wanted = [one for one in wanted if not _truth_file(args.out, *one).exists()]
    began_s = time.monotonic()
    lanes = lanes_of(6 if args.smoke else args.lanes, bound=args.lanes > 1)

    def attempt(one: tuple[Path, int]) -> Outcome | None:
        if time.monotonic() - began_s > args.budget:
            return None
        lane = lanes.get()
        try:
            return run(*one, args, lane)
        finally:
            lanes.put(lane)

    with concurrent.futures.ThreadPoolExecutor(lanes.qsize()) as pool:
        outcomes = [one for one in pool.map(attempt, wanted) if one is not None]
    for one in outcomes:
        print(
            f"{one.program:6} seed {one.seed}  {one.took_s:5.1f} s  lost {one.lost_share:6.1%}  "
            f"{one.failure or 'ok'} {one.recorder}",
            flush=True,
        )
    print(f"{len(wanted) - len(outcomes)} runs left out")
    (args.out / "outcomes.json").write_text(json.dumps([asdict(one) for one in outcomes]))
    return int(any(one.failure for one in outcomes))


def _truth_file(out: Path, program: Path, seed: int) -> Path:
    return out / f"{program.stem}-{seed}.truth.json"


@dataclass(frozen=True, slots=True)
class Lane:
    """Where a program runs. `device`: its number; `cpus`: as taskset takes them; '': all."""

    device: str
    cpus: str

    def command(self, words: list[str]) -> list[str]:
        """The command, bound to the lane."""
        return [*(["taskset", "-c", self.cpus] if self.cpus else []), *words]

    @property
    def environment(self) -> dict[str, str]:
        """Of what runs in the lane."""
        return dict(os.environ) | ({"CUDA_VISIBLE_DEVICES": self.device} if self.device else {})


def lanes_of(count: int, *, bound: bool) -> queue.SimpleQueue[Lane]:
    """The lanes; `bound`: equal parts of the CPUs that this process may use, a device each."""
    lanes: queue.SimpleQueue[Lane] = queue.SimpleQueue()
    cpus = sorted(os.sched_getaffinity(0))
    each = len(cpus) // count
    for number in range(count):
        mine = cpus[number * each : (number + 1) * each]
        lanes.put(Lane(str(number), ",".join(map(str, mine))) if bound else Lane("", ""))
    return lanes


def run(path: Path, seed: int, args: argparse.Namespace, lane: Lane) -> Outcome:
    """One program, recorded once."""
    began_s = time.monotonic()
    outcome = Outcome(path.stem, seed)
    log = args.out / f"{path.stem}-{seed}.log"
    is_traced = path.stem in args.traced and seed in args.traced_seeds
    seconds = args.seconds + (TRACED_S if is_traced else 0.0)
    command = [sys.executable, path.name, "--seed", str(seed), "--seconds", str(seconds)]
    with log.open("w") as errors:
        program = subprocess.Popen(
            lane.command(command + (["--smoke"] if args.smoke else [])),
            env=lane.environment,
            cwd=path.parent,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        assert program.stdout is not None
        try:
            outcome.failure = _follow(program.stdout, outcome, path, seed, args, lane)
            if program.wait(args.seconds * 3 + START_S) and not outcome.failure:
                outcome.failure = f"exit code {program.returncode}"
        except subprocess.TimeoutExpired:
            outcome.failure = "did not end"
        finally:
            if program.poll() is None:
                os.killpg(program.pid, 9)
                program.wait()
            program.stdout.close()
    outcome.took_s = time.monotonic() - began_s
    return outcome


def _follow(
    lines: IO[str], outcome: Outcome, path: Path, seed: int, args: argparse.Namespace, lane: Lane
) -> str:
    """Record from READY on, keep the truth; returns what went wrong, '' nothing."""
    recorder: subprocess.Popen[str] | None = None
    end: threading.Timer | None = None
    length_s = args.recorded or args.seconds - RECORDED_LESS_S
    truth, phase_over_ns = None, 0
    traced = args.trace and args.out / f"{path.stem}-{seed}.json.gz"
    for line in lines:
        word, _, rest = line.strip().partition(" ")
        if word == "READY" and not args.smoke:
            pid = json.loads(rest)["pid"]
            name = f"{path.stem}-{seed}"
            if args.trace:
                recorder = _tracer(pid, traced, args.trace, lane)
                continue
            recorder = _recorder(pid, args.out / f"{name}.sonde", length_s, lane)
            if path.stem in args.traced and seed in args.traced_seeds:
                traced = args.out / f"{name}-traced.json.gz"
            # The recorder counts from when it is ready: seconds later, the first time on a machine.
            end = threading.Timer(length_s, _end, (recorder, pid, traced, args.traced_s, lane))
            end.start()
        elif word == "PHASE2":
            phase_over_ns = time.time_ns()
        elif word == "TRUTH":
            truth = json.loads(rest)
    if recorder is not None:
        _, printed = recorder.communicate(timeout=120)
        if end is not None:
            end.cancel()
            end.join()
        outcome.recorder = "" if recorder.returncode == 0 else printed.strip()[-300:]
        if traced and traced.is_file():
            length_ns = (args.trace or args.traced_s) * 1e9
            if _began_ns(traced) + length_ns > phase_over_ns:
                traced.unlink()
                outcome.recorder += " the trace was later than the phase with the cause"
    if truth is None:
        return "no truth"
    outcome.lost_share = float(truth["lost_share"])
    if not args.smoke:
        _truth_file(args.out, path, seed).write_text(json.dumps(truth))
    return ""


def _began_ns(trace: Path) -> float:
    """When a trace begins, by the wall clock; infinite where it does not have that."""
    with gzip.open(trace, "rt") as text:
        found = re.search(r'"baseTimeNanoseconds": ?(\d+)', text.read(4096))
    return int(found[1]) + BASE_NS if found else math.inf


def _end(
    recorder: subprocess.Popen[str], pid: int, traced: Path | None, seconds: float, lane: Lane
) -> None:
    """End a recording, then trace for this long if asked to."""
    recorder.send_signal(signal.SIGINT)
    if traced is not None:
        while recorder.poll() is None:  # its output is read elsewhere
            time.sleep(0.02)
        _, printed = _tracer(pid, traced, seconds, lane).communicate(timeout=60)
        traced.with_name(f"{traced.name.removesuffix('.json.gz')}.log").write_text(printed)


def _recorder(pid: int, capture: Path, seconds: float, lane: Lane) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sonde", "record", "-q", "--device-time", "-f"]
    command += ["-p", str(pid), "-d", f"{seconds:g}", "-o", str(capture)]
    return subprocess.Popen(
        lane.command(command), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def _tracer(pid: int, timeline: Path, seconds: float, lane: Lane) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sonde", "trace", str(pid), "-d", f"{seconds:g}"]
    command += ["-o", str(timeline), "--json", "--no-trial"]  # the verdict is for later
    return subprocess.Popen(
        lane.command(command), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


if __name__ == "__main__":
    sys.exit(main())
