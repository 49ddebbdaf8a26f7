# SPDX-License-Identifier: Apache-2.0
"""Traces of running PyTorch loops: are they true, what do they cost, what do they leave behind?

    python -m bench.trace_cost [--modes eager,graph,decode,train] [--repeats 20] [--seconds 1]
                           [--fresh 15] [--command eager,graph,decode,train] [--prices 0]
                           [--out FILE]

For each loop: steps a second before, attached, in the first trace, after it, and after many;
kernels, copies and sets a step by a trace and by torch.profiler right after, in the same process;
and, in the end, whether what was computed equals, bit by bit, what a twin computes that nobody
touched.
Root, a GPU.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from sonde.analyze.trace_price import Slowdown
from sonde.attach import cupti_builds, remote
from sonde.cli import trace_price
from sonde.collect import tracing
from sonde.collect.inject_memory import InjectMemory
from sonde.errors import SondeError
from sonde.model.device_trace import CALL_KINDS, DeviceTrace, Kind
from sonde.readers import device_trace

PROGRAM = Path(__file__).with_name("loads") / "traced_steps.py"
PROFILED_S = {"graph": 0.3, "decode": 0.3}


class Loop:
    """A loop at work."""

    def __init__(self, mode: str) -> None:
        self.begin(mode)
        self.receive()

    def begin(self, mode: str) -> None:
        """Start it; it is ready when its first answer is received."""
        self.mode = mode
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), mode],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def receive(self) -> Any:
        """Its next answer. Raises RuntimeError where it ended."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.mode} ended: {self.process.wait()}")
        return json.loads(line)

    def ask(self, line: str) -> Any:
        """Its answer to a line."""
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.receive()

    def rate(self, seconds: float) -> float:
        """Steps a second, from now on."""
        steps, began_ns = self.ask("steps")
        time.sleep(seconds)
        steps_then, ended_ns = self.ask("steps")
        rate: float = (steps_then - steps) / (ended_ns - began_ns) * 1e9
        return round(rate, 2)


def memory_of(pid: int) -> InjectMemory:
    """That of the library, which is loaded if it is not there."""
    if (memory := InjectMemory.find(pid)) is None:
        remote.load_injected_library(pid)
        until = time.monotonic() + 3
        while (memory := InjectMemory.find(pid)) is None and time.monotonic() < until:
            time.sleep(0.02)
    assert memory is not None, "the library made no memory"
    return memory


def whole_steps(trace: DeviceTrace, begins: list[int]) -> dict[str, float]:
    """What was launched between the first and the last begin of a step in a trace, by step."""
    calls = trace.of(*CALL_KINDS)
    within = calls[(calls["start_ns"] >= begins[0]) & (calls["start_ns"] < begins[1])]
    runs = trace.of(Kind.KERNEL, Kind.COPY, Kind.SET)
    # Some launch by calls of the driver that are not recorded; ids count calls of both.
    first, last = within["correlation"][[0, -1]] if len(within) else (1, 0)
    runs = runs[(runs["correlation"] >= first) & (runs["correlation"] <= last)]
    found: dict[str, float] = {"whole_steps": begins[2]}
    steps = max(1, begins[2])
    for name, kind in (("kernels", Kind.KERNEL), ("copies", Kind.COPY), ("sets", Kind.SET)):
        found[f"{name}_a_step"] = round(int((runs["kind"] == kind).sum()) / steps, 4)
    length = (runs["end_ns"] - runs["start_ns"]).astype(np.int64)
    return found | {
        "device_ns_a_step": round(int(length.sum()) / steps),
        "beyond_1_ms": int((length > 1_000_000).sum()),
    }


