# SPDX-License-Identifier: Apache-2.0
"""An agent with everything on, for an hour beside short processes: does anything grow?

    python -m bench.soak [--minutes 60] [--rate 20] [--out FILE]

Needs root. Every 10 s: memory (resident and proportional, of the agent and its children; of its BPF
maps, by the kernel's own count), descriptors, threads, CPU time. Of each a line is fitted after the
first fifth, with the 95 % interval of its slope; neighbouring samples resemble one another, and the
interval is wider for it. The capture grows by design, and is given as it is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

EVERY_S = 10.0
START_S = 60.0
WARM_UP_SHARE = 0.2
Z_95 = 1.96
EVERYTHING = {
    "SONDE_DEVICE_TIME": "allow-list",
    "SONDE_DEVICE_TIME_ALLOW": "user:nobody",
    "SONDE_HOST_METRICS": "on",
    "SONDE_MEMORY": "on",
    "SONDE_SYSCALLS": "on",
    "SONDE_LAUNCHES": "on",
}
SHORT = (
    ("/bin/true",),
    ("/bin/sh", "-c", "echo a | cat > /dev/null"),
    ("/usr/bin/python3", "-S", "-c", "sum(range(100000))"),
    ("/bin/sleep", "0.05"),
)


@dataclass(frozen=True)
class Sample:
    """The agent and its children, at one time."""

    time_s: float
    resident_bytes: int
    proportional_bytes: int
    anonymous_bytes: int
    map_bytes: int
    descriptors: int
    threads: int
    processes: int
    cpu_s: float


@dataclass(frozen=True)
class Slope:
    """Growth an hour, with its interval."""

    per_hour: float
    low: float
    high: float
    mean: float


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except OSError:
                continue
    return found


def map_bytes(pid: int) -> int:
    """Memory of all BPF maps that a process holds, each counted once."""
    maps: dict[str, int] = {}
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        try:
            fields = dict(re.findall(r"^(\w+):\s*(\S+)", path.read_text(), re.MULTILINE))
        except OSError:
            continue
        if "map_id" in fields:
            maps[fields["map_id"]] = int(fields.get("memlock", 0))
    return sum(maps.values())


def sample(pid: int, began_s: float) -> Sample:
    """Of the agent `pid` now. Children that end meanwhile count as far as they were read."""
    sums = dict.fromkeys(("Rss", "Pss", "Anonymous"), 0)
    descriptors = threads = processes = 0
    cpu_s = 0.0
    for one in family(pid):
        try:
            folder = Path(f"/proc/{one}")
            rollup = (folder / "smaps_rollup").read_text()
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            held = len(list((folder / "fd").iterdir()))
        except OSError:
            continue
        for name in sums:
            [kib] = re.findall(rf"^{name}:\s*(\d+)", rollup, re.MULTILINE)
            sums[name] += int(kib) * 1024
        cpu_s += (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
        threads += int(stat[17])
        descriptors += held
        processes += 1
    return Sample(
        time.monotonic() - began_s,
        *(sums["Rss"], sums["Pss"], sums["Anonymous"], map_bytes(pid)),
        *(descriptors, threads, processes, cpu_s),
    )


def slope(times_s: Sequence[float], values: Sequence[float]) -> Slope:
    """Least squares; the number of samples counts as far as their residuals are independent, by
    their correlation from one to the next."""
    n = len(times_s)
    mean_t, mean_v = sum(times_s) / n, sum(values) / n
    spread = sum((t - mean_t) ** 2 for t in times_s)
    rate = sum((t - mean_t) * (v - mean_v) for t, v in zip(times_s, values, strict=True)) / spread
    left = [v - mean_v - rate * (t - mean_t) for t, v in zip(times_s, values, strict=True)]
    squares = sum(it * it for it in left)
    together = sum(a * b for a, b in pairwise(left))
    alike = max(0.0, min(together / squares, 0.99)) if squares else 0.0
    free = max(1.0, n * (1 - alike) / (1 + alike) - 2)
    error = math.sqrt(squares / free / spread)
    hour = 3600.0
    half = Z_95 * error
    return Slope(rate * hour, (rate - half) * hour, (rate + half) * hour, mean_v)


class Neighbours:
    """Starts short processes at a steady rate, and waits for each."""

    def __init__(self, rate: float) -> None:
        self.started = 0
        self._gap_s = 1 / rate
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Neighbours:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        running: list[subprocess.Popen[bytes]] = []
        next_s = time.monotonic()
        while not self._ended.is_set():
            running.append(subprocess.Popen(SHORT[self.started % len(SHORT)]))
            self.started += 1
            running = [it for it in running if it.poll() is None]
            next_s = max(next_s + self._gap_s, time.monotonic() - 1)
            self._ended.wait(max(0.0, next_s - time.monotonic()))
        for one in running:
            one.wait()


def watched(
    agent: subprocess.Popen[bytes], log: Path, address: str, minutes: float
) -> Iterator[Sample]:
    """A sample each 10 s, beside a scrape."""
    began_s = time.monotonic()
    count = 0
    while time.monotonic() < began_s + 60 * minutes:
        count += 1
        time.sleep(max(0.0, began_s + count * EVERY_S - time.monotonic()))
        if agent.poll() is not None:
            raise SystemExit(f"the agent ended with {agent.returncode}:\n{log.read_text()}")
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
            answer.read()
        yield sample(agent.pid, began_s)


def address_in(agent: subprocess.Popen[bytes], log: Path) -> str:
    """The address of the agent's page, from its log."""
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and agent.poll() is None:
        if found := re.search(r"http://([0-9.:]+)/", log.read_text()):
            return found[1]
        time.sleep(0.1)
    raise SystemExit(f"the agent did not start:\n{log.read_text()}")


