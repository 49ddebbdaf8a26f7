# SPDX-License-Identifier: Apache-2.0
"""Early warnings against what then really happens: precision, recall, lead time.

    sudo python -m bench.faults.early [--seed 1] [--memory 16] [--disks 8] [--sensors 12]
                                      [--queues 0] [--minutes 9] [--queue-minutes 5]
                                      [--out FILE.json]

Each trial goes its own way to a limit, or does not: a control group that processes fill (killed at
its limit), a file system (tmpfs) that is written full (ENOSPC), the load of all CPUs (threads of
the idle class), and sensors. Sensors are a stub: files as the kernel's thermal zones are, whose
numbers a schedule writes, as this machine has none. All others are real. Trials of memory, disks
and sensors run at once; those of the load one after the other.

Levels are read by `sonde.agent.trends`, every 5 s, as `sonde diagnose --early` has it. A warning is
right if that limit is reached within the time that it states, twice that at most, or 60 s more.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.tools import require_root
from sonde import procfs
from sonde.agent.trends import MAX_RUNNABLE, Trends
from sonde.export.layout import columns

LIMIT_BYTES: Final = 160 << 20
DISK_BYTES: Final = 96 << 20
STEP_S: Final = 0.5
"""Between two changes of a level."""
REACHED: Final = 0.99
"""Of a limit."""
SLACK_S: Final = 60.0
REST: Final = 0.2
"""Of the load at its limit, below which a trial of it may begin."""
SETTLES_S: Final = 300.0

FAULTS: Final = ("straight", "noisy", "faster and faster", "in steps", "from half way on")
BENIGN: Final = ("levels off", "comes and goes", "hours away", "high and even", "a jump")
CACHE: Final = "page cache"
"""A control group that files fill: the kernel takes that back."""

HOLDS: Final = """
import sys
kept = []
for line in sys.stdin:
    wanted = int(line)
    while len(kept) < wanted:
        kept.append(bytearray(b"x") * (1 << 20))
    del kept[wanted:]
"""
CACHES: Final = """
import os, sys
for number, line in enumerate(sys.stdin):
    with open(os.path.join(sys.argv[1], str(number)), "wb") as file:
        file.write(b"x" * (1 << 20))
        file.flush()
        os.fdatasync(file.fileno())
"""
WRITES: Final = """
import os, sys
for line in sys.stdin:
    size = int(line) << 10
    file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
    have = os.fstat(file).st_size
    try:
        if size < have:
            os.ftruncate(file, size)
        elif size > have:
            os.pwrite(file, b"x" * (size - have), have)
    except OSError:
        sys.exit(1)
    os.close(file)
