# SPDX-License-Identifier: Apache-2.0
"""What a profiler costs the load that it watches, and the machine.

A load runs all the time and counts its work, with and without a tool by turns. What is watched is
compared with what came right before and after it, which cancels what the machine does slowly (its
clock, its neighbours). Slowdown is the extra time for the same work.

On a load that fills the machine the tool starts once and is made to pause and resume, hundreds of
times: the shorter the blocks, the more of the machine's moods they share (one that cannot pause
is started again for each of a few stretches). There, time is the load's
own CPU time (interrupts and BPF programs run on its account), and the CPU time that the tool, and
the kernel's threads beyond what they use without it, take in its place; what other programs of the
machine take is left out. On other loads each stretch is a separate run, by the wall clock.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from bench.load import Kind, Load, Progress, kinds, machine_s
from bench.statistics import Bounded, bounded
from bench.tools import HZ, USUAL, Sonde, Switchable, Tool, tools_for

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
    blocks: int = 0
    """In which it is on, for tools that can pause and loads that fill the machine."""
    block_s: tuple[float, float] = (0.8, 1.2)
    """Blocks are of random length, so that nothing periodic falls always into the same kind."""
    steady_s: float = 10.0
    """So long the tool runs unpaused after the blocks: its own CPU time is of then."""


QUICK = Plan(rounds=3, stretch_s=2.0, settle_s=2.0, blocks=16, block_s=(0.45, 0.65), steady_s=9.0)
FULL = Plan(rounds=7, stretch_s=6.0, settle_s=2.0, blocks=120)
WASHOUT_S = 0.15
"""After a change of the kind of block."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A load over a while."""

    rate: float
    """Units of work a second of the time that the load took for them."""
    kernel_share: float
    """CPU time of the kernel's own threads, as a share of the load's."""
    cpu_s: float
    """Of the load."""


@dataclass(slots=True)
class Cost:
    """A tool's figures on one load, a value a round."""

    slowdown: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    cpu_share: list[float] = field(default_factory=list)
    """Of one core, while it observes."""
    others_share: list[float] = field(default_factory=list)
    """What neither the tool nor the load used meanwhile, of one core: the machine was not quiet."""
    start_cpu_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    samples: int = 0
    expected: float = 0.0
    lost: int = 0
    bpf_share: float | None = None
    """Share of one core that its BPF programs ran, in a separate pass."""
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


def measure(names: set[str], quick: bool, tools: str = USUAL) -> Iterator[LoadResult]:
    """Every load that is named, under every tool that is; each when it is asked for."""
    plan = QUICK if quick else FULL
    for kind in kinds():
        if kind.name in names:
            yield _measure_load(kind, plan, tools_for(kind.name, tools))


def _measure_load(kind: Kind, plan: Plan, tools: list[type[Tool]]) -> LoadResult:
    costs: defaultdict[str, Cost] = defaultdict(Cost)
    with tempfile.TemporaryDirectory() as name, Load(kind) as load:
        folder = Path(name)
        time.sleep(1)
        switches = [load.progress()]
        if kind.fills:
            switchable = [tool for tool in tools if issubclass(tool, Switchable)]
            idle = [
                one for tool in switchable for one in _by_blocks(tool, folder, load, plan, costs)
            ]
            if others := [tool for tool in tools if not issubclass(tool, Switchable)]:
                idle += _by_rounds(others, folder, load, plan, costs)
        else:
            idle = _by_rounds(tools, folder, load, plan, costs)
        switches.append(load.progress())
        if Sonde in tools:
            _measure_bpf(folder, load, plan, costs[Sonde.name])
    steps = [b.rate / a.rate - 1 for a, b in pairwise(idle)]
    noise = (sum(step * step for step in steps) / len(steps)) ** 0.5
    first, last = switches
    per_s = (last.switches - first.switches) / (last.time_s - first.time_s)
    return LoadResult(kind, per_s, noise, dict(costs))


