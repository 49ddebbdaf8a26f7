# SPDX-License-Identifier: Apache-2.0
"""What each signal of the host costs: `python -m bench.telemetry [SECONDS]`, as root.

Of each collector the CPU time of its tick in user space (the thread's own), and the time that its
programs ran in the kernel, which the kernel counts (bpf_stats_enabled). A program behind a timer is
not in those figures and counts itself; what a timer's interrupt costs besides is not in either.
First beside nothing of ours, then beside a load that switches, writes, talks and forks. `top` runs
beside it, once a second in its batch mode: a peer that reports less.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sonde.collect import host
from sonde.collect.blocks import BlockCollector
from sonde.collect.collector import Collector
from sonde.collect.flows import FlowCollector
from sonde.collect.kernel import Kernel
from sonde.collect.polling import Points, Schedule
from sonde.collect.queues import QueueCollector
from sonde.collect.syscalls import SyscallCollector
from sonde.collect.tasks import TaskCollector

IDLE_BOUND = 0.003
"""Of one core, everything that is on by default."""
BUSY_BOUND = 0.005
"""Of the node's CPU."""
STATS = Path("/proc/sys/kernel/bpf_stats_enabled")
TICK_S = 1.0

LOAD = r"""
import os, socket, subprocess, sys, threading, time
end = time.time() + float(sys.argv[1])
folder = sys.argv[2]
def switch():
    a, b = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(a[1])
        while os.read(a[0], 1): os.write(b[1], b"x")
        os._exit(0)
    while time.time() < end:
        for _ in range(500):
            os.write(a[1], b"x"); os.read(b[0], 1)
    os.close(a[1])
def disk():
    with open(folder + "/load", "wb") as f:
        while time.time() < end:
            f.seek(0)
            for _ in range(16): f.write(bytes(1 << 16))
            f.flush(); os.fdatasync(f.fileno()); time.sleep(0.02)
def talk():
    server = socket.create_server(("127.0.0.1", 0))
    def serve():
        c, _ = server.accept()
        while c.recv(1 << 16): pass
    threading.Thread(target=serve, daemon=True).start()
    s = socket.create_connection(server.getsockname())
    while time.time() < end:
        for _ in range(20): s.sendall(bytes(1 << 14))
        time.sleep(0.002)
def fork():
    while time.time() < end: subprocess.run(["true"]); time.sleep(0.02)
def spin():
    while time.time() < end: sum(range(1000))
children = []
for work in (switch, disk, talk, fork, spin):
    pid = os.fork()
    if not pid:
        work(); os._exit(0)
    children.append(pid)
for pid in children: os.waitpid(pid, 0)
"""


@dataclass
class Cost:
    """Of one collector over a stretch."""

    name: str
    default: bool = True
    agent_s: float = 0.0
    kernel_s: float = 0.0
    runs: int = 0
    rows: int = 0
    kernel_bytes: int = 0
    programs: list[int] = field(default_factory=list)
    """Descriptors of its programs in this process."""


class Watched:
    """A collector of ours under measurement."""

    def __init__(self, make: Callable[[], Collector], default: bool = True) -> None:
        before = _program_fds()
        self.collector = make()
        self.cost = Cost(self.collector.name, default, programs=sorted(_program_fds() - before))
        self.cost.kernel_bytes = self.collector.memory_bytes()
        self.collector.start()
        self._began = self._kernel()

    def tick(self) -> None:
        before_ns, began_s = self._kernel()[0], time.thread_time()
        batch = self.collector.drain(time.monotonic_ns(), True)
        spent_s = time.thread_time() - began_s
        # A walk runs in this thread: it is in the kernel's figure already.
        walked_s = (self._kernel()[0] - before_ns) / 1e9
        self.cost.agent_s += max(0.0, spent_s - walked_s)
        self.cost.rows += sum(len(rows) for rows in batch.rows.values() if isinstance(rows, list))

    def rebase(self) -> None:
        """Count from now."""
        self.collector.drain(time.monotonic_ns(), True)
        self.cost.agent_s, self.cost.rows = 0.0, 0
        self._began = self._kernel()

    def end(self) -> Cost:
        """Settle the kernel's part."""
        ns, runs = self._kernel()
        self.cost.kernel_s, self.cost.runs = (ns - self._began[0]) / 1e9, runs - self._began[1]
        return self.cost

    def _kernel(self) -> tuple[int, int]:
        ns = runs = 0
        if isinstance(self.collector, QueueCollector):
            ns, runs = self.collector.spent()
        for fd in self.cost.programs:
            info = dict(
                line.split(":\t", 1)
                for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
                if ":\t" in line
            )
            ns += int(info.get("run_time_ns", 0))
            runs += int(info.get("run_cnt", 0))
        return ns, runs


