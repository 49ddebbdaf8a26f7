# SPDX-License-Identifier: Apache-2.0
"""The faults of programs on GPUs, each with the victims that it can be done to, and the changes
that are no fault. What is done to one lane reaches no other one, but for what is `exclusive`."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.faults.on_gpu.stage import Stage

Action = Callable[[Stage, int], None]
QUOTA_CPUS = 1.2
"""CPUs of which a quota is a part: what a victim needs."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault, or of benign change."""

    name: str
    """Its key; 'benign: …' for what is none."""
    victims: tuple[str, ...]
    begin: Action
    end: Action | None = None
    prepare: Action | None = None
    """Before the victim begins with its steps: starts what has to be warm by then."""
    at_go: Action | None = None
    """When the victim begins."""
    cause: str = ""
    """The FaultCause; '' the name."""
    also: tuple[str, ...] = ()
    """Other causes that are right, where the machine does not distinguish them."""
    exclusive: str = ""
    """What of the machine is used that lanes share: one trial at a time."""
    lanes: int = 1
    """2: it takes the device of the next lane, too, which rests meanwhile."""

    @property
    def truth(self) -> tuple[str, ...]:
        """The causes that are right."""
        return (self.cause or self.name, *self.also)


def _nothing(_stage: Stage, _level: int) -> None:
    """Needs nothing."""


def _command(*texts: str) -> Action:
    def action(stage: Stage, level: int) -> None:
        stage.send(texts[min(level, len(texts) - 1)])

    return action


def _peer(kind: str, device: int = 0) -> Action:
    def action(stage: Stage, _level: int) -> None:
        stage.start_peer(kind, device)

    return action


def _go(kind: str, *duties: float) -> Action:
    def action(stage: Stage, level: int) -> None:
        peer = stage.helpers[kind]
        peer.send(f"go {duties[level]}")
        stage.culprits = [peer.pid]

    return action


def _end_culprits(stage: Stage, _level: int) -> None:
    for pid in stage.culprits:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _press(stage: Stage, level: int) -> None:
    """Another process takes the memory, and the victim needs as much again in another stream: its
    allocator has to give back what it holds for the one before it gets what the other asks for."""
    _go("hog", 1.0, 1.0, 1.0)(stage, level)
    stage.send(f"streams {(4, 2, 1)[level]}")


TEMPORARY_MB = 1000.0
"""That each of the victim's temporary tensors has on average."""


def _hog(stage: Stage, _level: int) -> None:
    stage.start_peer("hog", 0)
    stage.at_go.append(f"temporary {TEMPORARY_MB}")


def _burn(stage: Stage, number: int, cpus: set[int]) -> int:
    return stage.start("peers", "burn", group=f"burner{number}", cpus=cpus).pid


def _burners(stage: Stage, level: int) -> None:
    cpus = stage.lane.victim_cpus
    count = len(cpus) * (1, 2, 4)[level]
    stage.culprits = [_burn(stage, number, cpus) for number in range(count)]


def _quota(stage: Stage, level: int) -> None:
    stage.groups.limit(stage.name("victim"), (0.6, 0.4, 0.2)[level] * QUOTA_CPUS)


def _no_quota(stage: Stage, _level: int) -> None:
    stage.groups.limit(stage.name("victim"), 0.0)


def _crowd_one_cpu(stage: Stage, level: int) -> None:
    stage.crowded = {stage.chance.choice(sorted(stage.lane.victim_cpus))}
    for number in range((1, 2, 3)[level]):
        _burn(stage, number, stage.crowded)


def _pin(stage: Stage, _level: int) -> None:
    for pid in stage.family():
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), stage.crowded)


def _freeze(stage: Stage, level: int) -> None:
    pids = sorted(stage.family())
    if level == 1 and stage.groups.freeze(stage.name("victim"), pids):
        return
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def _thaw(stage: Stage, level: int) -> None:
    if level == 1:
        stage.groups.thaw(stage.name("victim"))
    for pid in stage.family():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


HOST = ("eager", "decode", "loader")
FAULTS: tuple[Fault, ...] = (
    Fault("device-contention", ("train", "graph", "decode"), _go("compute", 0.5, 0.75, 1.0),
          _end_culprits, _peer("compute")),
    Fault("dram-contention", ("train", "graph"), _go("memory", 0.5, 0.75, 1.0), _end_culprits,
          _peer("memory"), also=("device-contention",)),
    Fault("pcie-contention", ("copy",), _go("pcie", 0.4, 0.7, 1.0), _end_culprits, _peer("pcie")),
    Fault("pcie-contention, sibling", ("copy",), _go("pcie", 0.4, 0.7, 1.0), _end_culprits,
          _peer("pcie", 1), cause="pcie-contention", lanes=2),
    Fault("device-memory-pressure", ("train", "graph"), _press, _end_culprits, _hog),
    Fault("page-migration", ("train", "eager", "graph"),
          _command("managed 16", "managed 48", "managed 128"), _command("managed 0")),
    Fault("synchronization", ("train", "eager"), _command("norms 1", "norms 3", "norms 8"),
          _command("norms 0")),
    Fault("recompilation", ("eager", "graph", "decode"),
          _command("recompile 0.3", "recompile 0.5", "recompile 0.8"), _command("recompile 0")),
    Fault("slow-loader", ("loader",), _command("busy 0.002", "sleep 0.005", "busy 0.015"),
          _command("busy 0", "sleep 0", "busy 0")),
    Fault("interpreter-lock", ("eager", "decode"), _command("gil 1", "gil 2", "gil 3"),
          _command("gil 0")),
    Fault("lock", ("train", "eager", "decode"), _command("lock 0.5", "lock 0.8", "lock 0.95"),
          _command("lock 0")),
    Fault("cpu-contention", HOST, _burners, _end_culprits),
    Fault("cpu-quota", HOST, _quota, _no_quota),
    Fault("bad-pinning", HOST, _pin, at_go=_crowd_one_cpu),
    Fault("frozen", ("train", "graph", "decode", "loader"), _freeze, _thaw),
    Fault("garbage-collection", ("train", "eager", "decode"),
          _command("gc 50000", "gc 200000", "gc 600000"), _command("gc 0")),
    Fault("fsync", ("eager", "decode", "graph"), _command("fsync 4", "fsync 64", "fsync 512"),
          _command("fsync 0"), exclusive="disk"),
)  # fmt: skip
BENIGN: tuple[Fault, ...] = (
    Fault("benign: batch size", ("train", "graph", "copy"),
          _command("batch 2", "batch 0.5", "batch 3")),
    Fault("benign: sequence length", ("train", "decode", "eager"),
          _command("length 1.5", "length 0.6", "length 2.5")),
    Fault("benign: evaluation", ("train", "graph", "eager"),
          _command("evaluate 1", "evaluate 2", "evaluate 3")),
    Fault("benign: checkpoint", ("train", "loader", "eager"), _command("checkpoint 1"),
          exclusive="disk"),
    Fault("benign: warm-up", ("train", "eager"), _command("warm-up 1")),
)  # fmt: skip
EVERY = {fault.name: fault for fault in (*FAULTS, *BENIGN)}