def _by_rounds(
    tools: list[type[Tool]], folder: Path, load: Load, plan: Plan, costs: dict[str, Cost]
) -> list[Stretch]:
    """A separate run for each stretch. Returns the stretches without a tool."""
    idle = [_stretch(load, plan.stretch_s)]
    for round_number in range(plan.rounds):
        say(f"{load.kind.name}: round {round_number + 1} of {plan.rounds}")
        for tool in tools:
            cost = costs[tool.name]
            watched = _with_tool(tool, folder, load, plan, cost)
            time.sleep(plan.recover_s)
            idle.append(_stretch(load, plan.stretch_s))
            taken = cost.cpu_s[-1] / watched.cpu_s if load.kind.fills else 0.0
            cost.slowdown.append(_slowdown(idle[-2], watched, idle[-1], taken))
    return idle


def _by_blocks(
    tool: type[Switchable], folder: Path, load: Load, plan: Plan, costs: dict[str, Cost]
) -> list[Stretch]:
    """One run, on and off by turns. Returns the blocks in which it was off."""
    cost = costs[tool.name]
    running = tool(folder, load.pid)
    try:
        begun = load.progress()
        running.wait_until_begun()
        time.sleep(plan.settle_s)
        cost.start_cpu_s.append(running.cgroup.cpu_s())
        running.cgroup.look()
        started = load.progress()
        say(f"{load.kind.name}: {tool.name}, {plan.blocks} times on and off")
        off, on = [_block(running.pause, load, plan)], []
        watched_s = 0.0
        for _ in range(plan.blocks):
            before = load.progress()
            on.append(_block(running.resume, load, plan))
            watched_s += load.progress().cpu_s - before.cpu_s
            off.append(_block(running.pause, load, plan))
            running.cgroup.look()
        running.resume()
        time.sleep(WASHOUT_S)
        steady = _steadily(running, load, plan.steady_s, cost)
        outcome = running.stop()
    finally:
        running.close()
    cost.samples, cost.lost = outcome.samples, outcome.lost
    cost.expected = HZ * (watched_s + started.cpu_s - begun.cpu_s + steady.cpu_s)
    taken = cost.cpu_s[-1] / steady.cpu_s
    for (off_before, off_after), watched in zip(pairwise(off), on, strict=True):
        cost.slowdown.append(_slowdown(off_before, watched, off_after, taken))
    return off


def _slowdown(before: Stretch, watched: Stretch, after: Stretch, taken: float) -> float:
    """`taken`: of the load's CPU time, by the tool, where that goes by CPU time; else 0."""
    slower = (before.rate + after.rate) / 2 / watched.rate
    kernel = watched.kernel_share - (before.kernel_share + after.kernel_share) / 2
    return slower * (1 + taken + kernel if taken else 1) - 1


def _block(change: Callable[[], None], load: Load, plan: Plan) -> Stretch:
    change()
    time.sleep(WASHOUT_S)
    return _stretch(load, random.uniform(*plan.block_s))


def _steadily(running: Tool, load: Load, seconds: float, cost: Cost) -> Stretch:
    """The tool's own figures while it observes go into `cost`."""
    before, cpu_before, all_before_s = load.progress(), running.cgroup.cpu_s(), machine_s()
    until = before.time_s + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(1.0, left))
        running.cgroup.look()
    after, cpu_after, all_after_s = load.progress(), running.cgroup.cpu_s(), machine_s()
    seconds = after.time_s - before.time_s
    cost.cpu_s.append(cpu_after - cpu_before)
    cost.cpu_share.append(cost.cpu_s[-1] / seconds)
    others_s = all_after_s - all_before_s - cost.cpu_s[-1] - (after.cpu_s - before.cpu_s)
    cost.others_share.append(max(0.0, others_s / seconds))
    cost.peak_bytes = max(cost.peak_bytes, running.cgroup.peak_bytes)
    return _between(before, after)


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
        watched = _steadily(running, load, plan.stretch_s, cost)
        now = load.progress()
        outcome = running.stop()
    finally:
        running.close()
    cost.samples += outcome.samples
    cost.lost += outcome.lost
    cost.expected += HZ * (now.cpu_s - used_before.cpu_s)
    return watched


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