def counts(loop: Loop, trace: DeviceTrace) -> dict[str, Any]:
    """What a trace holds, and a step of it."""
    steps = loop.ask(f"between {trace.start_ns} {trace.end_ns}")
    begins = loop.ask(f"begins {trace.start_ns} {trace.end_ns}")
    whole = whole_steps(trace, begins)
    device = trace.of(Kind.KERNEL, Kind.COPY, Kind.SET)
    calls = trace.of(*CALL_KINDS)
    kernels = trace.of(Kind.KERNEL)
    runtime = set(trace.of(Kind.RUNTIME)["correlation"].tolist())
    driver = set(trace.of(Kind.DRIVER)["correlation"].tolist())
    seconds = (trace.end_ns - trace.start_ns) / 1e9
    names = {trace.names.get(int(n), "?"): int(c) for n, c in
             zip(*np.unique(calls["name"], return_counts=True), strict=True)}  # fmt: skip
    return {
        "steps": round(steps, 2),
        "rate": round(steps / seconds, 2),
        "kernels": trace.count(Kind.KERNEL),
        **whole,
        "in_graphs": int(np.count_nonzero(kernels["graph"])),
        "kernel_names": len(set(kernels["name"].tolist())),
        "calls": names,
        "correlations_in_runtime_and_driver": len(runtime & driver),
        "kernels_of_runtime": int(np.isin(kernels["correlation"], list(runtime)).sum()),
        "kernels_of_driver": int(np.isin(kernels["correlation"], list(driver)).sum()),
        "longest_ns": int((device["end_ns"] - device["start_ns"]).max(initial=0)),
        "tids": len(set(calls["tid"].tolist())),
        "clock_error_ns": trace.clock_error_ns,
        "cut": trace.is_cut,
        "lost": dict(trace.lost),
    }


def take(tracer: tracing.Tracer, seconds: float) -> tuple[DeviceTrace, dict[str, int]]:
    """One trace, and the library's head of it."""
    raw = tracer.take(seconds)
    offset = time.time_ns() - time.monotonic_ns()
    return device_trace.read(raw, tracer.pid, offset), dict(raw.head)


def stated(tracer: tracing.Tracer) -> dict[str, Any]:
    """The price as `sonde trace` states it, %: at most, by its table, and by its trial."""
    build = cupti_builds.require(tracer.pid)
    rates = tracer.rates()
    during, after = (
        100 * price.share(rates.launches, rates.replays) for price in (build.during, build.after)
    )
    price = trace_price.measured(tracer, rates, tracer.take)
    return {
        "launches": round(rates.launches, 1),
        "replays": round(rates.replays, 1),
        "during": round(during, 2),
        "after": round(after, 2),
        "trial": {"during": _percents(price.during), "after": _percents(price.after)},
    }


def _percents(one: Slowdown | None) -> list[float] | None:
    return None if one is None else [round(100 * one.share, 2), round(100 * one.half_width, 2)]


