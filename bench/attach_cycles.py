# SPDX-License-Identifier: Apache-2.0
"""Attach, detach and die beside live PyTorch loops; are they whole, and as fast as before?

    python -m bench.attach_cycles [--modes train,graph,eager,decode] [--cycles 200] [--kills 20]
                                  [--loads 10] [--turns 24] [--out FILE] [--stub]

`--stub`: on a stub of the CUDA driver, without a GPU, to see that it runs.

Loops (training a transformer, replaying a CUDA graph, launching small kernels one by one, decoding
as both and a copy that waits; OpenCL, which needs no GPU) run beside twins that nobody touches,
with the same seeds. What it costs to be there, and what detaching leaves behind: steps of each loop
against its twin, turn by turn, before anything was attached, with the library attached and asked
for nothing, and after all was timed, killed and detached. Each load takes 121 bytes of the loader's
reserve for thread-local data: a process has room for 13. Root.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import stub
from sonde.attach import library, remote
from sonde.collect import inject_abi as abi
from sonde.collect.inject_memory import InjectMemory

LOADS = Path(__file__).with_name("loads")
PROGRAMS = {
    "train": [str(LOADS / "torch_steps.py"), "train"],
    "graph": [str(LOADS / "torch_steps.py"), "graph"],
    "eager": [str(LOADS / "torch_steps.py"), "eager"],
    "decode": [str(LOADS / "torch_steps.py"), "decode"],
    "opencl": [str(LOADS / "opencl_steps.py")],
    "stub": [str(LOADS / "stub_steps.py")],
}


class Loop:
    """A loop at work."""

    def __init__(self, mode: str, cpus: Sequence[int]) -> None:
        """`cpus`: it keeps to these, as its twin does; no two CPUs are equally fast."""
        self.mode = mode
        self.process = subprocess.Popen(
            ["taskset", "-c", ",".join(map(str, cpus)), sys.executable, *PROGRAMS[mode]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid

    def say(self, line: str) -> None:
        """Write one line to its standard input."""
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def next_line(self) -> str:
        """Its next line; '' when it is gone."""
        assert self.process.stdout
        return self.process.stdout.readline()

    def stand(self) -> None:
        """Stop it for a while, so that another has the device."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again."""
        self.process.send_signal(signal.SIGCONT)

    def time(self, seconds: float) -> list[float]:
        """µs a step, block by block."""
        self.say(f"time {seconds}")
        blocks: list[float] = json.loads(self.next_line())
        return blocks


def in_turns(pairs: list[tuple[Loop, Loop]], turns: int, seconds: float) -> dict[str, list[float]]:
    """How long a step of each touched loop takes, as a multiple of that of its untouched twin.

    One turn after the other, each loop alone on the device: what the machine does slowly falls on
    both. By mode, a value a turn.
    """
    loops = [loop for pair in pairs for loop in pair]
    ratios: dict[str, list[float]] = {touched.mode: [] for touched, _ in pairs}
    for loop in loops:
        loop.stand()
    for turn in range(turns):
        for touched, twin in pairs:
            took = {}
            for loop in (touched, twin) if turn % 2 else (twin, touched):
                loop.go_on()
                time.sleep(0.1)
                took[loop] = statistics.median(loop.time(seconds))
                loop.stand()
            ratios[touched.mode].append(took[touched] / took[twin])
    for loop in loops:
        loop.go_on()
    return ratios


def bound(before: list[float], after: list[float], seed: int = 1) -> dict[str, float]:
    """Slowdown, %, with a 95 % interval from 4,000 resamples of the turns."""
    rng = random.Random(seed)
    draws = sorted(
        100 * (statistics.median(rng.choices(after, k=len(after)))
               / statistics.median(rng.choices(before, k=len(before))) - 1)
        for _ in range(4000)
    )  # fmt: skip
    point = 100 * (statistics.median(after) / statistics.median(before) - 1)
    return {"percent": point, "low": draws[100], "high": draws[3899]}


def memory_of(loop: Loop) -> InjectMemory:
    """That of an attached loop."""
    memory = InjectMemory.find(loop.pid)
    assert memory is not None, f"{loop.mode}: no memory"
    return memory


def cycle(memories: list[InjectMemory], row: dict[str, Any]) -> None:
    """All timing at once, then all detached."""
    request = abi.Request.EVENTS | abi.Request.OPENCL | abi.Request.STACKS
    for memory in memories:
        memory.ask(request=request, per_second=200)
        memory.heartbeat()
    for memory in memories:
        deadline = time.monotonic() + 2
        while memory.seen().status != abi.Status.TIMING and time.monotonic() < deadline:
            memory.heartbeat()
            time.sleep(0.01)
        row["timing"] += memory.seen().status == abi.Status.TIMING
    time.sleep(random.uniform(0, 0.03))
    for memory in memories:
        memory.ask(request=abi.Request.LEAVE)
    for memory in memories:
        row["left"] += memory.wait_for(abi.Status.LEFT, timeout_s=2).status == abi.Status.LEFT


