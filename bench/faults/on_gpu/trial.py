# SPDX-License-Identifier: Apache-2.0
"""One trial on a GPU: a victim in its usual pace, a fault at a random moment, what it did to the
pace."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.faults.on_gpu.faults import EVERY, Fault
from bench.faults.on_gpu.groups import Groups
from bench.faults.on_gpu.stage import Lane, Process, Stage
from bench.faults.trial import Trial, latencies, median_step, pace

SETTLE_S = 8.0
"""At least so long a victim runs before anything happens."""
RANDOM_S = 2.0
FAULT_S = 4.5
AFTER_S = 0.7
REQUESTS = 20.0
"""A second, to the server."""
NEXT_READY_S = 20.0
"""How long a fault is put off until the processes of the next trial are warm."""
QUIET_S = 2.5
"""At least so long the victim then has its device to itself."""


@dataclass
class GpuTrial(Trial):
    """A trial with what is particular to a GPU."""

    truth: list[str] = field(default_factory=list)
    """Causes that are right."""
    ready_ns: int = 0
    """When the victim began with its steps."""
    quiet_ns: int = 0
    """When the processes of the next trial were warm: before, they used the device, too."""
    lane: int = 0
    device: str = ""
    """Its number on this machine; '' none."""
    step_during_s: float = 0.0


def plan(name: str, trials: int, seed: int) -> list[GpuTrial]:
    """Trials of one fault: its victims and intensities in turn, in an order by chance."""
    fault = EVERY[name]
    chance = random.Random(f"{seed} {name}")
    victims, levels = list(fault.victims), [0, 1, 2]
    chance.shuffle(victims)
    chance.shuffle(levels)
    return [
        GpuTrial(name, victims[number % len(victims)],
                 levels[(number + number // 3) % 3], seed * 1000 + number,
                 truth=list(fault.truth))
        for number in range(trials)
    ]  # fmt: skip


class Prepared:
    """A trial whose processes have been started."""

    def __init__(self, trial: GpuTrial, lane: Lane, groups: Groups) -> None:
        self.trial = trial
        self.fault: Fault = EVERY[trial.fault]
        self.stage = Stage(trial.key, lane, groups)
        trial.lane, trial.device = lane.number, lane.devices[0] if lane.devices else ""
        trial.start_ns = time.monotonic_ns()
        try:
            self.stage.start_victim(trial.victim)
            if self.fault.prepare is not None:
                self.fault.prepare(self.stage, trial.level)
        except (OSError, RuntimeError) as error:
            trial.trouble = f"{type(error).__name__}: {error}"

    def warm(self) -> None:
        """Have all that runs from the start take its device."""
        with contextlib.suppress(OSError):  # it has ended: `run` reports it
            for process in self._needed():
                is_victim = process is self.stage.victim
                lane = self.stage.lane
                process.warm(lane.victim_cpus if is_victim else lane.other_cpus)

    def wait_ready(self) -> None:
        """Until all that runs from the start is warm. Raises RuntimeError."""
        for process in self._needed():
            process.wait_ready()

    def is_ready(self) -> bool:
        """Whether it is warm, or never will be."""
        return all(process.is_ready for process in self._needed())

    def _needed(self) -> list[Process]:
        """What has to be warm."""
        victim = [self.stage.victim] if self.stage.victim is not None else []
        return [*victim, *self.stage.helpers.values()]

    def run(self, is_quiet: Callable[[], bool], alone: AbstractContextManager[Any]) -> GpuTrial:
        """Do it, and end everything. `is_quiet`: whether the next trial's processes are warm;
        `alone`: held while the fault is there."""
        try:
            if not self.trial.trouble:
                self._run(is_quiet, alone)
        except (OSError, RuntimeError, AssertionError) as error:
            what = f"{type(error).__name__}: {error}"
            self.trial.trouble = f"{what} {self.stage.errors()}".strip()
        finally:
            self.stage.close()
        return self.trial

    def _run(self, is_quiet: Callable[[], bool], alone: AbstractContextManager[Any]) -> None:
        trial, fault, stage = self.trial, self.fault, self.stage
        self.wait_ready()
        assert stage.victim is not None
        stage.send("go")
        for text in stage.at_go:
            stage.send(text)
        if fault.at_go is not None:
            fault.at_go(stage, trial.level)
        trial.ready_ns = time.monotonic_ns()
        if trial.victim == "decode":
            time.sleep(0.3)
            stage.start_client(REQUESTS)
        self._settle(is_quiet)
        with alone:
            trial.victim_pids = sorted(stage.family())
            trial.onset_ns = time.monotonic_ns()
            fault.begin(stage, trial.level)
            time.sleep(FAULT_S)
            trial.end_ns = time.monotonic_ns()
            if fault.end is not None:
                fault.end(stage, trial.level)
            time.sleep(AFTER_S)
        trial.culprits = list(stage.culprits)
        trial.cast = sorted(stage.family() | {process.pid for process in stage.processes})
        if stage.victim.popen.poll() is not None:
            trial.trouble = f"the victim ended: {stage.victim.popen.returncode} {stage.errors()}"
        self._truth()

    def _settle(self, is_quiet: Callable[[], bool]) -> None:
        """Until the victim has run for a while, and has had its device to itself."""
        until_s = time.monotonic() + SETTLE_S + self.stage.chance.random() * RANDOM_S
        late_s = until_s + NEXT_READY_S
        while not is_quiet() and time.monotonic() < late_s:
            time.sleep(0.05)
        self.trial.quiet_ns = time.monotonic_ns()
        until_s = max(until_s, time.monotonic() + QUIET_S)
        time.sleep(max(0.0, until_s - time.monotonic()))

    def _truth(self) -> None:
        """By the victim's own steps, or its client's latencies."""
        trial, stage = self.trial, self.stage
        assert stage.victim is not None
        if (client := stage.helpers.get("client")) is not None:
            times = stage.ends(client, "answers")
            latencies(trial, list(zip(times[::2], times[1::2], strict=True)))
            return
        steps = stage.ends(stage.victim, "steps")
        trial.pace_before = pace(steps, trial.onset_ns - int(4e9), trial.onset_ns)
        trial.pace_during = pace(steps, trial.onset_ns, trial.end_ns)
        trial.step_s = median_step(steps, trial.onset_ns)


def as_dict(trial: GpuTrial) -> dict[str, Any]:
    """For a line of results."""
    return asdict(trial)