"""


@dataclass(slots=True)
class Trial:
    """One level and its limit. Times are seconds since the trials began."""

    sign: str
    way: str
    subject: str = ""
    reached_s: float | None = None
    """When the limit was reached; None: never."""
    warned: list[tuple[float, float]] = field(default_factory=list)
    """(when, how long it would be by then) of each warning."""

    @property
    def is_fault(self) -> bool:
        """Whether its way ends at the limit."""
        return self.way in FAULTS


Schedule = Callable[[float], float]


def schedule(way: str, chance: random.Random, whole_s: float) -> Schedule:
    """Part of the limit that is to be used, by the seconds since the beginning."""
    start = chance.uniform(0.2, 0.4)
    end_s = chance.uniform(0.35, 0.85) * whole_s
    rate = (1.05 - start) / end_s
    top, period_s = chance.uniform(0.55, 0.85), chance.uniform(40, 90)
    noise = [chance.gauss(0, 0.02) for _ in range(64)]

    def straight(at: float) -> float:
        return start + rate * at

    ways: dict[str, Schedule] = {
        "straight": straight,
        "noisy": lambda at: straight(at) + noise[int(at) % 64] if straight(at) < 1 else 1.05,
        "faster and faster": lambda at: start + (1.05 - start) * (at / end_s) ** 2,
        "in steps": lambda at: straight(at // 15 * 15),
        "from half way on": lambda at: (
            start + (1.05 - start) * max(0.0, at - end_s / 3) / (end_s * 2 / 3)
        ),
        "levels off": lambda at: min(top, start + (top - start) * at / (end_s / 2)),
        "comes and goes": lambda at: start + (top - start) * (at % period_s) / period_s,
        "hours away": lambda at: 0.35 + 0.6 * at / 9_000,
        "high and even": lambda at: 0.9 + noise[int(at / 5) % 64] / 4,
        "a jump": lambda at: start if at < end_s / 2 else top,
        CACHE: straight,
    }
    return ways[way]


def ways(count: int, chance: random.Random, more: Sequence[str] = ()) -> list[str]:
    """As many faults as others, each way in turn, in random order."""
    faults = [FAULTS[it % len(FAULTS)] for it in range((count + 1) // 2)]
    benign = [*more, *BENIGN]
    found = faults + [benign[it % len(benign)] for it in range(count // 2)]
    chance.shuffle(found)
    return found


class Level(ABC):
    """A trial with what moves its level. Call `move` often."""

    def __init__(self, trial: Trial, target: Schedule) -> None:
        self.trial, self.target = trial, target
        self.pid = 0

    @abstractmethod
    def move(self, at_s: float) -> None:
        """To where it is to be by now."""


class _Fed(Level):
    """By a process that is fed with numbers."""

    child: subprocess.Popen[str]

    def feed(self, line: str, at_s: float) -> None:
        if self.trial.reached_s is not None:
            return
        assert self.child.stdin is not None
        with suppress(BrokenPipeError):
            self.child.stdin.write(f"{line}\n")
            self.child.stdin.flush()
        if self.child.poll() is not None:
            self.trial.reached_s = round(at_s, 1)


class Memory(_Fed):
    """Memory of a control group; at its limit the kernel ends the process."""

    def __init__(self, trial: Trial, target: Schedule, group: Path, scratch: Path) -> None:
        super().__init__(trial, target)
        trial.subject = str(group)
        group.mkdir()
        names = ("memory.limit_in_bytes", "memory.max")
        limit = next(group / name for name in names if (group / name).exists())
        limit.write_text(str(LIMIT_BYTES))
        self._is_cache = trial.way == CACHE
        code = [CACHES, str(scratch)] if self._is_cache else [HOLDS]
        self.child = subprocess.Popen(
            [sys.executable, "-S", "-c", *code],
            stdin=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL,
            preexec_fn=lambda: (group / "cgroup.procs").write_text("0"),
        )  # fmt: skip
        self.pid = self.child.pid
        self._fed = 0

    def move(self, at_s: float) -> None:
        """Feed it."""
        wanted = int(self.target(at_s) * LIMIT_BYTES) >> 20
        if self._is_cache:
            for _ in range(max(0, wanted - self._fed)):
                self.feed("", at_s)
            self._fed = max(self._fed, wanted)
        else:
            self.feed(str(wanted), at_s)


class Disk(_Fed):
    """A file system in memory."""

    def __init__(self, trial: Trial, target: Schedule, point: Path) -> None:
        super().__init__(trial, target)
        trial.subject = str(point)
        point.mkdir()
        options = f"size={DISK_BYTES},mode=700"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", point], check=True)
        self.child = subprocess.Popen(
            [sys.executable, "-S", "-c", WRITES, str(point / "file")],
            stdin=subprocess.PIPE, text=True,
        )  # fmt: skip

    def move(self, at_s: float) -> None:
        """Write so much."""
        self.feed(str(int(self.target(at_s) * DISK_BYTES) >> 10), at_s)


class Sensor(Level):
    """A stub of a thermal zone: 90 degrees at its limit, 30 where it is nothing."""

    def __init__(self, trial: Trial, target: Schedule, zone: Path) -> None:
        super().__init__(trial, target)
        trial.subject = zone.name
        zone.mkdir()
        (zone / "trip_point_0_type").write_text("passive\n")
        (zone / "trip_point_0_temp").write_text("90000\n")
        self._zone = zone

    def move(self, at_s: float) -> None:
        """Write the temperature."""
        degrees = 30 + 60 * self.target(at_s)
        (self._zone / "temp").write_text(f"{1000 * degrees:.0f}\n")
        if self.trial.reached_s is None and degrees >= 90:
            self.trial.reached_s = round(at_s, 1)


class Load(Level):
    """Threads that want CPUs, of the idle class: others lose next to nothing to them."""

    def __init__(self, trial: Trial, target: Schedule, full: float) -> None:
        super().__init__(trial, target)
        trial.subject = "all CPUs"
        self._full, self._children = full, list[subprocess.Popen[bytes]]()

    def move(self, at_s: float) -> None:
        """Start or end some."""
        wanted = round(min(1.3, self.target(at_s)) * self._full)
        while len(self._children) < wanted:
            spins = ["chrt", "-i", "0", sys.executable, "-S", "-c", "while True: pass"]
            self._children.append(subprocess.Popen(spins))
        while len(self._children) > wanted:
            _end(self._children.pop())
        if self.trial.reached_s is None and _load() >= self._full:
            self.trial.reached_s = round(at_s, 1)

    def close(self) -> None:
        """End all."""
        while self._children:
            _end(self._children.pop())


def _end(child: subprocess.Popen[Any]) -> None:
    child.kill()
    child.wait()


@contextmanager
def levels(args: argparse.Namespace, chance: random.Random, thermal: Path) -> Iterator[list[Level]]:
    """Those that move at once; ended and removed behind them."""
    mounts = procfs.mounts_by_controller()
    groups = Path(mounts.get("memory") or mounts["v2"])
    scratch = Path(tempfile.mkdtemp(prefix="sonde-early-", dir="/var/tmp"))
    found: list[Level] = []
    whole_s = 60 * args.minutes
    try:
        for number, way in enumerate(ways(args.memory, chance, [CACHE])):
            kept = scratch / f"files-{number}"
            kept.mkdir()
            name = f"sonde-early-{os.getpid()}-{number}"
            target = schedule(way, chance, whole_s)
            found.append(Memory(Trial("memory", way), target, groups / name, kept))
        for number, way in enumerate(ways(args.disks, chance)):
            target = schedule(way, chance, whole_s)
            found.append(Disk(Trial("disk", way), target, scratch / f"disk-{number}"))
        for number, way in enumerate(ways(args.sensors, chance)):
            target = schedule(way, chance, whole_s)
            zone = thermal / f"thermal_zone{number}"
            found.append(Sensor(Trial("temperature", way), target, zone))
        yield found
    finally:
        for one in found:
            if isinstance(one, _Fed):
                _end(one.child)
            if isinstance(one, Disk):
                subprocess.run(["umount", "-l", one.trial.subject], check=False)
            if isinstance(one, Memory):
                with suppress(OSError):
                    time.sleep(0.05)
                    Path(one.trial.subject).rmdir()
        shutil.rmtree(scratch, ignore_errors=True)


def follow(found: Sequence[Level], looks: Trends, whole_s: float) -> list[dict[str, Any]]:
    """Move all levels for so long; returns warnings that are about none of them."""
    others = []
    by_subject = {(one.trial.sign, one.trial.subject): one.trial for one in found}
    began_s = time.monotonic()
    while (at_s := time.monotonic() - began_s) < whole_s:
        for one in found:
            one.move(at_s)
        pids = [one.pid for one in found if one.pid]
        for warning in looks.look(time.monotonic_ns(), pids):
            trial = by_subject.get((warning.sign.value, warning.subject))
            if trial is None:
                others.append({"at_s": at_s, "sign": warning.sign, "subject": warning.subject})
            elif trial.reached_s is None:
                trial.warned.append((round(at_s, 1), warning.lead_s))
        time.sleep(STEP_S)
    return others


def settled(load: float) -> bool:
    """Whether the load average falls below this within `SETTLES_S`: each trial begins there."""
    until_s = time.monotonic() + SETTLES_S
    while _load() >= load and time.monotonic() < until_s:
        time.sleep(5)
    return _load() < load


def _load() -> float:
    return float(Path("/proc/loadavg").read_text().split()[0])


def is_right(trial: Trial, at_s: float, lead_s: float) -> bool:
    """Whether the limit came within twice the time that the warning stated, or 60 s more."""
    if trial.reached_s is None:
        return False
    return trial.reached_s - at_s <= max(2 * lead_s, lead_s + SLACK_S)


def scores(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """By sign, and of all: precision of warnings, recall of limits that were reached, lead time."""
    rows = []
    for sign in (*dict.fromkeys(one.sign for one in trials), "all"):
        mine = [one for one in trials if sign in (one.sign, "all")]
        faults = [one for one in mine if one.reached_s is not None]
        warnings = [(one, *it) for one in mine for it in one.warned]
        right = [(one, at_s, lead) for one, at_s, lead in warnings if is_right(one, at_s, lead)]
        firsts = [one.reached_s - one.warned[0][0] for one in faults
                  if one.warned and one.reached_s is not None]  # fmt: skip
        errors = [
            abs((one.reached_s or 0) - at_s - lead) / max(1.0, (one.reached_s or 0) - at_s)
            for one, at_s, lead in right
        ]
        rows.append(
            {
                "sign": sign,
                "trials": len(mine),
                "reached": len(faults),
                "warned_before": len(firsts),
                "recall": len(firsts) / len(faults) if faults else None,
                "warnings": len(warnings),
                "right": len(right),
                "precision": len(right) / len(warnings) if warnings else None,
                "lead_s": [round(it, 1) for it in sorted(firsts)],
                "lead_median_s": round(statistics.median(firsts), 1) if firsts else None,
                "lead_error": round(statistics.median(errors), 3) if errors else None,
            }
        )
    return rows


def main() -> int:
    """Run the trials; 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults.early")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--memory", type=int, default=16)
    parser.add_argument("--disks", type=int, default=8)
    parser.add_argument("--sensors", type=int, default=12)
    parser.add_argument("--queues", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--queue-minutes", type=float, default=5.0, help="of each of those")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    require_root()
    chance = random.Random(args.seed)
    trials, others = [], []
    with tempfile.TemporaryDirectory() as folder:
        thermal = Path(folder)
        with levels(args, chance, thermal) as found:
            if found:
                others += follow(found, Trends(thermal), 60 * args.minutes)
        trials += [one.trial for one in found]
    full = (os.cpu_count() or 1) * MAX_RUNNABLE
    for way in ways(args.queues, chance):
        if not settled(REST * full):
            print(f"the load does not fall below {REST:.0%} of its limit: no further trials of it")
            break
        one = Load(Trial("run-queue", way), schedule(way, chance, 60 * args.queue_minutes), full)
        with ExitStack() as stack:
            stack.callback(one.close)
            others += follow([one], Trends(Path("/nonexistent")), 60 * args.queue_minutes)
        trials.append(one.trial)
    rows = scores(trials)
    keys = (
        "sign",
        "trials",
        "reached",
        "warned_before",
        "warnings",
        "right",
        "lead_median_s",
        "lead_error",
    )
    shown = [[*keys], *([str(row[key]) for key in keys] for row in rows)]
    print(*columns(shown, (12, *[-14] * (len(keys) - 1))), sep="\n")
    for each in trials:
        print(f"{each.sign:12} {each.way:18} reached {each.reached_s} warned {each.warned}")
    if others:
        print("about others:", others)
    if args.out:
        document = {"seed": args.seed, "minutes": args.minutes, "scores": rows,
                    "trials": [asdict(one) for one in trials], "others": others}  # fmt: skip
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