def _program_fds() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):
            if "bpf-prog" in os.readlink(f"/proc/self/fd/{name}"):  # noqa: PTH115
                found.add(int(name))
    return found


@contextlib.contextmanager
def kernel_statistics() -> Iterator[None]:
    """Have the kernel time programs."""
    before = STATS.read_text()
    STATS.write_text("1")
    try:
        yield
    finally:
        STATS.write_text(before)


def measure(seconds: float, load: bool) -> tuple[list[Cost], float]:
    """Costs of every collector, one beside the other, and the CPU time of a peer."""
    kernel = Kernel(None)
    watched = [
        Watched(lambda: TaskCollector(kernel)),
        Watched(lambda: BlockCollector(kernel)),
        Watched(lambda: FlowCollector(kernel)),
        Watched(lambda: QueueCollector(kernel, 100)),
    ]
    sources = [(source.name, Schedule(source)) for source in host.sources()]
    of_source = {name: Cost(name) for name, _ in sources}
    due_ns = dict.fromkeys(of_source, 0)
    for _, schedule in sources:
        schedule.run_due(Points())
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        work = [sys.executable, "-c", LOAD, str(seconds + 3), folder]
        loaded = subprocess.Popen(work, stdout=subprocess.DEVNULL) if load else None
        time.sleep(1.5)
        for one in watched:
            one.rebase()
        peer = subprocess.Popen(
            ["top", "-b", "-d", "1", "-n", str(int(seconds))], stdout=subprocess.DEVNULL
        )
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            due_s = time.monotonic() + TICK_S
            while time.monotonic() < due_s:
                for name, schedule in sources:
                    if time.monotonic_ns() < due_ns[name]:
                        continue
                    points, began_s = Points(), time.thread_time()
                    due_ns[name] = schedule.run_due(points)
                    of_source[name].agent_s += time.thread_time() - began_s
                    of_source[name].rows += len(points.metrics)
                time.sleep(0.1)
            for one in watched:
                one.tick()
        costs = [one.end() for one in watched]
        peer.wait()
        peer_s = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent_s = peer_s.ru_utime + peer_s.ru_stime
        if loaded is not None:
            loaded.wait()
        calls = Watched(lambda: SyscallCollector(kernel), default=False)
        if load:
            again = subprocess.Popen([*work[:3], "4", folder], stdout=subprocess.DEVNULL)
            time.sleep(1)
            calls.rebase()
            time.sleep(2)
            calls.tick()
            scale = seconds / 2
            cost = calls.end()
            cost.agent_s, cost.kernel_s = cost.agent_s * scale, cost.kernel_s * scale
            cost.runs = int(cost.runs * scale)
            costs.append(cost)
            again.wait()
        calls.collector.stop()
        for one in watched:
            one.collector.stop()
        for _, schedule in sources:
            schedule.close()
    return [*costs, *of_source.values()], spent_s


def show(title: str, costs: list[Cost], peer_s: float, seconds: float, cpus: int) -> bool:
    """The table; whether what is on by default stays in its bound."""
    bound = BUSY_BOUND if cpus > 1 else IDLE_BOUND
    print(f"\n{title}, {seconds:g} s; shares of {'the node' if cpus > 1 else 'one core'}")
    print(
        f"{'':14}{'agent':>10}{'kernel':>10}{'runs/s':>10}{'ns a run':>10}{'rows/s':>9}{'maps':>9}"
    )
    for cost in costs:
        each = f"{1e9 * cost.kernel_s / cost.runs:,.0f}" if cost.runs else ""
        print(
            f"{cost.name:14}{cost.agent_s / seconds / cpus:10.3%}"
            f"{cost.kernel_s / seconds / cpus:10.3%}{cost.runs / seconds:10,.0f}{each:>10}"
            f"{cost.rows / seconds:9,.0f}{cost.kernel_bytes / 1e6:8.1f}M"
            f"{'' if cost.default else '   off by default'}"
        )
    total = sum(cost.agent_s + cost.kernel_s for cost in costs if cost.default) / seconds / cpus
    verdict = "holds" if total <= bound else "NO"
    print(f"{'on by default':14}{total:10.3%}   bound {bound:.1%}: {verdict}")
    print(f"{'top -b -d 1':14}{peer_s / seconds / cpus:10.3%}   a peer")
    return total <= bound


def main() -> int:
    """Print both tables."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    with kernel_statistics():
        idle, idle_peer_s = measure(seconds, load=False)
        busy, both_s = measure(seconds, load=True)
    ok = show("nothing of ours runs beside", idle, idle_peer_s, seconds, 1)
    cpus = os.cpu_count() or 1
    return 0 if show("a busy node", busy, both_s - idle_peer_s, seconds, cpus) and ok else 1


if __name__ == "__main__":
    sys.exit(main())
