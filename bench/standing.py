# SPDX-License-Identifier: Apache-2.0
"""What the library costs a loop that it does not time: processes beside twins, block by block.

    python -m bench.standing [--loops eager,graph,decode,train] [--pairs 8] [--seconds 20]
                             [--out FILE] [--stub]

Two processes that run the same loop are two per cent apart or ten, for as long as they live, and
each wanders with the minutes. So the loops of a pair keep to one and the same CPU (their other
threads to it and the next) and take turns of some 10 ms, one at a time on the whole machine; what
counts is how the ratio of touched to twin changes in a pair from before the library was loaded to
each state after it:

    again       nothing was done: what this measurement resolves
    attached    loaded by `sonde attach`'s own code, asked for nothing
    hooked      asked to time one launch a second: each call passes our hook
    timing      as many launches timed a second of work as the default budget has
    quiet       asked for nothing once more
    left        detached

The figure is the mean over the pairs of each pair's median change; its interval is Student's t's
over the pairs, 95 %. Root, PyTorch and an NVIDIA GPU; `--stub`: to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from bench import stub
from bench.device_time import REQUEST, block_s, device
from bench.statistics import interval
from sonde.attach import library, remote
from sonde.collect import inject_abi as abi
from sonde.collect.inject_memory import InjectMemory
from sonde.collect.overhead_controller import FIRST_COST_NS, samples_a_second

PHASES: Final = ("again", "attached", "hooked", "timing", "quiet", "left")
STEPS: Final = {"eager": (8, 24), "graph": (30, 90), "decode": (20, 60), "train": (5, 10)}
"""Of a block: to get warm, and timed. Training has the device's clocks to get warm, too."""
DEFAULT_BUDGET: Final = 0.01


