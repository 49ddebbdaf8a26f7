# SPDX-License-Identifier: Apache-2.0
"""The profilers that are compared, each started as a user would start it, at the same rate."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from bench.cgroup import Cgroup
from bench.stacks import otel

HZ = 99


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a tool reports of its run."""

    samples: int
    lost: int


class Tool(ABC):
    """A profiler. One instance runs once."""

    name = ""
    scope = "machine"

    def __init__(self, folder: Path, pid: int) -> None:
        self.pid = pid
        self.path = folder / f"{self.name}.out"
        self.cgroup = Cgroup()
        self._log = (folder / f"{self.name}.log").open("w+")
        self._stdout = (folder / f"{self.name}.json").open("w+")
        self._process = subprocess.Popen(
            self.command(), stdout=self._stdout, stderr=self._log, preexec_fn=self.cgroup.enter
        )

    @classmethod
    def missing(cls) -> str:
        """Why it cannot run here; '' where it can."""
        return ""

    @abstractmethod
    def command(self) -> list[str]:
        """The command line."""

    @abstractmethod
    def has_begun(self) -> bool:
        """It observes by now."""

    @abstractmethod
    def outcome(self) -> Outcome:
        """Once it has ended: what it got and what it lost."""

    def wait_until_begun(self) -> None:
        """Raises RuntimeError where it ends before, or does not begin within 60 s."""
        for _ in range(600):
            if self._process.poll() is not None:
                break
            if self.has_begun():
                return
            time.sleep(0.1)
        raise RuntimeError(f"{self.name} did not start: {self.log()}")

    def stop(self) -> Outcome:
        """End it as a user would, by Ctrl-C."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)
        try:
            return self.outcome()
        finally:
            self.close()

    def close(self) -> None:
        """End it in any case."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._stdout.close()
        self.cgroup.close()

    def bpf_run_time_s(self) -> tuple[float, int]:
        """Run time and number of runs of its BPF programs, while the kernel counts them."""
        total_ns = runs = 0
        for info in Path(f"/proc/{self._process.pid}/fdinfo").iterdir():
            try:
                lines = info.read_text().splitlines()
            except OSError:
                continue  # closed meanwhile
            fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            total_ns += int(fields.get("run_time_ns", 0))
            runs += int(fields.get("run_cnt", 0))
        return total_ns / 1e9, runs

    def log(self) -> str:
        """What it wrote to stderr."""
        self._log.flush()
        return Path(self._log.name).read_text()

    def stdout_text(self) -> str:
        """What it wrote to stdout."""
        return Path(self._stdout.name).read_text()


class Switchable(Tool):
    """One that can be paused for a while."""

    @abstractmethod
    def pause(self) -> None:
        """Observe nothing until `resume`."""

    @abstractmethod
    def resume(self) -> None:
        """Observe again."""


class Sonde(Switchable):
    """`sonde record` with everything that it records by default."""

    name = "sonde"

    def pause(self) -> None:
        self._process.send_signal(signal.SIGUSR1)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGUSR2)

    def command(self) -> list[str]:
        options = ["-F", str(HZ), "--json", "-f", "-o", str(self.path)]
        return [sys.executable, "-m", "sonde", "record", *options]

    def has_begun(self) -> bool:
        return "sonde: recording" in self.log()

    def outcome(self) -> Outcome:
        stdout_text = json.loads(self.stdout_text())
        return Outcome(stdout_text["samples"], stdout_text["lost"])


class Perf(Switchable):
    """`perf record -g` on all CPUs, by the software clock, which virtual machines have too."""

    name = "perf"

    def __init__(self, folder: Path, pid: int) -> None:
        self._control = folder / "perf.control"
        self._control.unlink(missing_ok=True)
        os.mkfifo(self._control)
        super().__init__(folder, pid)

    def pause(self) -> None:
        self._control.write_text("disable")

    def resume(self) -> None:
        self._control.write_text("enable")

    @classmethod
    def missing(cls) -> str:
        return "" if shutil.which("perf") else "perf is not installed"

    def command(self) -> list[str]:
        options = ["-g", "-F", str(HZ), "-e", "cpu-clock", "-a", "-o", str(self.path)]
        return ["perf", "record", f"--control=fifo:{self._control}", *options]

    def has_begun(self) -> bool:
        return self.path.exists() and self.path.stat().st_size > 0

    def outcome(self) -> Outcome:
        command = ["perf", "report", "--stats", "-i", str(self.path)]
        stats = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        counts = {name: int(count) for name, count in re.findall(r"(\w+) events:\s+(\d+)", stats)}
        lost = counts.get("LOST", 0) + counts.get("LOST_SAMPLES", 0)
        return Outcome(counts.get("SAMPLE", 0), lost)


class PySpy(Tool):
    """`py-spy record`, which serves one Python process."""

    name = "py-spy"
    scope = "process"

    @classmethod
    def missing(cls) -> str:
        return "" if cls._program() else "py-spy is not installed"

    @staticmethod
    def _program() -> str:
        beside = Path(sys.executable).with_name("py-spy")
        return str(beside) if beside.exists() else shutil.which("py-spy") or ""

    def command(self) -> list[str]:
        options = ["-r", str(HZ), "-f", "raw", "-d", "600", "-o", str(self.path), "--pid"]
        return [self._program(), "record", *options, str(self.pid)]

    def has_begun(self) -> bool:
        return "Sampling process" in self.log() + self.stdout_text()

    def outcome(self) -> Outcome:
        found = re.search(r"Samples: (\d+) Errors: (\d+)", self.log() + self.stdout_text())
        return Outcome(int(found[1]), int(found[2])) if found else Outcome(0, 0)


class Otel(Tool):
    """OpenTelemetry's eBPF profiler on the whole machine, its traces written to a file."""

    name = "otel"

    @classmethod
    def missing(cls) -> str:
        return "" if otel.program() else "OpenTelemetry's profiler could not be built"

    def command(self) -> list[str]:
        # It finds tracepoints in tracefs alone, which a machine may have nowhere.
        mounted = 'mount -t tracefs tracefs /sys/kernel/tracing; exec "$0" "$@"'
        return ["unshare", "-m", "sh", "-c", mounted, str(otel.program()), "-hz", str(HZ)]

    def has_begun(self) -> bool:
        return "ready" in self.log()

    def outcome(self) -> Outcome:
        return Outcome(self.stdout_text().count("\n"), 0)


TOOLS: tuple[type[Tool], ...] = (Sonde, Perf, PySpy, Otel)
USUAL = "sonde,perf,py-spy"


def tools_for(load: str, names: str = USUAL) -> list[type[Tool]]:
    """Of the named ones those that can profile a load here; prints to stderr which cannot."""
    wanted = [tool for tool in TOOLS if tool.name in names.split(",")]
    if load != "python":
        wanted = [tool for tool in wanted if tool.scope == "machine"]
    reasons = {tool: tool.missing() for tool in wanted}
    for reason in filter(None, reasons.values()):
        print(f"bench: left out: {reason}", file=sys.stderr)
    return [tool for tool in wanted if not reasons[tool]]


def require_root() -> None:
    """Whole-machine profilers need it."""
    if os.geteuid() != 0:
        sys.exit("bench: the tools that are compared watch the whole machine: run as root")
