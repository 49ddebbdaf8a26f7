# SPDX-License-Identifier: Apache-2.0
"""What a profiler costs the load that it watches, and the machine.

A load runs all the time and counts its work. Without, with a tool, without, with the next tool, …:
each stretch with a tool is compared with those right before and after it, which cancels what the
machine does slowly (its clock, its neighbours). Slowdown is the extra time for the same work. Of a
load that fills the machine it is the load's own CPU time for it (interrupts and BPF programs run on
its account) and the CPU time that the tool, and the kernel's threads beyond what they use without
it, take in its place; what other programs of the machine take is left out.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from bench.load import Kind, Load, Progress, kinds
from bench.statistics import Bounded, bounded
from bench.tools import HZ, Sonde, Tool, tools_for

STATS = Path("/proc/sys/kernel/bpf_stats_enabled")


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to measure."""

    rounds: int
    stretch_s: float
    settle_s: float = 1.5
    """After the start of a tool, so that its start is not counted as its run."""
    recover_s: float = 0.5
    """After its end."""


QUICK = Plan(rounds=3, stretch_s=2.0, settle_s=1.2)
FULL = Plan(rounds=7, stretch_s=6.0)
MANY = Plan(rounds=60, stretch_s=1.5, settle_s=1.2)
"""For a bound far below the noise: short stretches, since what the machine does slowly cancels only
between neighbours, and many of them."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A load over a while."""

    rate: float
    """Units of work a second of the time that the load took for them."""
    kernel_share: float
    """CPU time of the kernel's own threads, as a share of the load's."""
    cpu_s: float


@dataclass(slots=True)
class Cost:
    """A tool's figures on one load, a value a round."""

    slowdown: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    cpu_share: list[float] = field(default_factory=list)
    """Of one core, while it observes."""
    start_cpu_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    samples: int = 0
    expected: float = 0.0
    lost: int = 0
    bpf_share: float | None = None
    """Share of one core that its BPF programs ran, in a pass of its own."""
    bpf_ns_per_run: float | None = None


@dataclass(slots=True)
class LoadResult:
    """All tools on one load."""

    kind: Kind
    switches_per_s: float
    noise: float
    """Standard deviation between two stretches without any tool, as a share."""
    costs: dict[str, Cost]

    def slowdown(self, tool: str) -> Bounded:
        """Of the load, under a tool."""
        return bounded(self.costs[tool].slowdown)


def measure(names: set[str], quick: bool) -> list[LoadResult]:
    """Every load that is named."""
    chosen = [kind for kind in kinds() if kind.name in names]
    plans = [QUICK if quick else MANY if kind.fills else FULL for kind in chosen]
    return [_measure_load(kind, plan) for kind, plan in zip(chosen, plans, strict=True)]


def _measure_load(kind: Kind, plan: Plan) -> LoadResult:
    tools = tools_for(kind.name)
    costs: defaultdict[str, Cost] = defaultdict(Cost)
    with tempfile.TemporaryDirectory() as name, Load(kind) as load:
        folder = Path(name)
        time.sleep(1)
        idle = [_stretch(load, plan.stretch_s)]
        switches = [load.progress()]
        for round_number in range(plan.rounds):
            say(f"{kind.name}: round {round_number + 1} of {plan.rounds}")
            for tool in tools:
                watched = _with_tool(tool, folder, load, plan, costs[tool.name])
                time.sleep(plan.recover_s)
                idle.append(_stretch(load, plan.stretch_s))
                cost = costs[tool.name]
                cost.slowdown.append(_slowdown(kind, idle[-2], idle[-1], watched, cost))
        switches.append(load.progress())
        _measure_bpf(folder, load, plan, costs[Sonde.name])
    steps = [b.rate / a.rate - 1 for a, b in pairwise(idle)]
    noise = (sum(step * step for step in steps) / len(steps)) ** 0.5
    first, last = switches
    per_s = (last.switches - first.switches) / (last.time_s - first.time_s)
    return LoadResult(kind, per_s, noise, dict(costs))


def _slowdown(kind: Kind, before: Stretch, after: Stretch, watched: Stretch, cost: Cost) -> float:
    """Extra time for the same work, against the two neighbours without a tool."""
    slower = (before.rate + after.rate) / 2 / watched.rate
    if not kind.fills:
        return slower - 1
    kernel = watched.kernel_share - (before.kernel_share + after.kernel_share) / 2
    return slower * (1 + cost.cpu_s[-1] / watched.cpu_s + kernel) - 1


def _stretch(load: Load, seconds: float) -> Stretch:
    before = load.progress()
    time.sleep(seconds)
    return _between(before, load.progress())


def _between(before: Progress, after: Progress) -> Stretch:
    cpu_s = after.cpu_s - before.cpu_s
    rate = (after.units - before.units) / (after.busy_s - before.busy_s)
    return Stretch(rate, (after.kernel_s - before.kernel_s) / cpu_s, cpu_s)


def _with_tool(tool: type[Tool], folder: Path, load: Load, plan: Plan, cost: Cost) -> Stretch:
    """The load under a tool; the tool's own figures go into `cost`."""
    used_before = load.progress()
    running = tool(folder, load.pid)
    try:
        running.wait_until_begun()
        time.sleep(plan.settle_s)
        cost.start_cpu_s.append(running.cgroup.cpu_s())
        before, cpu_before = load.progress(), running.cgroup.cpu_s()
        until = before.time_s + plan.stretch_s
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(1.0, left))
            running.cgroup.look()
        after, cpu_after = load.progress(), running.cgroup.cpu_s()
        outcome = running.stop()
    finally:
        running.close()
    cost.cpu_s.append(cpu_after - cpu_before)
    cost.cpu_share.append(cost.cpu_s[-1] / (after.time_s - before.time_s))
    cost.peak_bytes = max(cost.peak_bytes, running.cgroup.peak_bytes)
    cost.samples += outcome.samples
    cost.lost += outcome.lost
    cost.expected += HZ * (after.cpu_s - used_before.cpu_s)
    return _between(before, after)


def _measure_bpf(folder: Path, load: Load, plan: Plan, cost: Cost) -> None:
    """Run time of Sonde's programs in the kernel; apart, since counting it costs too."""
    if not os.access(STATS, os.W_OK):
        return
    former = STATS.read_text()
    STATS.write_text("1")
    try:
        running = Sonde(folder, load.pid)
        try:
            running.wait_until_begun()
            time.sleep(plan.settle_s)
            began, (ran_s, runs) = time.monotonic(), running.bpf_run_time_s()
            time.sleep(plan.stretch_s)
            seconds, (ran_to_s, runs_to) = time.monotonic() - began, running.bpf_run_time_s()
            running.stop()
        finally:
            running.close()
    finally:
        STATS.write_text(former)
    cost.bpf_share = (ran_to_s - ran_s) / seconds
    if runs_to > runs:
        cost.bpf_ns_per_run = 1e9 * (ran_to_s - ran_s) / (runs_to - runs)


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)