class Worker:
    """A process with the loop, idle until the command to run a block."""

    def __init__(self, loop: str, cpus: Iterable[int]) -> None:
        """`cpus`: where it may run."""
        self.process = subprocess.Popen(
            [
                *("taskset", "-c", ",".join(map(str, cpus))),
                *(sys.executable, "-m", "bench.standing", "--one", loop),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid
        self.memory: InjectMemory | None = None
        self.busy_s = 0.0

    def next_line(self) -> str:
        """Its next line; raises EOFError when it is gone."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"the loop of process {self.pid} ended: {self.process.wait()}")
        return line

    def block(self) -> float:
        """Seconds that a block takes, right after some steps to get warm."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        warm, took = map(float, self.next_line().split())
        self.busy_s += warm + took
        return took

    def load(self) -> None:
        """Attach the library as `sonde attach` does."""
        done = remote.load(self.pid, library.path(), remote.LIBRARY_MEMFD)
        assert done is not None
        deadline = time.monotonic() + 5
        while self.memory is None and time.monotonic() < deadline:
            self.memory = InjectMemory.find(self.pid)
            time.sleep(0.01)
        assert self.memory is not None, "the library made no memory"
        assert self.memory.lock(), "a recorder on this machine has it"

    def end(self) -> int:
        """Let it end; its exit status."""
        assert self.process.stdin
        self.process.stdin.close()
        return self.process.wait(60)


def work(loop: str) -> None:
    """A worker: for each line read, a block."""
    gpu = device()
    step, (warming, steps) = gpu.make_loop(loop), STEPS[loop]
    for _ in range(20):
        block_s(gpu, step, steps)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print("ready", flush=True)
    for _ in sys.stdin:
        warm = block_s(gpu, step, warming)
        print(warm, block_s(gpu, step, steps), flush=True)


def beat(pairs: list[tuple[Worker, Worker]]) -> None:
    """An agent lives, and has read all."""
    for touched, _ in pairs:
        if touched.memory is not None:
            touched.memory.heartbeat()
            touched.memory.ask(tail=touched.memory.seen().counts["head"])


def in_turns(
    pairs: list[tuple[Worker, Worker]], seconds: float, rng: random.Random
) -> list[list[float]]:
    """Logarithms of touched / twin, a list a pair, a value a turn."""
    found: list[list[float]] = [[] for _ in pairs]
    until = time.monotonic() + seconds
    while time.monotonic() < until or not found[-1]:
        for number, pair in enumerate(pairs):
            beat(pairs)
            took = {one: one.block() for one in rng.sample(pair, 2)}
            found[number].append(math.log(took[pair[0]] / took[pair[1]]))
    return found


def enter(phase: str, pairs: list[tuple[Worker, Worker]]) -> None:
    """Bring each touched process into that state."""
    rate = samples_a_second(DEFAULT_BUDGET, FIRST_COST_NS)
    asked = {
        "hooked": {"request": int(REQUEST), "per_second": 1},
        # It keeps to a mean over time, and a process works in one of 2 * len(pairs) blocks only.
        "timing": {
            "request": int(REQUEST),
            "per_second": max(rate // len(pairs) // 2, 1),
        },
        "quiet": {"request": 0},
        "left": {"request": int(abi.Request.LEAVE)},
    }
    for touched, _ in pairs:
        if phase == "attached":
            touched.load()
        elif phase in asked:
            assert touched.memory is not None
            touched.memory.heartbeat()
            touched.memory.ask(**asked[phase])
    for _ in range(5):
        beat(pairs)
        time.sleep(0.2)


def change(before: list[list[float]], after: list[list[float]]) -> dict[str, Any]:
    """Slowdown, %, with its 95 % interval over the pairs."""
    each = [
        100 * math.expm1(statistics.median(b) - statistics.median(a))
        for a, b in zip(before, after, strict=True)
    ]
    low, high = interval(each)
    return {"percent": statistics.mean(each), "low": low, "high": high, "pairs": each}


def measure(
    loop: str, count: int, seconds: float, rng: random.Random, found: dict[str, Any]
) -> None:
    """All states of one loop, into `found` and shown one by one."""
    free = sorted(os.sched_getaffinity(0))
    cpus = [(free[2 * at % len(free) :] or free)[:2] for at in range(count)]
    pairs = [(Worker(loop, where), Worker(loop, where)) for where in cpus]
    for worker in (worker for pair in pairs for worker in pair):
        worker.next_line()
    in_turns(pairs, 1.0, rng)
    before = in_turns(pairs, seconds, rng)
    for phase in PHASES:
        enter(phase, pairs)
        in_turns(pairs, 0.5, rng)
        at = [
            (touched.busy_s, touched.memory.seen().counts["timed"] if touched.memory else 0)
            for touched, _ in pairs
        ]
        after = in_turns(pairs, seconds, rng)
        found[phase] = change(before, after)
        if phase == "again":
            before = [a + b for a, b in zip(before, after, strict=True)]
        timed = busy = 0.0
        for (touched, _), (busy_s, was) in zip(pairs, at, strict=True):
            busy += touched.busy_s - busy_s
            timed += (touched.memory.seen().counts["timed"] if touched.memory else 0) - was
        found[phase]["timed_a_second"] = timed / busy
        found[phase]["log_ratios"] = [[round(value, 5) for value in pair] for pair in after]
        show(loop, phase, found[phase])
    found["exits"] = [worker.end() for pair in pairs for worker in pair]


def show(loop: str, phase: str, of: dict[str, Any]) -> None:
    """A line of the table."""
    print(
        f"{loop:7} {phase:9} {of['percent']:+6.2f} % [{of['low']:+.2f}, {of['high']:+.2f}]"
        f"  {of['timed_a_second']:6.1f} timed a second, {len(of['log_ratios'][0])} turns",
        flush=True,
    )


def main() -> None:
    """Each loop, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m bench.standing", description=__doc__)
    parser.add_argument("--loops", default=",".join(STEPS))
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each state")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("/tmp/standing.json"))
    parser.add_argument("--stub", action="store_true", help="without a GPU, to see that it runs")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        work(args.one)
        return
    out: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "kernel": platform.release(),
        "seed": args.seed,
        "seconds": args.seconds,
    }
    with tempfile.TemporaryDirectory() as folder:
        if args.stub:
            stub.build(Path(folder))
        for loop in args.loops.split(","):
            out[loop] = {}
            try:
                measure(loop, args.pairs, args.seconds, random.Random(args.seed), out[loop])
            finally:
                args.out.write_text(json.dumps(out) + "\n")


if __name__ == "__main__":
    main()
