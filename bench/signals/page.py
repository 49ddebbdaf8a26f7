# SPDX-License-Identifier: Apache-2.0
"""An agent that only serves a page, beside known loads: do its counters lose bytes?

Such an agent asks seldom, GPM each 5 s, and what moved is the rate times the time between. Its page
is fetched each five seconds beside the first loads and each second beside the last. After each load
it is fetched until that must have been reported. Everything goes into page.json:
`python -m bench.signals.page OUT [SECONDS]`.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ctypes import byref, c_uint, c_void_p
from pathlib import Path
from typing import Any

from sonde.collect.devices.nvml_library import SUCCESS, GpmMetrics, Nvml, NvmlError

AGENT = (sys.executable, "-m", "sonde", "agent", "--prometheus", "127.0.0.1:0")
LOADS = (sys.executable, "-m", "bench.signals.loads", "-")
SELDOM_S, OFTEN_S = 5.0, 1.0
STARTS_IN_S, READY_IN_S = 30.0, 60.0
REPORTED_IN_S = 1.2
"""Later than its question, a figure is on the page."""
CHIP_TOTALS = {255: "transmit", 256: "receive"}
"""GPM's own, of newer libraries: PCIe bytes since the start of the chip."""
KEPT = re.compile(
    r"(hw_gpu_io|hw_energy|hw_power|hw_gpu_utilization|hw_gpu_memory_usage|sonde_gpu_dram_throughput"
    r"|sonde_gpu_pcie_throughput|sonde_gpu_sm_active|sonde_device_call_io|sonde_source_|sonde_agent_lost)"
)


def plan(seconds: float) -> list[tuple[str, float, float]]:
    """Loads: name, seconds, and how often the page is fetched meanwhile. The stream is long enough
    that the last look of GPM's lies in it as a whole."""
    return [
        ("h2d", seconds, SELDOM_S),
        ("d2h", seconds, SELDOM_S),
        ("stream", seconds + 3, SELDOM_S),
        ("h2d", 0.6 * seconds, OFTEN_S),
        ("d2h", 0.6 * seconds, OFTEN_S),
    ]


class Library:
    """What NVML itself reports at the same time; nothing where it cannot."""

    def __init__(self) -> None:
        self._device: c_void_p | None = None
        self._samples: list[c_void_p] = []
        with suppress(NvmlError):
            self._nvml = Nvml()
            self._device = self._nvml.handle("nvmlDeviceGetHandleByIndex_v2", c_uint(0))
            self._samples = [self._nvml.handle("nvmlGpmSampleAlloc") for _ in range(2)]
            self._sample()

    def now(self) -> dict[str, Any]:
        """Joules since the driver was loaded, and GPM's totals, where it has any."""
        counted: dict[str, Any] = {"energy_j": None, "gpm_totals": {}}
        if self._device is None:
            return counted
        with suppress(NvmlError):
            name = "nvmlDeviceGetTotalEnergyConsumption"
            counted["energy_j"] = self._nvml.large(name, self._device) / 1000
        with suppress(NvmlError):
            counted["gpm_totals"] = self._totals()
        return counted

    def _sample(self) -> None:
        self._samples.reverse()
        self._nvml.call("nvmlGpmSampleGet", self._device, self._samples[1])

    def _totals(self) -> dict[str, float]:
        self._sample()
        asked = GpmMetrics(version=1, numMetrics=len(CHIP_TOTALS))
        asked.sample1, asked.sample2 = self._samples
        for place, number in enumerate(CHIP_TOTALS):
            asked.metrics[place].metricId = number
        self._nvml.call("nvmlGpmMetricsGet", byref(asked))
        return {
            CHIP_TOTALS[one.metricId]: one.value
            for one in asked.metrics[: asked.numMetrics]
            if one.nvmlReturn == SUCCESS
        }


class Page:
    """The page of one agent, and all that was fetched of it."""

    def __init__(self, address: str, pid: int, library: Library) -> None:
        self._address = address
        self._pid = pid
        self._library = library
        self.scrapes: list[dict[str, Any]] = []

    def fetch(self) -> None:
        """Once."""
        with urllib.request.urlopen(self._address, timeout=10) as answer:
            text = answer.read().decode()
        values = {}
        for line in text.splitlines():
            key, _, value = line.rpartition(" ")
            if KEPT.match(key):
                values[key] = float(value)
        values["agent_cpu_s"] = _cpu_s(self._pid)
        self.scrapes.append(
            {"time_ns": time.monotonic_ns(), "values": values} | self._library.now()
        )

    def watch(self, until_s: float, pace_s: float, answers: int | None = None) -> None:
        """Fetch again and again until a time, or until a descriptor has something to read; then
        once more."""
        while (now_s := time.monotonic()) < until_s:
            wait_s = min(until_s - now_s, pace_s)
            if answers is None:
                time.sleep(wait_s)
            elif select.select([answers], [], [], wait_s)[0]:
                break
            if time.monotonic() < until_s:
                self.fetch()
        self.fetch()


def watch(
    out: Path,
    wanted: Sequence[tuple[str, float, float]],
    loads: Sequence[str] = LOADS,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run the agent and the loads; what was fetched and what was moved. `loads` is a command that
    speaks as `bench.signals.loads -` does. Raises RuntimeError where one does not start."""
    log = out / "agent.txt"
    with log.open("w") as file:
        agent = subprocess.Popen(AGENT, stderr=file, env=environment)
    load = subprocess.Popen(
        loads, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )
    try:
        page = Page(_address(agent, log), agent.pid, Library())
        _next_line(load, page, READY_IN_S, OFTEN_S)
        done: list[dict[str, Any]] = []
        for name, seconds, pace_s in wanted:
            if not done or done[-1]["pace_s"] != pace_s:
                # At this pace from the begin of the load, and what came before it was reported.
                page.watch(time.monotonic() + pace_s + REPORTED_IN_S, pace_s)
            assert load.stdin is not None
            load.stdin.write(f"{name} {seconds}\n")
            load.stdin.flush()
            counted = json.loads(_next_line(load, page, seconds + 20, pace_s))
            done.append({"name": name, "pace_s": pace_s} | counted)
            page.watch(time.monotonic() + pace_s + REPORTED_IN_S, pace_s)
        return {"scrapes": page.scrapes, "loads": done}
    finally:
        for process in (load, agent):
            _end(process)


def _next_line(load: subprocess.Popen[str], page: Page, within_s: float, pace_s: float) -> str:
    """Its next line, while the page is fetched."""
    assert load.stdout is not None
    page.watch(time.monotonic() + within_s, pace_s, load.stdout.fileno())
    if not select.select([load.stdout], [], [], 0)[0]:
        raise RuntimeError(f"the load prints nothing for {within_s:g} s")
    if not (line := load.stdout.readline()):
        raise RuntimeError(f"the load ended with {load.wait()}")
    return line


def _address(agent: subprocess.Popen[bytes], log: Path) -> str:
    end_s = time.monotonic() + STARTS_IN_S
    while time.monotonic() < end_s and agent.poll() is None:
        if found := re.search(r"http://\S+/metrics", log.read_text()):
            return found[0]
        time.sleep(0.1)
    raise RuntimeError(f"the agent does not start: {log.read_text().strip()}")


def _end(process: subprocess.Popen[Any]) -> None:
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Write page.json into the folder OUT."""
    out = Path(sys.argv[1])
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 8.0
    out.mkdir(parents=True, exist_ok=True)
    (out / "page.json").write_text(json.dumps(watch(out, plan(seconds)), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