def kill_recorders(
    loops: list[Loop], memories: list[InjectMemory], kills: int, folder: Path
) -> dict[str, Any]:
    """Record each loop, kill -9 the recorder while it has launches timed, again.

    Seconds from each kill until the library was idle, and until the recorder was gone.
    """
    idle_s: list[float] = []
    gone_s: list[float] = []
    timing = 0
    for memory in memories:
        memory.ask(request=0)  # what was detached by hand is left alone by recorders
    for turn in range(kills):
        record = [sys.executable, "-m", "sonde", "record", "-f", "-o"]
        recorders = [
            subprocess.Popen(
                [*record, str(folder / f"{loop.mode}-{turn}.sonde"), "-p", str(loop.pid)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for loop in loops
        ]
        for recorder in recorders:
            assert recorder.stderr
            reported = recorder.stderr.readline()
            while reported.startswith("sonde: starting"):
                reported = recorder.stderr.readline()
            assert reported.startswith("sonde: recording"), reported
        time.sleep(random.uniform(0.2, 1.0))
        for memory in memories:
            timing += memory.wait_for(abi.Status.TIMING, timeout_s=5).status == abi.Status.TIMING
        for recorder in recorders:
            recorder.kill()
        killed = time.monotonic()
        for memory in memories:
            if memory.wait_for(abi.Status.IDLE, timeout_s=5).status == abi.Status.IDLE:
                idle_s.append(time.monotonic() - killed)
        for recorder in recorders:
            recorder.wait()
            gone_s.append(time.monotonic() - killed)
    return {"killed_while_timing": timing, "idle_s": idle_s, "gone_s": gone_s}


def main() -> None:
    """Run it all; a short table, the rest to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--loads", type=int, default=10)
    parser.add_argument("--modes", default="train,graph,eager,decode", help="or opencl, stub")
    parser.add_argument("--turns", type=int, default=24, help="of each loop, each time")
    parser.add_argument("--time", type=float, default=0.35, help="seconds a turn")
    parser.add_argument("--out", type=Path, default=Path("/tmp/attach_cycles.json"))
    parser.add_argument("--stub", action="store_true", help="without a GPU: --modes stub")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.stub:
            args.modes = "stub"
            stub.build(Path(folder))
        run(args)


def run(args: argparse.Namespace) -> None:
    """Every part of it."""
    random.seed(1)
    began = time.monotonic()
    out: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "kernel": platform.release()}
    modes: list[str] = args.modes.split(",")
    free = sorted(os.sched_getaffinity(0))
    some = {mode: (free[2 * at :] or free)[:2] for at, mode in enumerate(modes)}
    touched, others = ([Loop(mode, some[mode]) for mode in modes] for _ in range(2))
    loops = touched + others
    for loop in loops:
        assert loop.next_line() == "ready\n"
    time.sleep(2)
    pairs = list(zip(touched, others, strict=True))
    before = in_turns(pairs, args.turns, args.time)
    note(began, "before is timed")

    file = library.path()
    stops: dict[str, list[float]] = {mode: [] for mode in modes}
    calls: dict[str, int] = {}
    for number in range(args.loads):
        for loop in touched:
            name = remote.LIBRARY_MEMFD if number == 0 else f"again-{number}"
            done = remote.load(loop.pid, file, name)
            assert done is not None
            stops[loop.mode].append(done.stop_us)
            calls[done.call] = calls.get(done.call, 0) + 1
    out["stops_us"], out["calls"] = stops, calls
    note(began, f"loaded {args.loads} times each")

    attached = in_turns(pairs, args.turns, args.time)
    out["standing"] = {mode: bound(before[mode], attached[mode]) for mode in modes}
    note(began, f"attached is timed: {out['standing']}")

    memories = [memory_of(loop) for loop in touched]
    row: dict[str, Any] = {"timing": 0, "left": 0}
    for _ in range(args.cycles):
        cycle(memories, row)
    out["cycles"] = {"each": args.cycles, **row}
    args.out.write_text(json.dumps(out, indent=1) + "\n")
    out["counts"] = {
        m.mode: memory.seen().counts for m, memory in zip(touched, memories, strict=True)
    }
    note(began, f"cycles: {row}")

    with tempfile.TemporaryDirectory() as folder:
        out["kills"] = killed = kill_recorders(touched, memories, args.kills, Path(folder))
    idle = killed["idle_s"]
    note(began, f"kills while timing: {killed['killed_while_timing']}, idle after: {len(idle)}")
    for memory in memories:
        memory.ask(request=abi.Request.LEAVE)
        memory.wait_for(abi.Status.LEFT, timeout_s=2)
    after = in_turns(pairs, args.turns, args.time)
    out["after_detach"] = {mode: bound(before[mode], after[mode]) for mode in modes}
    out["ratios"] = {"before": before, "attached": attached, "after": after}
    note(began, f"after is timed: {out['after_detach']}")
    args.out.write_text(json.dumps(out, indent=1) + "\n")

    for loop in touched:
        loop.say("end")
    ends = {loop.mode: json.loads(loop.next_line() or "{}") for loop in touched}
    for loop in others:
        loop.say(f"until {ends[loop.mode].get('steps', 0)}")
    same = {}
    for loop in others:
        reference, found = json.loads(loop.next_line() or "{}")["hashes"], ends[loop.mode]["hashes"]
        both = min(len(reference), len(found))
        same[loop.mode] = {
            "steps": ends[loop.mode]["steps"],
            "compared": both,
            "equal": sum(a == b for a, b in zip(reference, found, strict=False)),
        }
    out["identical"] = same
    out["exits"] = [loop.process.wait(30) for loop in loops]
    note(began, "ended")
    args.out.write_text(json.dumps(out, indent=1) + "\n")
    print(json.dumps({k: v for k, v in out.items() if k in SHOWN}, indent=1))
    for mode in modes:
        ordered = sorted(stops[mode])
        print(f"{mode}: stops µs p50 {ordered[len(ordered) // 2]:.0f} max {ordered[-1]:.0f}")
    print(f"idle after kill -9: max {max(idle, default=0):.2f} s, recorder gone after "
          f"{max(killed['gone_s'], default=0):.2f} s")  # fmt: skip


SHOWN = ("calls", "cycles", "standing", "after_detach", "identical", "exits")


def note(began: float, text: str) -> None:
    """How far it is, and when."""
    print(f"[{time.monotonic() - began:6.1f} s, pid {os.getpid()}] {text}", flush=True)


if __name__ == "__main__":
    main()
