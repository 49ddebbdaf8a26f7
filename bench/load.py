# SPDX-License-Identifier: Apache-2.0
"""Loads that count their own work, so that what they lose to a profiler can be measured."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Self

_SOURCES = Path(__file__).parent / "loads"
SWITCHES_PER_S = 20_000


@dataclass(frozen=True, slots=True)
class Kind:
    """A load by name."""

    name: str
    title: str
    source: str
    arguments: tuple[str, ...] = ()
    threads: int = 1
    fills: bool = False
    """It leaves no CPU idle: what a tool runs, it runs in this load's place."""


def kinds() -> list[Kind]:
    """All loads, for this machine."""
    cpus = os.cpu_count() or 1
    return [
        Kind("cpu", f"CPU-bound, {cpus} threads on {cpus} CPUs", "cpu.c", (str(cpus),), cpus, True),
        Kind(
            "switches",
            f"{SWITCHES_PER_S:,} switches a second on {cpus} CPUs, a third busy",
            "switches.c",
            (str(cpus), str(SWITCHES_PER_S)),
            cpus,
        ),
        Kind("python", "Python, one busy thread", "objects.py"),
    ]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a load is."""

    time_s: float
    units: int
    busy_s: float
    """Time that the units took. For a load that fills the machine it is its CPU time: what others
    took of the machine is not in it."""
    switches: int
    cpu_s: float
    kernel_s: float
    """CPU time of the kernel's own threads, on whose account part of a recorder's work is done."""


class Load:
    """A running load; a context that ends it."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._folder = tempfile.TemporaryDirectory(prefix="sonde-bench-")
        folder = Path(self._folder.name)
        self._file = folder / "units"
        self._file.write_bytes(bytes(64 * kind.threads))
        source = _SOURCES / kind.source
        if source.suffix == ".c":
            program = folder / source.stem
            flags = ["-O2", "-fno-omit-frame-pointer", "-pthread"]
            subprocess.run(["cc", *flags, str(source), "-o", str(program)], check=True)
            command = [str(program)]
        else:
            command = [sys.executable, str(source)]
        self._process = subprocess.Popen([*command, str(self._file), *kind.arguments])
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def progress(self) -> Progress:
        """Now. Raises RuntimeError where the load has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"the load {self.kind.name} ended by itself")
        raw = memoryview(self._file.read_bytes()).cast("Q")
        now_s = time.monotonic()
        cpu_s = _run_s(Path(f"/proc/{self.pid}/task"))
        busy_s = cpu_s if self.kind.fills else sum(raw[1::8]) / 1e9 or now_s
        return Progress(now_s, sum(raw[::8]), busy_s, self._switches(), cpu_s, kernel_threads_s())

    def _switches(self) -> int:
        total = 0
        for status in Path(f"/proc/{self.pid}/task").glob("*/status"):
            for line in status.read_text().splitlines():
                if "ctxt_switches" in line:
                    total += int(line.split()[1])
        return total


def kernel_threads_s() -> float:
    """CPU time of the kernel's own threads (children of kthreadd, and itself)."""
    pids = os.listdir("/proc")  # noqa: PTH208
    return sum(_run_s(Path("/proc", pid, "task")) for pid in pids if _is_kernel(pid))


def machine_s() -> float:
    """CPU time of all programs and of the kernel for them, in steps of 10 ms."""
    user, nice, system = Path("/proc/stat").read_text().split(maxsplit=4)[1:4]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


@lru_cache(maxsize=4096)
def _is_kernel(pid: str) -> bool:
    """Asked once: between two looks at the machine little else may run than what is measured."""
    folder = Path("/proc", pid)
    try:
        return not (folder / "cmdline").read_bytes() and not (folder / "maps").read_bytes()
    except OSError:
        return False  # no process, or it ended


def _run_s(tasks: Path) -> float:
    """Time on a CPU of the threads in a folder of them, to the ns."""
    total_ns = 0
    for schedstat in tasks.glob("*/schedstat"):
        try:
            total_ns += int(schedstat.read_text().split()[0])
        except OSError:
            continue
    return total_ns / 1e9
