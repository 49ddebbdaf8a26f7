# SPDX-License-Identifier: Apache-2.0
"""Trials side by side, one to a device, beside one `sonde diagnose`:

    sudo python -m bench.faults run --gpu --lanes 4 --trials 5 --seed 1 --budget 450 --out FOLDER

FOLDER gets `trials.jsonl` (a line a trial; those that are in it, or in a file of `--done`, are not
done again), `incidents.jsonl` (all that was reported), `kept.tar` (incidents with their rows),
`moments.gz` (`keep_moments`), `machine.json` and `diagnose.log`.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from bench.faults import score
from bench.faults.on_gpu.faults import BENIGN, EVERY, FAULTS
from bench.faults.on_gpu.groups import Groups
from bench.faults.on_gpu.stage import Lane, lanes_of
from bench.faults.on_gpu.trial import (
    AFTER_S,
    FAULT_S,
    RANDOM_S,
    SETTLE_S,
    GpuTrial,
    Prepared,
    as_dict,
    plan,
)

TRIAL_S = SETTLE_S + RANDOM_S / 2 + FAULT_S + AFTER_S + 0.8
"""What a trial takes once it is warm, on average."""
LATE_S = 4.0
"""After the end of a trial, for what is explained late."""
END_S = 12.0
"""What is left of the budget for the end."""
WATCHING_S = 90.0
LOAD_S = 60.0
PAIRS_S = 16.0
"""Until the first of the trials that need two devices is warm."""
KEPT_BYTES = 12 << 20
"""Of `kept.tar`: later incidents are left out."""
CLOCK = os.sysconf("SC_CLK_TCK")


class Diagnosis:
    """`sonde diagnose` at work."""

    def __init__(self, out: Path, groups: Groups) -> None:
        self.out = out
        self.scratch = Path(tempfile.mkdtemp(prefix="sonde-faults-kept-"))
        self.moments = self.scratch / "moments"
        command = [sys.executable, "-m", "bench.faults.on_gpu.keep_moments", str(self.moments)]
        command += ["--json", "--all", "--keep", str(self.scratch / "kept")]
        self._log = (out / "diagnose.log").open("a")
        self._incidents_file = (out / "incidents.jsonl").open("a")
        groups.group("agent")
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: groups.enter("agent"),
        )  # fmt: skip
        self.incidents: list[dict[str, Any]] = []
        self._watching = threading.Event()
        for target in (self._read, self._read_errors):
            threading.Thread(target=target, daemon=True).start()
        if not self._watching.wait(WATCHING_S) or self.process.poll() is not None:
            raise SystemExit("sonde diagnose did not start; see diagnose.log")
        self.since_s, self._cpu_s = time.monotonic(), self.cpu_s()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._incidents_file.write(line)
            self._incidents_file.flush()
            found = json.loads(line)
            if "verdict" in found:
                self.incidents.append(found)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._log.write(line)
            self._log.flush()
            if line.startswith("sonde: watching"):
                self._watching.set()
        self._watching.set()

    def cpu_s(self) -> float:
        """Of it and its children so far."""
        return _tree_cpu_s(self.process.pid)

    def share(self) -> float:
        """CPU time as a share of a core, since it was ready."""
        return (self.cpu_s() - self._cpu_s) / max(1e-3, time.monotonic() - self.since_s)

    def end(self) -> None:
        """End it, and pack what it kept."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
        with tarfile.open(_unused(self.out, "kept", ".tar"), "w") as archive:
            kept = 0
            for path in sorted((self.scratch / "kept").glob("*.json.gz")):
                kept += path.stat().st_size + 1024
                if kept < KEPT_BYTES:
                    archive.add(path, path.name)
        if self.moments.exists():
            packed = _unused(self.out, "moments", ".gz")
            with self.moments.open("rb") as raw, gzip.open(packed, "wb", 4) as file:
                shutil.copyfileobj(raw, file, 1 << 20)
        shutil.rmtree(self.scratch, ignore_errors=True)


def _unused(folder: Path, name: str, suffix: str) -> Path:
    """A file that is not there yet."""
    number, path = 1, folder / f"{name}{suffix}"
    while path.exists():
        number += 1
        path = folder / f"{name}{number}{suffix}"
    return path


def _tree_cpu_s(pid: int) -> float:
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used = (int(words[11]) + int(words[12])) / CLOCK
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                used += _tree_cpu_s(int(child))
    except OSError:
        return 0.0
    return used