def trial(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """All of one loop."""
    row: dict[str, Any] = {"mode": mode}
    signal.alarm(args.limit_s)
    loop = Loop(mode)
    try:
        row["before"] = [loop.rate(args.rate_s) for _ in range(2)]
        began = time.monotonic()
        with memory_of(loop.process.pid) as memory:
            with tracing.Tracer(loop.process.pid, memory) as tracer:
                tracer.prepare()
                row["prepared_s"] = round(time.monotonic() - began, 2)
                row["attached"] = [loop.rate(args.rate_s) for _ in range(2)]
                row["stated"] = stated(tracer)
                trace, head = take(tracer, args.seconds)
                row["trace"] = counts(loop, trace) | {"head": head}
                row["after_one"] = [loop.rate(args.rate_s) for _ in range(2)]
                row["traces"] = []
                for _ in range(args.repeats):
                    one, _ = take(tracer, args.repeat_s)
                    short = counts(loop, one)
                    keep = (
                        "rate",
                        "kernels_a_step",
                        "device_ns_a_step",
                        "longest_ns",
                        "lost",
                        "whole_steps",
                        "beyond_1_ms",
                    )
                    row["traces"].append({key: short[key] for key in keep})
                row["after_all"] = [loop.rate(args.rate_s) for _ in range(2)]
                row["digest"] = loop.ask("digest 0")
                seconds = PROFILED_S.get(mode, 1.0)
                row["profiler"] = loop.ask(f"profile {seconds}")
                row["after_profiler"] = loop.rate(args.rate_s)
                time.sleep(0.8)
                trace, head = take(tracer, args.repeat_s)
                row["trace_after_profiler"] = counts(loop, trace) | {"head": head}
                row["profiler_again"] = loop.ask(f"profile {seconds}")
            time.sleep(0.5)
            row["left"] = loop.rate(args.rate_s)
        steps, _ = loop.ask("steps")
        row["result"] = loop.ask(f"state {steps + 100}")
        row["exit"] = loop.process.wait(20)
        if args.no_twin:
            row["identical"] = None
            return row
        compare(row, loop)
    except (SondeError, RuntimeError, subprocess.TimeoutExpired, AssertionError) as error:
        row["error"] = repr(error)
        row["exit"] = loop.process.poll()
        dump = [sys.executable, "-m", "sonde", "dump", str(loop.process.pid)]
        row["dump"] = subprocess.run(dump, capture_output=True, text=True, timeout=30).stdout
        loop.process.kill()
        if (
            "digest" in row and "identical" not in row and not args.no_twin
        ):  # what it computed before that is known
            signal.alarm(args.limit_s)
            with suppress(RuntimeError, subprocess.TimeoutExpired):
                compare(row, loop)
    finally:
        signal.alarm(0)
    return row


def compare(row: dict[str, Any], loop: Loop) -> None:
    """What it computed beside a twin that nobody touches: with all traces, and, where it lived that
    long, with torch.profiler's sessions."""
    loop.process.wait(20)
    twin = Loop(row["mode"])
    try:
        row["twin_digest"] = twin.ask(f"digest {row['digest'][0]}")
        row["identical"] = row["twin_digest"] == row["digest"]
        if "result" in row:
            row["twin"] = twin.ask(f"state {row['result'][0]}")
            row["identical"] = row["identical"] and row["twin"] == row["result"]
    finally:
        twin.process.kill()
        twin.process.wait(20)


def slower(row: dict[str, Any]) -> dict[str, Any]:
    """How much slower it was, %: in the first trace, after it, and after all; and as
    stated, at most and by the trial."""
    attached = median(row["attached"])
    found = {f"stated_{name}": row["stated"][name] for name in ("during", "after", "trial")}
    for name, rates in (("in the trace", [row["trace"]["rate"]]), ("after one", row["after_one"]),
                        ("after all", row["after_all"])):  # fmt: skip
        found[name] = round(100 * (attached / median(rates) - 1), 2)
    return found


def _late(_signal: int, _frame: object) -> None:
    raise RuntimeError("the trial took too long")


def fresh(args: argparse.Namespace) -> dict[str, Any]:
    """Short-lived loops of small kernels, one trace each, then torch.profiler: whether CUPTI gives
    kernels to both."""
    found: dict[str, Any] = {"processes": 0, "without_kernels": 0, "blind_profiler": 0, "steps": []}
    left = args.fresh
    while left > 0:
        loops = [Loop.__new__(Loop) for _ in range(min(left, 5))]
        left -= len(loops)
        for loop in loops:
            loop.begin("eager")
        for loop in loops:
            loop.receive()
        for loop in loops:
            pid = loop.process.pid
            with memory_of(pid) as memory, tracing.Tracer(pid, memory) as tracer:
                tracer.prepare()
                trace, _ = take(tracer, 0.1)
            seen = counts(loop, trace)
            profiled = loop.ask("profile 0.1")
            found["processes"] += 1
            found["without_kernels"] += not seen["kernels"]
            found["blind_profiler"] += not profiled.get("kernels", 0)
            found["steps"].append([seen["kernels_a_step"], profiled.get("kernels", 0) /
                                   max(1, profiled["steps"])])  # fmt: skip
        for loop in loops:
            loop.process.kill()
    return found


def priced(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """A process of its sort, traced once: by how much slower, %, and as stated before."""
    loop = Loop(mode)
    try:
        pid = loop.process.pid
        with memory_of(pid) as memory, tracing.Tracer(pid, memory) as tracer:
            tracer.prepare()
            row: dict[str, Any] = {
                "mode": mode,
                "attached": [loop.rate(args.rate_s) for _ in range(2)],
                "stated": stated(tracer),
                "after_trial": [loop.rate(args.rate_s)],
            }
            row["trace"] = {"rate": counts(loop, take(tracer, args.seconds)[0])["rate"]}
            row["after_one"] = [loop.rate(args.rate_s) for _ in range(2)]
            row["after_all"] = row["after_one"]
        return row | {"slower": slower(row)}
    finally:
        loop.process.kill()
        loop.process.wait(20)


def command(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """`sonde trace` itself on a loop: how long it takes, and what it prints."""
    loop = Loop(mode)
    path = Path(tempfile.mkdtemp()) / "x.json.gz"
    began = time.monotonic()
    words = ["trace", str(loop.process.pid), "-d", str(args.seconds), "-o", str(path)]
    before = loop.rate(args.rate_s)
    done = subprocess.run(
        [sys.executable, "-m", "sonde", *words], capture_output=True, text=True, timeout=90
    )
    row = {"mode": mode, "exit": done.returncode, "took_s": round(time.monotonic() - began, 1),
           "out": done.stdout[-3500:], "err": done.stderr[-2500:],
           "before": before, "after": loop.rate(args.rate_s),
           "bytes": path.stat().st_size if path.exists() else 0}  # fmt: skip
    loop.process.kill()
    return row


def report(row: dict[str, Any]) -> None:
    """A few lines for people."""
    print(f"== {row['mode']}: {row.get('error', 'whole')}", flush=True)
    for key in ("before", "attached", "after_one", "after_all", "after_profiler", "left",
                "prepared_s", "stated", "identical", "exit"):  # fmt: skip
        print(f"  {key}: {row.get(key)}")
    for key in ("trace", "trace_after_profiler"):
        if key in row:
            print(f"  {key}: {json.dumps(row[key])}")
    for key in ("profiler", "profiler_again"):
        if key in row:
            seen = row[key]
            per = {k: round(v / seen["steps"], 4) for k, v in seen.items()}
            print(f"  {key}: {json.dumps(per)} of {seen['steps']} steps")
    if "after_all" in row:
        print(f"  slower, %: {json.dumps(slower(row))}")
    if "dump" in row:
        print(row["dump"][-3000:])
    if row.get("traces"):
        print(f"  last of many: {json.dumps(row['traces'][-1])}", flush=True)


def main() -> int:
    """1 where a loop did not stay whole."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", default="eager,graph,decode,train")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--repeat-s", type=float, default=0.2)
    parser.add_argument("--rate-s", type=float, default=1.0)
    parser.add_argument("--limit-s", type=int, default=120, help="of one loop")
    parser.add_argument("--no-twin", action="store_true", help="do not compare what was computed")
    parser.add_argument("--fresh", type=int, default=0, help="processes to try one trace each in")
    parser.add_argument("--command", default="", help="loops to run sonde trace on")
    parser.add_argument("--prices", type=int, default=0, help="processes of each loop to price")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGALRM, _late)
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {"rows": rows}
    if args.fresh:
        found["fresh"] = fresh(args)
        print(json.dumps(found["fresh"]), flush=True)
    if args.command:
        found["commands"] = [command(mode, args) for mode in args.command.split(",")]
        for one in found["commands"]:
            print(one["err"], one["out"], {k: one[k] for k in one if k not in ("err", "out")})
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))
    found["prices"] = []
    for mode in [*filter(None, args.modes.split(","))] * args.prices:
        found["prices"].append(priced(mode, args))
        print(mode, json.dumps(found["prices"][-1]["slower"]), flush=True)
        if args.out:
            args.out.write_text(json.dumps(found, indent=1))
    for mode in filter(None, [] if args.prices else args.modes.split(",")):
        rows.append(trial(mode, args))
        report(rows[-1])
        if args.out:
            args.out.write_text(json.dumps(found, indent=1))
    return 0 if all(row.get("identical") is not False and "error" not in row for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
