# SPDX-License-Identifier: Apache-2.0
"""One trial: a victim in its usual pace, a fault at a random moment, what it did to the pace."""

from __future__ import annotations

import array
import itertools
import os
import random
import statistics
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.faults.faults import EVERY, Fault
from bench.faults.stage import Stage

SETTLE_S = 5.5
"""At least so long a victim runs before anything happens."""
RANDOM_S = 3.0
FAULT_S = 4.0
AFTER_S = 0.5
BENIGN_S = 5.0
PORT, BACKEND_PORT = 18_077, 18_078


@dataclass
class Trial:
    """What was done, and what the victim reports of itself. Times: CLOCK_MONOTONIC, ns."""

    fault: str
    victim: str
    level: int
    seed: int
    victim_pids: list[int] = field(default_factory=list)
    cast: list[int] = field(default_factory=list)
    """All processes of the trial."""
    culprits: list[int] = field(default_factory=list)
    start_ns: int = 0
    onset_ns: int = 0
    end_ns: int = 0
    pace_before: float = 0.0
    """Steps a second."""
    pace_during: float = 0.0
    step_s: float = 0.0
    """Median length of a step before."""
    others_cpu: float = 0.0
    """CPUs that processes outside the trial used, on average."""
    trouble: str = ""
    groups: list[list[float]] = field(default_factory=list)
    """For baselines, four times a second: when (ns), and of the victim's control groups throttled
    time (s) and hits of the memory limit; segments that this machine sent again."""
    incidents: list[dict[str, Any]] = field(default_factory=list)

    @property
    def key(self) -> str:
        """Names it."""
        return f"{self.fault}/{self.victim}/{self.level}/{self.seed}"


@dataclass(frozen=True)
class Programs:
    """Faults by name, and who starts a victim of a kind for a fault."""

    every: Mapping[str, Fault]
    start_victim: Callable[[Stage, str, str], None]


