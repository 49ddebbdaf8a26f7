# SPDX-License-Identifier: Apache-2.0
"""The processes of one trial in one lane: a device, and CPUs that no other lane has."""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bench.faults.on_gpu.groups import Groups

ROOT = Path(__file__).parents[3]
VICTIM_CPUS = 3
"""CPUs of a victim, where a lane has more."""
FIRST_PORT = 18_200
_numbers = itertools.count()
READY_S = 90.0
"""Deadline for a process to warm up."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Where trials run."""

    number: int
    devices: tuple[str, ...]
    """Numbers of its device, and of one beside it where a trial needs that; empty: no GPU."""
    cpus: tuple[int, ...]

    @property
    def victim_cpus(self) -> set[int]:
        """Those of the victim."""
        return set(self.cpus[:VICTIM_CPUS])

    @property
    def other_cpus(self) -> set[int]:
        """Those of the others of a trial."""
        return set(self.cpus[VICTIM_CPUS:]) or set(self.cpus)


def lanes_of(count: int, devices: int, reserved: int = 2) -> list[Lane]:
    """Lanes with equal parts of the CPUs; `devices`: GPUs of this machine; `reserved`: CPUs left to
    `sonde diagnose`."""
    cpus = sorted(os.sched_getaffinity(0))
    free = cpus[reserved:] if len(cpus) > reserved + 2 * count else cpus
    each = max(1, len(free) // count)
    found = []
    for number in range(count):
        mine = tuple(free[number * each : (number + 1) * each]) or tuple(free)
        beside = [it for it in range(devices) if it >= count] or [(number + 1) % max(1, devices)]
        its = (str(number), str(beside[0])) if devices > number else ()
        found.append(Lane(number, its, mine))
    return found


class Process:
    """A process of a trial, with what it prints."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self.popen = popen
        self.pid = popen.pid
        self._loaded, self._ready = threading.Event(), threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if line.strip() == b"LOADED":
                self._loaded.set()
            if line.strip() == b"READY":
                self._ready.set()
        self._loaded.set()
        self._ready.set()

    def warm(self, cpus: set[int]) -> None:
        """Have it take its device once its modules are there; `cpus`: where it goes on. Raises
        OSError where it has ended."""
        self._loaded.wait(READY_S)
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), cpus)
        self.send("warm")

    @property
    def is_ready(self) -> bool:
        """Whether it is warm, or has ended."""
        return self._ready.is_set() or self.popen.poll() is not None

    def wait_ready(self, seconds: float = READY_S) -> None:
        """Wait until it is warm. Raises RuntimeError where it ended."""
        if not self._ready.wait(seconds) or self.popen.poll() is not None:
            raise RuntimeError(f"not ready: {self.popen.args!r} {self.popen.poll()}")

    def send(self, text: str) -> None:
        """A line on its standard input."""
        assert self.popen.stdin is not None
        stdin: IO[bytes] = self.popen.stdin
        stdin.write(text.encode() + b"\n")
        stdin.flush()


class Stage:
    """One trial: everything of it goes at the end, whatever happened."""

    def __init__(self, key: str, lane: Lane, groups: Groups) -> None:
        self.lane = lane
        self.groups = groups
        self.chance = random.Random(key)
        self.folder = Path(tempfile.mkdtemp(prefix="sonde-faults-gpu-"))
        self.processes: list[Process] = []
        self.helpers: dict[str, Process] = {}
        self.culprits: list[int] = []
        self.crowded: set[int] = set()
        self.at_go: list[str] = []
        """Commands to the victim when it begins."""
        self.victim: Process | None = None
        self.port = FIRST_PORT + next(_numbers)
        """Of its server: another one than that of the trial before, which is still there."""

    def name(self, part: str) -> str:
        """Of a control group."""
        return f"{self.port}/{part}"

    def start(
        self, module: str, *arguments: str, group: str, cpus: set[int], device: int | None = None
    ) -> Process:
        """A process that runs a module of `bench.faults`. `device`: which of the lane's devices
        it sees; None for none."""
        name, groups = self.name(group), self.groups
        groups.group(name)

        def enter() -> None:
            groups.enter(name)
            os.sched_setaffinity(0, cpus)

        environment = dict(os.environ)
        if device is not None and self.lane.devices:
            its = self.lane.devices
            environment["CUDA_VISIBLE_DEVICES"] = its[min(device, len(its) - 1)]
        popen = subprocess.Popen(
            [sys.executable, "-m", f"bench.faults.{module}", *arguments],
            cwd=ROOT, env=environment, preexec_fn=enter,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=(self.folder / f"{group}.err").open("ab"),
        )  # fmt: skip
        process = Process(popen)
        self.processes.append(process)
        return process

    def start_victim(self, kind: str) -> None:
        """Start the victim, which waits for `warm`; it loads its modules on CPUs that no victim
        has, as another one is at work."""
        arguments = [kind, str(self.folder / "steps")]
        arguments += [str(self.port)] if kind == "decode" else []
        self.victim = self.start(
            "on_gpu.victims", *arguments, group="victim", cpus=self.lane.other_cpus, device=0
        )

    def start_peer(self, kind: str, device: int) -> None:
        """Start a co-tenant of a device, which waits for `warm`."""
        self.helpers[kind] = self.start(
            "on_gpu.peers", kind, group=kind, cpus=self.lane.other_cpus, device=device
        )

    def start_client(self, rate: float) -> None:
        """Start the client of the server."""
        self.helpers["client"] = self.start(
            "peers", "client", f"127.0.0.1:{self.port}", str(rate),
            str(self.folder / "answers"), group="client", cpus=self.lane.other_cpus,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """Of the victim."""
        assert self.victim is not None
        return self.victim.pid

    def family(self) -> set[int]:
        """The victim and its children."""
        found = {self.pid}
        for task in Path(f"/proc/{self.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found |= set(map(int, task.read_text().split()))
        return found

    def send(self, text: str) -> None:
        """A command to the victim."""
        assert self.victim is not None
        self.victim.send(text)

    def errors(self) -> str:
        """The end of what the victim wrote to standard error."""
        path = self.folder / "victim.err"
        return path.read_text(errors="replace").strip()[-400:] if path.exists() else ""

    def ends(self, process: Process, name: str) -> array.array[int]:
        """End a process; the times that it wrote to a file."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
            process.popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.popen.wait(5)
        found: array.array[int] = array.array("Q")
        path = self.folder / name
        if path.exists():
            found.frombytes(path.read_bytes())
        return found

    def close(self) -> None:
        """Everything goes."""
        family = self.family() if self.victim is not None else set()
        for process in reversed(self.processes):
            with contextlib.suppress(OSError):
                process.popen.kill()
        for pid in family - {process.pid for process in self.processes}:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(5)
            for pipe in (process.popen.stdin, process.popen.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.groups.remove(str(self.port))