def run(minutes: float, rate: float) -> dict[str, Any]:
    """The whole, as JSON."""
    with tempfile.TemporaryDirectory(prefix="sonde-soak-") as folder, Neighbours(rate) as beside:
        capture = Path(folder) / "soak.sonde"
        log = Path(folder) / "agent.log"
        command = [str(Path(sys.executable).with_name("sonde")), "agent"]
        with log.open("wb") as output:
            agent = subprocess.Popen(
                [*command, "--prometheus", "127.0.0.1:0", "-o", str(capture)],
                env=os.environ | EVERYTHING,
                stderr=output,
            )
        try:
            samples = list(watched(agent, log, address_in(agent, log), minutes))
        finally:
            agent.send_signal(signal.SIGTERM)
            agent.wait(timeout=120)
        written_bytes = capture.stat().st_size
    kept = [it for it in samples if it.time_s >= WARM_UP_SHARE * 60 * minutes]
    times_s = [it.time_s for it in kept]
    rows = [asdict(it) for it in kept]
    slopes = {
        name: asdict(slope(times_s, [float(row[name]) for row in rows]))
        for name in asdict(samples[0])
        if name not in ("time_s", "cpu_s")
    }
    spent_s = (kept[-1].cpu_s - kept[0].cpu_s) / (times_s[-1] - times_s[0])
    return {
        "minutes": minutes,
        "processes_per_s": beside.started / (60 * minutes),
        "machine": f"{os.cpu_count()} CPUs, Linux {platform.release()}",
        "exit_code": agent.returncode,
        "capture_bytes": written_bytes,
        "cpus": spent_s,
        "per_hour": slopes,
        "samples": [asdict(it) for it in samples],
    }


def main() -> None:
    """Soak, print the slopes, write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=20.0, help="short processes a second")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = run(args.minutes, args.rate)
    for name, it in result["per_hour"].items():
        print(
            f"{name:>20}: mean {it['mean']:14,.1f}, {it['per_hour']:+14,.1f} an hour "
            f"[{it['low']:+,.1f}, {it['high']:+,.1f}]"
        )
    print(f"{result['cpus']:.3f} CPUs; {result['processes_per_s']:.1f} processes/s")
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
