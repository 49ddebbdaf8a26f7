# SPDX-License-Identifier: Apache-2.0
"""What all of Sonde costs a program, from the first second on.

    python -m bench.end_to_end OUT [--loads python,…] [--arms …] [--blocks 10] [--quota 0.5]
                               [--minutes M] [--table]

Each block has a trial of each arm, in random order: twice nothing of ours (the second one is the
noise of the measurement), the library attached and idle, a recording of the process with defaults,
and one of the whole machine; where they are asked for, one beside each of other profilers, that of
PyTorch last, as it leaves something behind. All other processes of the benchmark are stopped
meanwhile. Trials with a recorder are divided: its start until it reports that it records, two
seconds, what follows, its end. OUT takes one line of JSON a block; a run goes on where the last one
ended. Loads whose name begins with `gpu-` need PyTorch and a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.cgroup import Cgroup
from bench.end_to_end.subject import ROOT, Quota, Subject, p99_s, rate
from bench.statistics import bounded
from bench.tools import TOOLS, Tool, require_root

LOADS = (
    "python", "mappings", "locks", "server", "threads", "files", "switches-20k", "switches-200k",
    "forks", "device-calls",
)  # fmt: skip
ARMS = ("nothing", "nothing again", "attached", "record -p", "record")
FURTHER = ("record --device-time", "record --memory")
"""Recorders of the process, too."""
PEERS = {tool.name: tool for tool in TOOLS if tool.name != "sonde"}
TORCH = "torch.profiler"
STEADY_S = 5.0
FIRST_S = 2.0
WASHOUT_S = 0.3
SONDE = [sys.executable, "-P", "-m", "sonde"]
NOT_KEPT = "PYTHONDONTWRITEBYTECODE"
"""Where it is set, each start of a recorder compiles all that it imports: half a second that no
installed one takes."""


def idle_trial(subject: Subject) -> dict[str, float]:
    """A trial without a recorder."""
    before, cpu_s = subject.done(), subject.cpu_s()
    time.sleep(STEADY_S)
    after = subject.done()
    units = max(1, after.units - before.units)
    return {
        "steady": rate(before, after), "cpu_a_unit": (subject.cpu_s() - cpu_s) / units,
        "p99_s": p99_s(before, after),
    }  # fmt: skip


def peer_trial(subject: Subject, folder: Path, peer: type[Tool]) -> dict[str, float]:
    """One beside another profiler, two seconds after it has begun; its CPU time a second, too."""
    tool = peer(folder, subject.pid)
    try:
        tool.wait_until_begun()
        time.sleep(FIRST_S)
        cpu_s = tool.cgroup.cpu_s()
        found = idle_trial(subject)
        found["own_share"] = (tool.cgroup.cpu_s() - cpu_s) / STEADY_S
    except BaseException:
        tool.close()
        raise
    tool.stop()
    return found


def profiled_trial(subject: Subject) -> dict[str, float]:
    """One under torch.profiler, from its first two seconds on."""
    subject.be_profiled()
    time.sleep(FIRST_S)
    return idle_trial(subject)


def recorded_trial(subject: Subject, folder: Path, arm: str) -> dict[str, float]:
    """A trial with one, from its start to its end."""
    group = Cgroup()
    options = arm.split()[1:]
    if options:
        options = [*filter(lambda option: option != "-p", options), "-p", str(subject.pid)]
    begin, began_s = subject.done(), time.monotonic()
    recorder = subprocess.Popen(
        [*SONDE, "record", "--json", *options, "-f", "-o", str(folder / "trial.sonde")],
        cwd=ROOT, preexec_fn=group.enter, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        assert recorder.stderr is not None
        for line in recorder.stderr:
            if "recording" in line:
                break
        ready, ready_s, start_cpu_s = subject.done(), time.monotonic() - began_s, group.cpu_s()
        time.sleep(FIRST_S)
        first, cpu_s, own_s = subject.done(), subject.cpu_s(), group.cpu_s()
        time.sleep(STEADY_S)
        steady, cpu_s = subject.done(), subject.cpu_s() - cpu_s
        own_s, ending_s = group.cpu_s() - own_s, time.monotonic()
    finally:
        recorder.send_signal(signal.SIGINT)
        recorder.communicate()
    ended, ended_s = subject.done(), time.monotonic() - ending_s
    found = {
        "start": rate(begin, ready), "first": rate(ready, first), "steady": rate(first, steady),
        "end": rate(steady, ended), "ready_s": ready_s, "end_s": ended_s,
        "start_cpu_s": start_cpu_s, "own_share": own_s / STEADY_S, "all_cpu_s": group.cpu_s(),
        "cpu_a_unit": cpu_s / max(1, steady.units - first.units), "p99_s": p99_s(first, steady),
    }  # fmt: skip
    group.close()
    return found


def block(load: str, cpus: float | None, among: list[str], folder: Path) -> dict[str, Any]:
    """A trial of each arm, in new processes."""
    with ExitStack() as stack:
        quota = Quota(cpus) if cpus else None
        if quota:
            stack.callback(quota.close)
        untouched = Subject(folder, load, quota)
        stack.callback(untouched.close)
        attached = Subject(folder, load, quota)
        stack.callback(attached.close)
        untouched.begin()
        attached.begin()
        attached.resume()
        done = subprocess.run(
            [*SONDE, "attach", str(attached.pid)], capture_output=True, cwd=ROOT, check=False
        )
        attached.suspend()
        arms = [arm for arm in among if arm != "attached" or not done.returncode]
        random.shuffle(arms)
        arms.sort(key=lambda arm: arm == TORCH)
        trials: dict[str, dict[str, float]] = {}
        for arm in arms:
            subject = attached if arm == "attached" else untouched
            subject.resume()
            time.sleep(WASHOUT_S)
            try:
                trials[arm] = trial(arm, subject, folder)
            except RuntimeError as error:
                print(f"bench: {load}: {arm}: {error}"[:400], file=sys.stderr)
            subject.suspend()
        return {"load": load, "quota": cpus, "order": arms, "turns": trials}


def trial(arm: str, subject: Subject, folder: Path) -> dict[str, float]:
    """One of an arm."""
    if arm in PEERS:
        return peer_trial(subject, folder, PEERS[arm])
    if arm == TORCH:
        return profiled_trial(subject)
    if arm.startswith("record"):
        return recorded_trial(subject, folder, arm)
    return idle_trial(subject)


def blocks(path: Path) -> Iterator[dict[str, Any]]:
    """Those that are there."""
    if path.exists():
        yield from map(json.loads, path.read_text("utf-8").splitlines())


def slower(each: list[dict[str, Any]], arm: str, part: str, base: str = "steady") -> list[float]:
    """How much slower than with nothing of ours, by block."""
    trials = [it["turns"] for it in each if arm in it["turns"] and it["turns"][arm].get(part)]
    if base == "cpu_a_unit":
        return [it[arm][part] / it["nothing"][base] - 1 for it in trials if it["nothing"][base]]
    if base == "p99_s":
        return [it[arm][base] / it["nothing"][base] - 1 for it in trials if it["nothing"].get(base)]
    return [it["nothing"][base] / it[arm][part] - 1 for it in trials]


def print_table(path: Path) -> None:
    """Medians, and the upper bound at 95 % of the mean; in percent."""
    kept = list(blocks(path))
    kinds = sorted({(it["load"], it["quota"] or 0) for it in kept})
    print(
        "load            quota blocks  arm            part      median  mean [≤ 95 %]  CPU a unit"
    )
    for load, quota in kinds:
        each = [it for it in kept if (it["load"], it["quota"] or 0) == (load, quota)]
        for arm in (*ARMS[1:], *FURTHER, *PEERS, TORCH):
            parts = ("start", "first", "steady", "end") if "record" in arm else ("steady",)
            for part in parts:
                found = slower(each, arm, part)
                if not found:
                    continue
                mean = bounded(found)
                upper = "unresolved" if math.isinf(mean.upper) else f"{100 * mean.upper:+.1f}"
                cpu = slower(each, arm, "cpu_a_unit", "cpu_a_unit") if part == "steady" else []
                cpu_text = f"{100 * statistics.median(cpu):+.1f}" if cpu else ""
                late = slower(each, arm, "p99_s", "p99_s") if part == "steady" else []
                if late:
                    late_text = f"{100 * statistics.median(late):+.1f}"
                    cpu_text += f"  p99 {late_text} [{100 * bounded(late).upper:+.1f}]"
                print(
                    f"{load:15} {quota or '–':>5} {len(found):6}  {arm:14} {part:8}"
                    f" {100 * statistics.median(found):+7.1f}  {100 * mean.mean:+.1f} [{upper}]"
                    f"  {cpu_text}"
                )
        _print_recorder(each)


def _print_recorder(each: list[dict[str, Any]]) -> None:
    for arm in (*PEERS,):
        if shares := [it["turns"][arm]["own_share"] for it in each if arm in it["turns"]]:
            print(f"    {arm}: {statistics.median(shares):.1%} of a CPU")
    for arm in ("record -p", "record", *FURTHER):
        trials = [it["turns"][arm] for it in each if arm in it["turns"]]
        if trials:
            middle = {name: statistics.median(it[name] for it in trials) for name in trials[0]}
            print(
                f"    {arm}: ready in {middle['ready_s']:.2f} s ({middle['start_cpu_s']:.2f} s of"
                f" CPU), then {middle['own_share']:.1%} of a CPU, ends in {middle['end_s']:.2f} s"
            )


def main() -> None:
    """Measure what is missing, then print."""
    parser = argparse.ArgumentParser(prog="python -m bench.end_to_end", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--loads", default=",".join(LOADS), help="default: %(default)s")
    parser.add_argument("--arms", default=",".join(ARMS), help="default: %(default)s; also "
                        + ", ".join((*FURTHER, *PEERS, TORCH)))  # fmt: skip
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no block later")
    parser.add_argument("--blocks", type=int, default=10, help="of each load; default: %(default)s")
    parser.add_argument("--quota", type=float, help="CPUs that the program may use")
    parser.add_argument("--table", action="store_true", help="print what is there, measure nothing")
    args = parser.parse_args()
    arms = args.arms.split(",")
    if wrong := {*arms} - {*ARMS, *FURTHER, *PEERS, TORCH}:
        parser.error(f"unknown arms: {', '.join(sorted(wrong))}")
    if not args.table:
        require_root()
        os.environ.pop(NOT_KEPT, None)
        end = time.monotonic() + 60 * args.minutes
        with tempfile.TemporaryDirectory() as name, args.out.open("a", encoding="utf-8") as out:
            for number, load in itertools.product(range(args.blocks), args.loads.split(",")):
                there = [
                    it for it in blocks(args.out)
                    if (it["load"], it["quota"]) == (load, args.quota)
                ]  # fmt: skip
                if len(there) <= number and time.monotonic() < end:
                    done = block(load, args.quota, arms_of(load, arms), Path(name))
                    out.write(json.dumps(done) + "\n")
                    out.flush()
    print_table(args.out)


def arms_of(load: str, arms: list[str]) -> list[str]:
    """Of the arms those that this load can have here; prints to stderr which cannot."""
    reasons = {arm: PEERS[arm].missing() for arm in arms if arm in PEERS}
    for reason in filter(None, reasons.values()):
        print(f"bench: left out: {reason}", file=sys.stderr)
    return [
        arm for arm in arms
        if not reasons.get(arm) and (arm != TORCH or load.startswith("gpu-"))
        and (arm != "py-spy" or not load.startswith("switches"))
    ]  # fmt: skip


if __name__ == "__main__":
    main()