def plan(fault: Fault, trials: int, seed: int) -> list[Trial]:
    """Trials of one fault: its victims and intensities in turn, in an order by chance."""
    name = fault.name
    chance = random.Random(f"{seed} {name}")
    victims, levels = list(fault.victims), list(range(fault.intensities))
    chance.shuffle(victims)
    chance.shuffle(levels)
    return [
        Trial(name, victims[number % len(victims)],
              levels[(number + number // len(levels)) % len(levels)], seed * 1000 + number)
        for number in range(trials)
    ]  # fmt: skip


def run(trial: Trial, programs: Programs) -> Trial:
    """Do it."""
    fault = programs.every[trial.fault]
    stage = Stage(trial.key)
    before, own_before = _cpu_s(), _own_cpu_s()
    try:
        _run(trial, fault, stage, programs)
    except (OSError, RuntimeError, AssertionError) as error:
        trial.trouble = f"{type(error).__name__}: {error}"
    finally:
        own_s = _own_cpu_s() - own_before
        stage.close()
    passed_s = max(1e-3, (time.monotonic_ns() - trial.start_ns) / 1e9)
    trial.others_cpu = round(max(0.0, _cpu_s() - before - own_s) / passed_s, 3)
    return trial


def _run(trial: Trial, fault: Fault, stage: Stage, programs: Programs) -> None:
    trial.start_ns = time.monotonic_ns()
    if fault.prepare is not None:
        fault.prepare(stage, trial.level)
    programs.start_victim(stage, trial.victim, trial.fault)
    watching = threading.Event()
    watch = threading.Thread(target=_watch_groups, args=(trial, watching), daemon=True)
    watch.start()
    time.sleep(SETTLE_S + stage.chance.random() * RANDOM_S)
    trial.victim_pids = sorted(stage.family())
    trial.onset_ns = time.monotonic_ns()
    fault.begin(stage, trial.level)
    time.sleep(FAULT_S if not trial.fault.startswith("benign") else BENIGN_S)
    trial.end_ns = time.monotonic_ns()
    if fault.end is not None:
        fault.end(stage, trial.level)
    time.sleep(AFTER_S)
    trial.culprits = list(stage.culprits)
    trial.cast = stage.everybody()
    watching.set()
    watch.join(1)
    if stage.victim is not None and stage.victim.poll() is not None:
        trial.trouble = f"the victim ended: {stage.victim.returncode}"
    if "latencies" in stage.values:
        latencies(trial, stage.answers())
        return
    steps = stage.steps()
    trial.pace_before = pace(steps, trial.onset_ns - int(4e9), trial.onset_ns)
    trial.pace_during = pace(steps, trial.onset_ns, trial.end_ns)
    trial.step_s = median_step(steps, trial.onset_ns)


def _watch_groups(trial: Trial, ended: threading.Event) -> None:
    group = "sonde-faults/victim"
    while not ended.wait(0.25):
        throttled = _word(Path(f"/sys/fs/cgroup/cpu/{group}/cpu.stat"), "throttled_time")
        hits = _word(Path(f"/sys/fs/cgroup/memory/{group}/memory.failcnt"), "")
        rows = [line.split() for line in Path("/proc/net/snmp").read_text().split("\n")]
        names, tcp = (row for row in rows if row and row[0] == "Tcp:")
        again = float(tcp[names.index("RetransSegs")])
        trial.groups.append([time.monotonic_ns(), throttled / 1e9, hits, again])


def _word(path: Path, name: str) -> float:
    try:
        for line in path.read_text().split("\n"):
            if line.startswith(name) and line.split():
                return float(line.split()[-1])
    except OSError:
        pass
    return 0.0


def _start_victim(stage: Stage, kind: str, fault: str) -> None:
    if kind in ("read-cached", "read-disk"):
        path = stage.data()
        if kind == "read-cached":
            _join(stage)
        stage.start_victim("read", str(path), kind.removeprefix("read-"))
    elif kind == "read-slow-files":
        stage.start_victim("read", str(stage.mount_slow_files()), "served")
        stage.culprits = [stage.helpers["files"].pid]
    elif kind.startswith("serve"):
        backend = ""
        if kind == "serve-backend":
            stage.network()
            backend = f"10.77.0.2:{BACKEND_PORT}"
            stage.helpers["backend"] = stage.start(
                "peers", "backend", "10.77.0.2", str(BACKEND_PORT), "4000", group="backend",
                netns=True,
            )  # fmt: skip
            time.sleep(0.7)
        stage.start_victim("serve", str(PORT), backend)
        time.sleep(1.0)
        answers = str(stage.folder / "answers")
        client = stage.start("peers", "client", f"127.0.0.1:{PORT}", "40", answers, group="client")
        stage.helpers["client"] = client
        stage.values |= {"cpu": 0.3, "latencies": True}  # the pace is by those of the client
    else:
        stage.start_victim(kind)
    if fault == "reclaim":
        group = stage.group("memory", "victim")
        (group / "cgroup.procs").write_text(str(stage.pid))


OURS = Programs(EVERY, _start_victim)


def _join(stage: Stage) -> None:
    """Its page cache is to be charged to its own group: drop what is cached of the file."""
    fd = os.open(stage.data(), os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def latencies(trial: Trial, answers: list[tuple[int, int]]) -> None:
    """Of a server, the pace is one by the latency of its requests; those that were never answered
    waited until the end."""

    def median(since_ns: int, until_ns: int) -> float:
        found = [(end - due) / 1e9 for due, end in answers if since_ns <= due < until_ns]
        return statistics.median(found) if found else (until_ns - since_ns) / 1e9

    trial.step_s = round(median(trial.onset_ns - int(4e9), trial.onset_ns), 5)
    trial.pace_before = round(1 / trial.step_s, 2)
    trial.pace_during = round(1 / median(trial.onset_ns, trial.end_ns), 2)


def pace(steps: array.array[int], since_ns: int, until_ns: int) -> float:
    """Steps a second."""
    count = bisect_left(steps, until_ns) - bisect_left(steps, since_ns)
    return round(count / max(1e-3, (until_ns - since_ns) / 1e9), 2)


def median_step(steps: array.array[int], until_ns: int) -> float:
    """Median length of the steps before, s."""
    before = steps[: bisect_left(steps, until_ns)]
    gaps = [b - a for a, b in itertools.pairwise(before)]
    return round(statistics.median(gaps) / 1e9, 5) if gaps else 0.0


def _cpu_s() -> float:
    """Of all processes, ever."""
    words = Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    user, nice, system, _, _, irq, soft, _ = map(int, words)
    return (user + nice + system + irq + soft) / 100


def _own_cpu_s() -> float:
    """Of the trials'."""
    return int(Path("/sys/fs/cgroup/cpuacct/sonde-faults/cpuacct.usage").read_text()) / 1e9


def as_dict(trial: Trial) -> dict[str, Any]:
    """For a line of results."""
    return asdict(trial)
