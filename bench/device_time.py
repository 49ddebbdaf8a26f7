# SPDX-License-Identifier: Apache-2.0
"""What timing device work costs a program, and how true it is. Needs PyTorch and an NVIDIA GPU.

    python -m bench.device_time [--library FILE] [--blocks 200] [--seed 1] [--out DIR] [--stub]

`--stub`: on a stub of the driver, without a GPU, to see that it runs; its figures mean nothing.

Cost: four loops (launch-bound, replay of a CUDA graph, decode, transformer training). One process
each; blocks of steps with timing on and off in random order inside it, paired by neighbours, and
blocks before the library was loaded for the standing cost. The slowdown is the median of the
ratios of pairs, its interval by 1,000 bootstraps; the resolution is what off against off shows.
Beside it, in separate processes: torch.profiler over the same blocks, and the same loop after.

Truth: with CUPTI (torch.profiler) each kernel of the loop is traced once, and means per kernel are
compared; the trace is written for `coverage.py`, which draws from it as the library draws.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from bench import stub
from sonde.attach import library as library_file
from sonde.collect import inject_abi as abi
from sonde.collect.inject_memory import InjectMemory
from sonde.collect.overhead_controller import FIRST_COST_NS, samples_a_second

LOOPS = {"eager": 24, "graph": 150, "decode": 120, "train": 2}
"""Steps a block: some 15 to 25 ms each."""
REQUEST = abi.Request.EVENTS | abi.Request.STACKS
BUDGETS = {"1 %": 0.01, "0.3 %": 0.003, "3 %": 0.03}


class Device(Protocol):
    """What loops run on."""

    def make_loop(self, name: str) -> Callable[[], None]:
        """One step of a loop."""

    def synchronize(self) -> None:
        """Wait for all that was launched."""

    def trace(self, run: Callable[[], None]) -> list[tuple[str, int]]:
        """(name, ns) of each kernel that `run` launches, in order."""


class Cuda:
    """A GPU, by PyTorch."""

    def make_loop(self, name: str) -> Callable[[], None]:
        """One step of a loop."""
        return make_loop(name)

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        import torch

        torch.cuda.synchronize()

    def trace(self, run: Callable[[], None]) -> list[tuple[str, int]]:
        """(name, ns) of each kernel that `run` launches, in order, by torch.profiler."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as traced:
            run()
        cuda = torch.autograd.DeviceType.CUDA
        events = sorted(
            (e.start_ns(), e.name(), e.duration_ns())
            for e in traced.profiler.kineto_results.events()
            if e.device_type() == cuda
        )
        return [(name, ns) for _, name, ns in events]


def device() -> Device:
    """The GPU, or its stub where one was built."""
    return stub.StubDevice() if stub.FOLDER in os.environ else Cuda()


def make_loop(name: str) -> Callable[[], None]:
    """One step of a loop, on the GPU."""
    import torch

    torch.manual_seed(7)
    x = torch.zeros(256, dtype=torch.int64, device="cuda")
    y = torch.rand(256, device="cuda")

    def ops() -> None:
        for _ in range(25):
            x.add_(1)
            y.mul_(0.999)
            y.add_(0.001)
            x.add_(2)

    if name == "eager":
        return ops
    if name == "train":
        layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).cuda().bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        batch = torch.rand(16, 512, 1024, device="cuda").bfloat16()

        def train() -> None:
            optimizer.zero_grad()
            model(batch).float().square().mean().backward()
            optimizer.step()

        return train
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        ops()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops()
    if name == "graph":
        return lambda: graph.replay()

    def decode() -> None:
        graph.replay()
        for _ in range(5):
            y.add_(0.001)
        torch.cuda.synchronize()

    return decode


def block_s(on: Device, step: Callable[[], None], steps: int) -> float:
    """Seconds that a block takes, its device work included."""
    on.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    on.synchronize()
    return time.perf_counter() - began


def ratio(pairs: list[tuple[float, float]], rng: random.Random) -> dict[str, float]:
    """Slowdown in percent of the first of each pair against the second, with a 95 % interval."""
    logs = [a / b - 1 for a, b in pairs]
    boots = sorted(statistics.median(rng.choices(logs, k=len(logs))) for _ in range(1000))
    return {
        "percent": 100 * statistics.median(logs),
        "low": 100 * boots[24],
        "high": 100 * boots[974],
        "pairs": len(pairs),
    }


