# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.explain OUT --own --seeds 1`: verdicts from what Sonde records by itself.

The same programs without a profiler: `sonde record --device-time -p PID` on the running process,
with the budget that is its default and, if asked to, with one that lets it time whatever it can.
The truth is the program's own: its step with and without the cause, while nobody watches. After
the recording torch.profiler traces all of the same process while it goes on with the same steps
(not at once: Sonde stands back while another profiler traces), with stacks, beside a recorder of
the machine's waits, because a device's trace has neither locks nor quotas. About 30 s a program.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import mmap
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.explain import harness, kept
from bench.explain.own_score import OwnScore, rows_of, score, table

BATCH = 6
"""Programs that warm up together; they are recorded one after another."""
FREE_S = 0.7
RECORDED_S = 12.0
"""The library is in the process after 2 s, and what it times may wait 3 s in the device's queue."""
TRACED_S = 0.3
"""At least so long, for a queue to fill as it does in a long run."""
WATCHING_S = 1.5
"""Until a recorder watches."""
LIMIT_S = 60.0
RECORDINGS = {"default": "", "all": "0.5"}
"""What `device_budget` is in each; '' for what it is by default."""


def record_all(args: argparse.Namespace) -> int:
    """All programs asked for; the command's arguments. Exit code 1 where a run gave no result."""
    from bench.explain.every_program import KINDS

    began = time.monotonic()
    wanted = [(kind, seed) for seed in args.seeds for kind in args.kinds or KINDS]
    recordings = RECORDINGS if args.timed_all else {"default": RECORDINGS["default"]}
    scores: list[OwnScore] = []
    failed = []
    for first in range(0, len(wanted), BATCH):
        if time.monotonic() - began > args.budget:
            print(f"budget spent: {len(wanted) - first} runs left out", flush=True)
            break
        with contextlib.ExitStack() as stack:
            programs = []
            for kind, seed in wanted[first : first + BATCH]:
                folder = args.scratch / f"{kind}-{seed}"
                folder.mkdir(parents=True, exist_ok=True)
                disturber = stack.enter_context(harness.disturbing(KINDS[kind].disturber))
                programs.append(Program(kind, seed, folder, disturber))
                stack.callback(programs[-1].close)
            for program in programs:
                if time.monotonic() - began > args.budget:
                    failed.append(f"{program.kind}-{program.seed}: budget spent")
                    continue
                try:
                    watch(program, recordings)
                    made = [score(program.folder, name) for name in recordings]
                    scores += made
                    print("\n".join(rows_of(made)), flush=True)
                except Exception as error:
                    text = f"{program.kind}-{program.seed}: {traceback.format_exc(limit=-2)}"
                    failed.append(text[-500:])
                    print(f"no run: {program.kind}-{program.seed}: {error!r}"[:300], flush=True)
                program.close()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = [dataclasses.asdict(one) for one in scores]
    (args.out / "own.json").write_text(json.dumps(rows, indent=1))
    print(table(scores))
    for text in failed:
        print(f"no run: {text}")
    if args.keep:
        folders = [args.scratch / f"{kind}-{seed}" for kind, seed in wanted]
        for folder in folders:
            if (folder / "truth.json").exists():
                kept.shrink(folder)
        kept.pack((folder for folder in folders if folder.exists()), args.keep, "own")
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if failed else 0


def watch(program: Program, recordings: Mapping[str, str]) -> None:
    """One program: alone, recorded, traced, alone without its cause; leaves its truth, captures
    and trace."""
    phases: dict[str, Any] = {}
    disturber = program.disturber

    def run(name: str, command: bytes, meanwhile: Callable[[], bool]) -> None:
        """`command` in the program while `meanwhile` returns true."""
        program.send(command)
        if command != b"f":
            disturber.start(program.pid)
        until = time.monotonic() + LIMIT_S
        while meanwhile() and time.monotonic() < until:
            disturber.tick(program.pid)
        disturber.stop(program.pid)
        program.end_phase()
        phases[name] = json.loads((program.folder / "phase.json").read_text())

    def seconds(length: float) -> Callable[[], bool]:
        until = time.monotonic() + length
        return lambda: time.monotonic() < until

    def running(process: subprocess.Popen[bytes]) -> Callable[[], bool]:
        return lambda: process.poll() is None

    program.wait(LIMIT_S)
    run("free", b"n", seconds(FREE_S))
    for name, budget in recordings.items():
        recorder = _record(program.pid, budget, program.folder / f"{name}.sonde")
        try:
            run(name, b"n", running(recorder))
        finally:
            harness.finish(recorder)
    with contextlib.ExitStack() as stack:
        settings = {"SONDE_WAIT_SPAN_MS": "0.1", "SONDE_TICK_S": "0.1"}
        watcher = harness.record(program.folder / "waits.sonde", settings, "--no-device")
        stack.callback(harness.finish, watcher)
        stack.callback(watcher.send_signal, signal.SIGINT)
        time.sleep(WATCHING_S)
        run("traced", b"t", lambda: not program.answered())
    run("off", b"f", seconds(FREE_S))
    known = {"kind": program.kind, "seed": program.seed, "pid": program.pid, "phases": phases}
    (program.folder / "truth.json").write_text(json.dumps(known))


