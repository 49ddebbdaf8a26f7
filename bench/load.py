# SPDX-License-Identifier: Apache-2.0
"""Loads that count their own work, so that what they lose to a profiler can be measured."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
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


def kinds() -> list[Kind]:
    """All loads, for this machine."""
    cpus = os.cpu_count() or 1
    return [
        Kind("cpu", f"CPU-bound, {cpus} threads on {cpus} CPUs", "cpu.c", (str(cpus),), cpus),
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
    """Time that the units took: all of it, for loads that do nothing else."""
    switches: int
    cpu_s: float


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def progress(self) -> Progress:
        """Now. Raises RuntimeError where the load has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"the load {self.kind.name} ended by itself")
        raw = memoryview(self._file.read_bytes()).cast("Q")
        now_s = time.monotonic()
        busy_s = sum(raw[1::8]) / 1e9 or now_s
        return Progress(now_s, sum(raw[::8]), busy_s, self._switches(), self._cpu_s())

    def _switches(self) -> int:
        total = 0
        for status in Path(f"/proc/{self.pid}/task").glob("*/status"):
            for line in status.read_text().splitlines():
                if "ctxt_switches" in line:
                    total += int(line.split()[1])
        return total

    def _cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
