# SPDX-License-Identifier: Apache-2.0
"""What the agent costs as a process, telemetry alone: `python -m bench.telemetry_agent [SECONDS]`.

The whole process and the one that asks NVML, by their threads' own time on a CPU, as the kernel
sums it; the time of BPF programs that run in others' context is in `bench.telemetry`. NVML is the
tests' stub: what a real driver takes for each question is in docs/design/device_signals.md and has
to be added. First a device at rest, then one with a process on it. Beside it `top -b -d 1`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from nvml_stub import Stub

SETTLE_S = 4.0
AT_REST = {"utilization": 0, "used": 0, "field_91": 18}
IN_USE = {"utilization": 90, "processes": f"{os.getpid()}:1073741824:90"}


def _spent_s(pid: int) -> float:
    """CPU time of all its threads so far, by schedstat."""
    spent_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        spent_ns += int((task / "schedstat").read_text().split()[0])
    return spent_ns / 1e9


def _switches(pid: int) -> int:
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        found = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text(), re.M)
        total += int(found[1]) if found else 0
    return total


def _child(pid: int) -> int:
    for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"NvmlSource" in Path(f"/proc/{one}/cmdline").read_bytes():
            return int(one)
    raise SystemExit("no process asks NVML")


def _measure(title: str, seconds: float, **pids: int) -> None:
    before = {name: (_spent_s(pid), _switches(pid)) for name, pid in pids.items()}
    began_s = time.monotonic()
    time.sleep(seconds)
    passed_s = time.monotonic() - began_s
    for name, pid in pids.items():
        spent_s, switches = _spent_s(pid) - before[name][0], _switches(pid) - before[name][1]
        share, rate = spent_s / passed_s, switches / passed_s
        print(f"{title:<12}{name:<14}{share:>8.3%} of a core{rate:>8.1f} wake-ups/s")


def main() -> int:
    """Print the table."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    with tempfile.TemporaryDirectory() as folder:
        stub = Stub(Path(folder))
        stub.answers(AT_REST)
        agent = subprocess.Popen(
            [sys.executable, "-m", "sonde", "agent", "--prometheus", "127.0.0.1:0"],
            env=stub.environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert agent.stderr is not None
        agent.stderr.readline()
        time.sleep(SETTLE_S)
        top = subprocess.Popen(["top", "-b", "-d", "1"], stdout=subprocess.DEVNULL)
        pids = {"agent": agent.pid, "asking NVML": _child(agent.pid), "top -b -d 1": top.pid}
        _measure("at rest", seconds, **pids)
        stub.answers(IN_USE)
        time.sleep(1)
        _measure("in use", seconds, **pids)
        for process in (top, agent):
            process.send_signal(signal.SIGTERM)
            process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
