# SPDX-License-Identifier: Apache-2.0
"""A load as a process that can be stopped and resumed, and asked how much it got done."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.end_to_end import progress

ROOT: Final = Path(__file__).resolve().parents[2]
GROUPS: Final = Path("/sys/fs/cgroup")
PERIOD_US: Final = 100_000
SWITCHES: Final = {"switches-20k": 20_000, "switches-200k": 200_000}
CALLS: Final = "device-calls"
SLOT_BYTES: Final = 64
START_S: Final = 120.0
"""A load has done its first unit by then: PyTorch is imported, a graph captured."""
WARM_S: Final = 1.0
TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Done:
    """What was done up to a moment."""

    at_s: float
    """CLOCK_MONOTONIC, of the last unit where the load notes it."""
    units: int
    busy_s: float
    """Of the time that units took, as the load measures it; 0 where it does not."""
    latencies: tuple[int, ...] = ()
    """Requests by class of latency (`progress`), of a load that answers some."""


class Quota:
    """A group that may use part of a CPU."""

    def __init__(self, cpus: float) -> None:
        name = f"sonde-whole-{os.getpid()}-{time.monotonic_ns()}"
        is_v1 = (GROUPS / "cpu").is_dir()
        self._folder = (GROUPS / "cpu" if is_v1 else GROUPS) / name
        self._folder.mkdir()
        most = int(cpus * PERIOD_US)
        if is_v1:
            (self._folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self._folder / "cpu.cfs_quota_us").write_text(str(most))
        else:
            (self._folder / "cpu.max").write_text(f"{most} {PERIOD_US}")

    def enter(self) -> None:
        """Move the calling process in."""
        (self._folder / "cgroup.procs").write_text("0")

    def close(self) -> None:
        """Remove it, once its processes are gone."""
        for _ in range(50):
            try:
                self._folder.rmdir()
            except OSError:
                time.sleep(0.02)
            else:
                return


def _built(folder: Path, name: str) -> str:
    """The program bench/loads/NAME.c, compiled once in a folder."""
    program = folder / name
    if not program.exists():
        options = ["-O2", "-g", "-fno-omit-frame-pointer", "-pthread"]
        source = ROOT / f"bench/loads/{name}.c"
        subprocess.run(["cc", *options, "-o", program, source, "-lm"], check=True)
    return str(program)


class Subject:
    """One process of a load, stopped (SIGSTOP) unless its trial runs."""

    def __init__(self, folder: Path, name: str, quota: Quota | None) -> None:
        self._file = folder / f"{name}-{time.monotonic_ns()}"
        self._file.write_bytes(bytes(max(progress.BYTES, SLOT_BYTES * (os.cpu_count() or 1))))
        self._has_busy = name in SWITCHES
        command = [sys.executable, "-m", "bench.end_to_end.load", name, str(self._file)]
        if self._has_busy:
            command = [_built(folder, "switches"), str(self._file), "1", str(SWITCHES[name])]
        if name == CALLS:
            command = [_built(folder, "device_steps"), "0", str(self._file)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL,
            preexec_fn=quota.enter if quota else None,
        )  # fmt: skip
        self.pid = self._process.pid

    def begin(self) -> None:
        """Wait for its first units, then stop it. Raises RuntimeError where none come."""
        end = time.monotonic() + START_S
        while not self.done().units:
            if time.monotonic() > end or self._process.poll() is not None:
                raise RuntimeError(f"{self._process.args!r} did not begin to work")
            time.sleep(0.05)
        time.sleep(WARM_S)
        self.suspend()

    def be_profiled(self) -> None:
        """Have it run under torch.profiler from now on."""
        with self._file.open("r+b") as file:
            file.seek(16)
            file.write(struct.pack("=Q", progress.PROFILED))

    def suspend(self) -> None:
        """Stop it: SIGSTOP."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run: SIGCONT."""
        os.killpg(self.pid, signal.SIGCONT)

    def done(self) -> Done:
        """What it has done so far."""
        raw = self._file.read_bytes()
        at_s = time.monotonic()
        if not self._has_busy:
            units, last_ns = struct.unpack_from("=QQ", raw)
            latencies = struct.unpack_from(f"={progress.CLASSES}Q", raw, progress.PAGE)
            return Done(last_ns / 1e9, units, 0.0, latencies if any(latencies) else ())
        slots = [struct.unpack_from("=QQ", raw, at) for at in range(0, len(raw), SLOT_BYTES)]
        return Done(at_s, sum(it[0] for it in slots), sum(it[1] for it in slots) / 1e9)

    def cpu_s(self) -> float:
        """CPU time of it and of children that ended."""
        words = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, words[11:15])) / TICKS

    def close(self) -> None:
        """End it."""
        os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._file.unlink()


def rate(before: Done, after: Done) -> float:
    """Units a second: of time, or of the time that the load counts."""
    seconds = (after.busy_s - before.busy_s) or (after.at_s - before.at_s)
    return (after.units - before.units) / seconds if seconds > 0 else 0.0


def p99_s(before: Done, after: Done) -> float:
    """99 % of the requests in between were answered within that; 0 where there were none."""
    if not after.latencies:
        return 0.0
    nothing = [0] * len(after.latencies)
    return progress.quantile_s([*before.latencies] or nothing, [*after.latencies], 0.99)