class Run:
    """All trials of one call."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._out: Path = args.out
        self._out.mkdir(parents=True, exist_ok=True)
        self._file = self._out / "trials.jsonl"
        self._until_s = time.monotonic() + args.budget - END_S
        self.groups = Groups()
        self.devices = _devices()
        self.lanes = lanes_of(args.lanes, len(self.devices))
        self._todo = self._plan(args)
        self._lock = threading.Lock()
        self._exclusive = {fault.exclusive: threading.Lock() for fault in EVERY.values()}
        """Held by faults under way that use something of the machine that lanes share."""
        self._ended: list[tuple[float, GpuTrial]] = []
        """Trials whose incidents may still come, with when they ended."""
        self.diagnosis: Diagnosis | None = None

    def _plan(self, args: argparse.Namespace) -> list[GpuTrial]:
        done = set()
        for path in (self._file, *args.done):
            lines = path.read_text().splitlines() if path.exists() else []
            rows = [json.loads(line) for line in lines]
            done |= {_key(row) for row in rows if not row["trouble"]}
        names = args.only or list(EVERY)
        if not self.groups.has_quota:
            names = [name for name in names if name != "cpu-quota"]
        if len(self.devices) < 2:
            names = [name for name in names if EVERY[name].lanes == 1]
        benign = {fault.name for fault in BENIGN}
        counts = {name: args.benign if name in benign else args.trials for name in names}
        plans = [plan(name, counts[name], args.seed) for name in names]
        # In rounds, so that one that is ended early has something of each.
        todo = [its[number] for number in range(max(counts.values())) for its in plans
                if number < len(its)]  # fmt: skip
        return [trial for trial in todo if trial.key not in done]

    def all(self) -> None:
        """Do them: those of one lane, then those that need the device of the next lane too."""
        _load_once()
        self.diagnosis = Diagnosis(self._out, self.groups)
        of_two = sum(EVERY[trial.fault].lanes == 2 for trial in self._todo)
        pairs = self.lanes[::2] if len(self.lanes) > 1 else self.lanes
        reserve_s = TRIAL_S * -(-of_two // len(pairs)) + (PAIRS_S if of_two else 0.0)
        try:
            self._phase(self.lanes, 1, self._until_s - reserve_s)
            self._phase(pairs, 2, self._until_s)
            time.sleep(LATE_S)
        finally:
            self._write(late=False)
            self._describe()
            self.diagnosis.end()
            self.groups.close()

    def _phase(self, lanes: list[Lane], width: int, until_s: float) -> None:
        threads = [
            threading.Thread(target=self._lane, args=(lane, width, until_s)) for lane in lanes
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _lane(self, lane: Lane, width: int, until_s: float) -> None:
        """Trials one after another: while one runs, the next one's processes take the device, and
        those of the one after it load their modules."""
        started: deque[Prepared] = deque()
        for _ in range(2):
            self._start(started, lane, width, until_s)
        if started:
            started[0].warm()
        while started:
            current = started.popleft()
            with contextlib.suppress(RuntimeError):  # `run` reports it
                current.wait_ready()
            following = started[0] if started else None
            if following is not None:
                threading.Thread(target=following.warm, daemon=True).start()
            self._start(started, lane, width, until_s - TRIAL_S)
            self._do(current, following)

    def _start(self, started: deque[Prepared], lane: Lane, width: int, until_s: float) -> None:
        """Start the processes of one trial more, if time is left, and something to do."""
        if time.monotonic() + TRIAL_S * (len(started) + 1) > until_s:
            return
        with self._lock:
            todo = (trial for trial in self._todo if EVERY[trial.fault].lanes == width)
            trial = next(todo, None)
            if trial is None:
                return
            self._todo.remove(trial)
        started.append(Prepared(trial, lane, self.groups))

    def _do(self, one: Prepared, following: Prepared | None) -> None:
        def is_quiet() -> bool:
            return following is None or following.is_ready()

        exclusive = one.fault.exclusive
        alone = self._exclusive[exclusive] if exclusive else contextlib.nullcontext()
        trial = one.run(is_quiet, alone)
        with self._lock:
            self._ended.append((time.monotonic(), trial))
        self._write(late=True)

    def _write(self, *, late: bool) -> None:
        """Write the trials that have ended. `late`: only those whose incidents have all come."""
        assert self.diagnosis is not None
        with self._lock:
            now_s = time.monotonic()
            for ended_s, trial in list(self._ended):
                if late and now_s - ended_s < LATE_S:
                    continue
                self._ended.remove((ended_s, trial))
                pids = {*trial.victim_pids, *trial.cast}
                trial.incidents = [
                    it for it in list(self.diagnosis.incidents)
                    if it["victim"] in pids and it["noticed_ns"] >= trial.start_ns
                ]  # fmt: skip
                line = {**as_dict(trial), "agent_cpu": round(self.diagnosis.share(), 4)}
                with self._file.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(f"{trial.lane} {score.one_line(line)}", flush=True)

    def _describe(self) -> None:
        assert self.diagnosis is not None
        about = {
            "devices": self.devices,
            "kernel": platform.release(),
            "cpus": len(os.sched_getaffinity(0)),
            "lanes": [[lane.devices, len(lane.cpus)] for lane in self.lanes],
            "groups": self.groups.version,
            "seconds": round(time.monotonic() - self.diagnosis.since_s, 1),
            "agent_cpu": round(self.diagnosis.share(), 4),
            "agent_cpu_keeps_moments": True,
            "left": len(self._todo),
        }
        (self._out / "machine.json").write_text(json.dumps(about, indent=1) + "\n")
        print(json.dumps(about), flush=True)


def _load_once() -> None:
    """Run a victim for a moment: later ones find their libraries in the page cache, and do not wait
    for each other at the disk."""
    command = [sys.executable, "-m", "bench.faults.on_gpu.victims", "train", os.devnull]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            command, check=False, input=b"warm\n", timeout=LOAD_S,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip


def _key(row: dict[str, Any]) -> str:
    return f"{row['fault']}/{row['victim']}/{row['level']}/{row['seed']}"


def _devices() -> list[str]:
    """The GPUs of this machine, by name or device file; none where there is no driver."""
    files = [str(path) for path in sorted(Path("/dev").glob("nvidia[0-9]*"))]
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    except OSError:
        return files
    return done.stdout.strip().splitlines() if done.returncode == 0 else files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run --gpu` that `run` has not."""
    parser.add_argument("--lanes", type=int, default=1, help="trials at once, one to a GPU")
    parser.add_argument("--benign", type=int, default=3, help="trials of each benign change")
    parser.add_argument("--budget", type=float, default=450.0, help="seconds, for all of it")
    parser.add_argument("--done", type=Path, nargs="*", default=[], metavar="TRIALS.jsonl")


def check_only(names: list[str]) -> None:
    """Raises SystemExit for an unknown name."""
    known = [fault.name for fault in (*FAULTS, *BENIGN)]
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"{unknown} are no faults; there are: {', '.join(known)}")