def beat(path: str) -> None:
    """The agent's heartbeat, from a separate process."""
    memory = os.open(path, os.O_RDWR)
    while os.getppid() > 1:
        os.pwrite(memory, time.monotonic_ns().to_bytes(8, "little"), abi.CONTROL_AT)
        time.sleep(0.2)


def measure(name: str, library: str, blocks: int, seed: int) -> dict[str, Any]:
    """Everything about one loop, in this process."""
    rng = random.Random(seed)
    gpu = device()
    step, steps = gpu.make_loop(name), LOOPS[name]
    for _ in range(20):
        block_s(gpu, step, steps)
    before = [block_s(gpu, step, steps) for _ in range(blocks)]
    ctypes.CDLL(library)
    memory = InjectMemory.find(os.getpid())
    assert memory is not None, "the library made no memory"
    pulse = subprocess.Popen(
        [sys.executable, "-m", "bench.device_time", "--beat", f"/proc/{os.getpid()}/fd/{memory.fd}"]
    )
    time.sleep(0.5)
    idle = [block_s(gpu, step, steps) for _ in range(blocks)]
    result: dict[str, Any] = {"step_us": 1e6 * statistics.median(before) / steps}
    try:
        memory.ask(request=int(REQUEST), per_second=100)
        time.sleep(0.5)
        for _ in range(20):
            block_s(gpu, step, steps)
        time.sleep(1.0)
        off_off: list[tuple[float, float]] = []
        for label, budget in BUDGETS.items():
            pairs = []
            seen = memory.seen().counts
            wanted = per_second = float(samples_a_second(budget, FIRST_COST_NS))
            rates: list[float] = []
            last, spent = seen, 0.0
            for number in range(blocks if label == "1 %" else blocks // 2):
                took = {}
                for on in rng.sample([True, False], 2):
                    memory.ask(request=int(REQUEST) if on else 0, per_second=round(per_second))
                    block_s(gpu, step, max(steps // 4, 1))
                    time.sleep(0.035)
                    took[on] = block_s(gpu, step, steps)
                pairs.append((took[True], took[False]))
                spent += 1.25 * took[True]
                if number % 2:
                    off_off.append((took[False], pairs[-2][1]))
                now = memory.seen().counts
                memory.ask(tail=now["head"])
                if number % 10 == 9:
                    # The library keeps to a mean over time, and these blocks have pauses between
                    # them: so less is asked for until as many are timed in them as wanted.
                    rates.append((now["timed"] - last["timed"]) / spent)
                    per_second = min(max(per_second * wanted / max(rates[-1], 1), 1), wanted)
                    last, spent = now, 0.0
            now = memory.seen().counts
            result[label] = {
                **ratio(pairs, rng),
                "wanted_a_second": wanted,
                "timed_a_second": statistics.mean(rates[1:] or rates or [0.0]),
                "host_ns_each": (now["host_ns"] - seen["host_ns"])
                / max(now["timed"] - seen["timed"], 1),
            }
        memory.ask(request=0)
        time.sleep(0.1)
        after = [block_s(gpu, step, steps) for _ in range(blocks)]
        result["off against off"] = ratio(off_off, rng)
        result["attached, idle"] = spread(idle, before, rng)
        result["after, idle"] = spread(after, before, rng)
        result["state"] = memory.seen().counts
        result["truth"] = truth(gpu, step, steps, memory, name)
    finally:
        pulse.kill()
    gpu.synchronize()
    return result


def spread(now: list[float], before: list[float], rng: random.Random) -> dict[str, float]:
    """As `ratio`, of two stretches of blocks one after the other."""
    boots = sorted(
        statistics.median(rng.choices(now, k=len(now)))
        / statistics.median(rng.choices(before, k=len(before)))
        - 1
        for _ in range(1000)
    )
    percent = 100 * (statistics.median(now) / statistics.median(before) - 1)
    return {"percent": percent, "low": 100 * boots[24], "high": 100 * boots[974]}


def truth(
    gpu: Device, step: Callable[[], None], steps: int, memory: InjectMemory, loop: str
) -> list[dict[str, Any]]:
    """Mean of each kernel by our events, and by CUPTI right after."""
    from sonde.collect.inject_records import Ring

    ring = Ring(memory.fd, memory.seen().counts["head"])
    memory.ask(tail=ring.tail, request=int(REQUEST), per_second=2000)
    ours: dict[str, list[int]] = {}
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        block_s(gpu, step, steps)
        for run in ring.take(memory.seen().counts["head"], time.monotonic_ns()).runs:
            ours.setdefault(alike(run.name or "(graph)"), []).append(run.end_ns - run.start_ns)
        memory.ask(tail=ring.tail)
    memory.ask(request=0)

    def once() -> None:
        block_s(gpu, step, steps if loop != "train" else 6)

    trace = gpu.trace(once)
    Path(os.environ.get("OUT", "."), f"trace-{loop}.json").write_text(json.dumps(trace))
    theirs: dict[str, list[int]] = {}
    for name, ns in trace:
        theirs.setdefault(alike(name), []).append(ns)
    return [
        {
            "name": name[:80],
            "cupti_ns": statistics.mean(theirs[name]),
            "cupti": len(theirs[name]),
            "event_ns": statistics.mean(ours[name]),
            "event": len(ours[name]),
        }
        for name in sorted(theirs, key=lambda n: -sum(theirs[n]))
        if name in ours
    ]


def alike(name: str) -> str:
    """A kernel's name as every demangler has it."""
    return re.sub(r"\(unsigned long\)(\d+)", r"\1ul", name).replace(" ", "")


def measure_peer(name: str, blocks: int, seed: int) -> dict[str, Any]:
    """torch.profiler (CUPTI, kernels and runtime) over blocks, and the loop before and after it."""
    rng = random.Random(seed)
    gpu = device()
    step, steps = gpu.make_loop(name), LOOPS[name]
    for _ in range(20):
        block_s(gpu, step, steps)
    before = [block_s(gpu, step, steps) for _ in range(blocks)]
    on: list[float] = []

    def traced() -> None:
        on.extend(block_s(gpu, step, steps) for _ in range(max(blocks // 8, 10)))

    gpu.trace(traced)
    after = [block_s(gpu, step, steps) for _ in range(blocks)]
    return {"on": spread(on, before, rng), "after": spread(after, before, rng)}


def show(results: dict[str, dict[str, Any]]) -> None:
    """The table."""

    def cell(of: dict[str, float]) -> str:
        return f"{of['percent']:+6.2f} [{of['low']:+.2f}, {of['high']:+.2f}]"

    rows = (*BUDGETS, "off against off", "attached, idle", "after, idle")
    for name, result in results.items():
        print(f"{name}: {result['step_us']:.1f} us a step")
        for row in rows:
            more = result[row]
            rate = f"  {more['timed_a_second']:.0f}/s" if "timed_a_second" in more else ""
            print(f"  {row:18} {cell(more)} %{rate}")
        for row, of in result["torch.profiler"].items():
            print(f"  torch.profiler {row:5} {cell(of)} %")
        for one in result["truth"][:5]:
            print(f"    {one['name'][:60]:60} CUPTI {one['cupti_ns']:9.0f} ns (n {one['cupti']}) "
                  f"events {one['event_ns']:9.0f} ns (n {one['event']})")  # fmt: skip


def main() -> int:
    """Run each loop in a separate process."""
    parser = argparse.ArgumentParser(prog="python -m bench.device_time", description=__doc__)
    parser.add_argument("--library", help="default: the built one")
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--loops", default=",".join(LOOPS))
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--stub", action="store_true", help="without a GPU")
    parser.add_argument("--beat", help=argparse.SUPPRESS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.beat:
        beat(args.beat)
        return 0
    if args.one:
        print(json.dumps(measure(args.one, args.library, args.blocks, args.seed)))
        return 0
    if args.peer:
        print(json.dumps(measure_peer(args.peer, args.blocks // 2, args.seed)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        if args.stub:
            stub.build(Path(folder))
        return run_all(args)


def run_all(args: argparse.Namespace) -> int:
    """Each loop in a separate process, and its peer; the table."""
    results: dict[str, dict[str, Any]] = {}
    os.environ["OUT"] = args.out
    library = args.library or str(library_file.path())
    again = [sys.executable, "-m", "bench.device_time", "--library", library]
    again += ["--blocks", str(args.blocks), "--seed", str(args.seed)]
    for name in args.loops.split(","):
        found = [
            subprocess.run([*again, flag, name], check=True, stdout=subprocess.PIPE, text=True)
            for flag in ("--one", "--peer")
        ]
        one, peer = (json.loads(ran.stdout.splitlines()[-1]) for ran in found)
        results[name] = {**one, "torch.profiler": peer}
        Path(args.out, "device_time.json").write_text(json.dumps(results, indent=1))
        show({name: results[name]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