def _record(pid: int, budget: str, capture: Path) -> subprocess.Popen[bytes]:
    settings = {"SONDE_DEVICE_BUDGET": budget} if budget else {}
    options = ("--device-time", "-p", str(pid), "-d", str(RECORDED_S))
    return harness.record(capture, settings, *options)


class Program:
    """A forked process with one program, which runs a phase until a command ends the phase."""

    def __init__(self, kind: str, seed: int, folder: Path, disturber: harness.Disturber) -> None:
        self.kind, self.seed, self.folder, self.disturber = kind, seed, folder, disturber
        self._end = mmap.mmap(-1, 4096)
        from_parent, self._outward = os.pipe()
        self._inward, to_parent = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            code = 0
            try:
                _serve(kind, seed, folder, from_parent, to_parent, self._end)
            except BaseException:
                traceback.print_exc()
                code = 1
            os._exit(code)
        os.close(from_parent)
        os.close(to_parent)
        os.set_blocking(self._inward, False)

    def send(self, command: bytes) -> None:
        """Begin a phase."""
        self._end[0] = 0
        os.write(self._outward, command)

    def end_phase(self) -> None:
        """End it, and wait until it has. Raises RuntimeError if the program died or hangs."""
        self._end[0] = 1
        self.wait(LIMIT_S)

    def wait(self, limit_s: float) -> None:
        """Wait for the program's word. Raises RuntimeError without one."""
        until = time.monotonic() + limit_s
        while not self.answered():
            if time.monotonic() > until:
                raise RuntimeError("the program takes too long")
            time.sleep(0.001)

    def answered(self) -> bool:
        """Whether there is a word of the program's. Raises RuntimeError if it died."""
        try:
            if not os.read(self._inward, 1):
                raise RuntimeError("the program died")
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Kill it, unless that was done."""
        if not self.pid:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)
        self.pid = 0
        os.close(self._inward)
        os.close(self._outward)


def enough(stamps: list[int], steps: int) -> bool:
    """Whether a trace holds the steps that it is to hold: as many as in `harness`, and longer."""
    done, took_s = len(stamps) - 1, (stamps[-1] - stamps[0]) / 1e9
    whole = done >= steps and took_s >= TRACED_S
    return done >= harness.LEAST_STEPS and (whole or took_s >= harness.TRACED_S)


def _serve(kind: str, seed: int, folder: Path, inward: int, outward: int, end: mmap.mmap) -> None:
    """The program: phases 'n' with its cause, 't' the same traced, 'f' without."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    os.environ.update(harness.SETTINGS)
    from bench.explain.every_program import built

    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, set(harness.CORES) & os.sched_getaffinity(0))
    with built(kind, seed) as work:
        for step in (work.on, work.off or work.on):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        os.write(outward, b"r")
        while command := os.read(inward, 1):
            step = (work.off or work.on) if command == b"f" else work.on
            (work.before_off if command == b"f" else work.before_on)()
            with contextlib.ExitStack() as stack:
                if command == b"t":
                    with profile(activities=activities, with_stack=True):  # sets up the tracer
                        step()
                        torch.cuda.synchronize()
                    tracer = stack.enter_context(profile(activities=activities, with_stack=True))
                stamps = [time.monotonic_ns()]
                while not (enough(stamps, work.steps) if command == b"t" else end[0]):
                    step()
                    stamps.append(time.monotonic_ns())
                torch.cuda.synchronize()
                took_s = (time.monotonic_ns() - stamps[0]) / 1e9
            if command == b"t":
                os.write(outward, b"m")  # what comes now is no part of the measurement
                tracer.export_chrome_trace(str(folder / "trace.json"))
            work.before_off()
            known = {"step_s": took_s / max(1, len(stamps) - 1), "steps": len(stamps) - 1}
            known["begin_ns"], known["end_ns"] = stamps[0], stamps[-1]
            (folder / "phase.json").write_text(json.dumps(known))
            os.write(outward, b"d")
