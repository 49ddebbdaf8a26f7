# SPDX-License-Identifier: Apache-2.0
"""What the agent costs as a process, telemetry alone: `python -m bench.telemetry_agent [SECONDS]`.

Everything on, as root: the whole process and the one that asks NVML, by their time on a CPU as the
kernel sums it, and the time of the agent's BPF programs, in whichever process they run, which
the kernel counts (bpf_stats_enabled; the looks of a timer are not in it). NVML is the tests' stub:
what a real driver takes for a question is in docs/design/device_signals.md and has to be added.

In windows of `WINDOW_S`, in each of which the page is fetched once. A machine at rest cannot be
ordered: a window counts as at rest only where all others together used less than `OTHERS_SHARE` of
a core. Then once more beside the load of `bench.telemetry`. Beside it each time `top -b -d 1`, a
peer that reports less.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from bench.telemetry import BUSY_BOUND, IDLE_BOUND, LOAD, kernel_statistics
from nvml_stub import Stub

SETTLE_S = 8.0
WINDOW_S = 10.0
OTHERS_SHARE = 0.03
CPUCLOCK_SCHED = 2
AT_REST = {"utilization": 0, "used": 0, "field_91": 18}
IN_USE = {"utilization": 90, "processes": f"{os.getpid()}:1073741824:90"}


@dataclass(frozen=True)
class Sums:
    """Since the start, seconds of CPU."""

    agent_s: float
    child_s: float
    kernel_s: float
    peer_s: float
    all_s: float
    """Of everybody, idle time left out."""
    wakes: int
    forks: int


class Measured:
    """The agent, its child and the peer."""

    def __init__(self, agent: int, peer: int, page: str) -> None:
        self.agent, self.peer, self.page = agent, peer, page
        self.child = _child(agent)

    def sums(self) -> Sums:
        """Now."""
        stat = Path("/proc/stat").read_text()
        cpu = [int(word) for word in stat.partition("\n")[0].split()[1:9]]
        forks = re.search(r"^processes (\d+)", stat, re.M)
        return Sums(
            *(_spent_s(self.agent), _spent_s(self.child), _programs_s(self.agent)),
            _spent_s(self.peer),
            (sum(cpu) - cpu[3] - cpu[4]) / os.sysconf("SC_CLK_TCK"),
            _switches(self.agent) + _switches(self.child),
            int(forks[1]) if forks else 0,
        )


def _spent_s(pid: int) -> float:
    """CPU time of all its threads so far, those that ended included: a thread answers each fetch of
    the page. By the clock of that process, clock_getcpuclockid(3)."""
    return time.clock_gettime_ns(~pid << 3 | CPUCLOCK_SCHED) / 1e9


def _switches(pid: int) -> int:
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        found = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text(), re.M)
        total += int(found[1]) if found else 0
    return total


def _programs_s(pid: int) -> float:
    """Of the BPF programs that a process holds. A walk runs in its caller: it is counted twice."""
    spent_ns = 0
    for info in Path(f"/proc/{pid}/fdinfo").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            found = re.search(r"^run_time_ns:\s+(\d+)", info.read_text(), re.M)
            spent_ns += int(found[1]) if found else 0
    return spent_ns / 1e9


def _child(pid: int) -> int:
    for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"NvmlSource" in Path(f"/proc/{one}/cmdline").read_bytes():
            return int(one)
    raise SystemExit("no process asks NVML")


def _share(before: Sums, now: Sums, name: str, passed_s: float) -> float:
    return float(getattr(now, name) - getattr(before, name)) / passed_s


def _window(measured: Measured, cpus: int, others_max: float) -> tuple[float, float] | None:
    """(the agent's share in all, the peer's); None where others did too much."""
    before, began_s = measured.sums(), time.monotonic()
    time.sleep(WINDOW_S / 2)
    urllib.request.urlopen(measured.page, timeout=10).read()
    time.sleep(WINDOW_S / 2)
    passed_s = time.monotonic() - began_s
    now = measured.sums()

    def share(name: str) -> float:
        return _share(before, now, name, passed_s) / cpus

    total = share("agent_s") + share("child_s") + share("kernel_s")
    others = share("all_s") - share("agent_s") - share("child_s") - share("peer_s")
    counts = others <= others_max
    print(
        f"{share('agent_s'):8.3%}{share('child_s'):9.3%}{share('kernel_s'):9.3%}{total:9.3%}"
        f"{share('peer_s'):9.3%}{others:9.1%}{_share(before, now, 'wakes', passed_s):9.1f}"
        f"{_share(before, now, 'forks', passed_s):9.1f}{'' if counts else '   not at rest'}",
        flush=True,
    )
    return (total, share("peer_s")) if counts else None


def _measure(title: str, measured: Measured, windows: int, cpus: int, others_max: float) -> float:
    """Prints a table; returns the median, 1 without a window that counts."""
    print(f"\n{title}, shares of {'the node' if cpus > 1 else 'one core'}; / s")
    print("   agent    child   kernel   in all      top   others    wakes    forks")
    found = [_window(measured, cpus, others_max) for _ in range(windows)]
    kept = [one for one in found if one is not None]
    if not kept:
        print("the machine was never at rest")
        return 1.0
    totals = sorted(total for total, _ in kept)
    print(
        f"median {statistics.median(totals):.3%} of {len(kept)} windows, from {totals[0]:.3%} "
        f"to {totals[-1]:.3%}; top {statistics.median(peer for _, peer in kept):.3%}"
    )
    return statistics.median(totals)


def _start(stub: Stub) -> tuple[subprocess.Popen[str], str]:
    """The agent, and where its page is."""
    agent = subprocess.Popen(
        [sys.executable, "-m", "sonde", "agent", "--prometheus", "127.0.0.1:0"],
        env=stub.environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert agent.stderr is not None
    return agent, agent.stderr.readline().split()[-1]


def main() -> int:
    """Print the tables."""
    windows = int(float(sys.argv[1]) // WINDOW_S) if len(sys.argv) > 1 else 6
    cpus = os.cpu_count() or 1
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name, kernel_statistics():
        folder = Path(name)
        stub = Stub(folder)
        stub.answers(AT_REST)
        agent, page = _start(stub)
        top = subprocess.Popen(["top", "-b", "-d", "1"], stdout=subprocess.DEVNULL)
        time.sleep(SETTLE_S)
        measured = Measured(agent.pid, top.pid, page)
        rest = _measure("at rest", measured, windows, 1, OTHERS_SHARE)
        stub.answers(IN_USE)
        load_s = windows * (WINDOW_S + 0.2) + 3
        load = [sys.executable, "-c", LOAD, str(load_s), name]
        loaded = subprocess.Popen(load, stdout=subprocess.DEVNULL)
        time.sleep(3)
        busy = _measure("busy, a device in use too", measured, windows, cpus, 1.0)
        for process in (top, agent):
            process.send_signal(signal.SIGTERM)
            process.wait()
        loaded.wait()
    print(f"\nat rest {rest:.3%} of a core, bound {IDLE_BOUND:.1%}: {_verdict(rest, IDLE_BOUND)}")
    print(f"busy {busy:.3%} of the node, bound {BUSY_BOUND:.1%}: {_verdict(busy, BUSY_BOUND)}")
    return 0 if rest <= IDLE_BOUND and busy <= BUSY_BOUND else 1


def _verdict(found: float, bound: float) -> str:
    return "holds" if found <= bound else "NO"


if __name__ == "__main__":
    sys.exit(main())
