# SPDX-License-Identifier: Apache-2.0
"""What an agent costs its node, everything on, beside a busy machine: one table.

    python -m bench.service.node [--seconds 90] [--with memory,syscalls,traces] [--out FILE]

A real agent sends to a real server through a proxy that counts bytes (headers of HTTP included,
those of TCP not). The load of `bench.telemetry` (switches, a disk, a socket, forks, Python) runs
beside it. The agent and its children are in a control group: CPU time and memory are the kernel's
account, BPF maps included. Programs run on the account of what they interrupt: their time is
separate, as the kernel counts it (bpf_stats_enabled). Root.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from bench.cgroup import Cgroup
from bench.load import machine_s
from bench.telemetry import LOAD, kernel_statistics
from served import Server

BOUNDS: Final = {"node_share": 0.005, "memory_bytes": 128 << 20}
BYTES_A_CORE, BYTES_A_NODE = 120.0, 2_000.0
"""Of network, a second."""
SETTLE_S: Final = 20.0
"""From its first chunk on: unwind tables and names of what runs already are made once."""
OPTIONS: Final = ("group_pressure", "memory", "syscalls", "traces")


class Proxy:
    """Passes connections on to a port of loopback, and counts what is sent to it."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.sent_bytes = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listening.accept()
            server = socket.create_connection(("127.0.0.1", self._target))
            for pair in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._copy, args=pair, daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if counts:
                    self.sent_bytes += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def programs_s(pid: int) -> float:
    """Run time of the BPF programs that a process holds, each once."""
    found: dict[str, int] = {}
    for info in Path(f"/proc/{pid}/fdinfo").iterdir():
        with suppress(OSError):
            lines = dict(
                line.split(":\t", 1) for line in info.read_text().splitlines() if ":\t" in line
            )
            if "run_time_ns" in lines:
                found[lines["prog_id"]] = int(lines["run_time_ns"])
    return sum(found.values()) / 1e9


def resident_bytes(group: Cgroup) -> int:
    """Proportional set size of all processes of the group."""
    total = 0
    for pid in (group._memory / "cgroup.procs").read_text().split():
        with suppress(OSError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            if found := re.search(r"^Pss:\s+(\d+)", text, re.M):  # none: it ends just now
                total += int(found[1]) << 10
    return total


def measured(options: list[str], seconds: float) -> dict[str, Any]:
    """The table of one configuration."""
    environment = os.environ | {f"SONDE_{name.upper()}": "1" for name in options}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        (folder / "store").mkdir(mode=0o700)
        group = Cgroup()
        with Server(folder / "store") as server, kernel_statistics():
            proxy = Proxy(server.port)
            load_s = seconds + SETTLE_S + 60
            load = subprocess.Popen(
                [sys.executable, "-c", LOAD, str(load_s), name], start_new_session=True
            )
            agent = subprocess.Popen(
                [
                    *(sys.executable, "-m", "sonde", "agent", "--node", "bench"),
                    *("--server", f"http://127.0.0.1:{proxy.port}"),
                    *("--spool", str(folder / "spool"), "--prometheus", "127.0.0.1:0"),
                ],
                env=environment,
                preexec_fn=group.enter,
                stderr=(folder / "agent.log").open("w"),
            )
            try:
                while not server.ask("nodes", **{"from": 0}):
                    if agent.poll() is not None:
                        raise SystemExit((folder / "agent.log").read_text())
                    time.sleep(0.5)
                time.sleep(SETTLE_S)
                before = group.cpu_s(), programs_s(agent.pid), proxy.sent_bytes, machine_s()
                began_s, began_wall_s, resident = time.monotonic(), time.time(), 0
                while time.monotonic() < began_s + seconds:
                    group.look()
                    resident = max(resident, resident_bytes(group))
                    time.sleep(2)
                after = group.cpu_s(), programs_s(agent.pid), proxy.sent_bytes, machine_s()
                passed_s = time.monotonic() - began_s
                time.sleep(6)
                rows = rows_of(server, began_wall_s, began_wall_s + passed_s)
            finally:
                agent.send_signal(signal.SIGTERM)
                agent.wait(60)
                os.killpg(load.pid, signal.SIGKILL)
                load.wait()
        group.close()
    agent_s, bpf_s, sent, busy_s = (now - then for now, then in zip(after, before, strict=True))
    cpus = os.cpu_count() or 1
    return {
        "options": options,
        "seconds": round(passed_s, 1),
        "node_busy": round(busy_s / passed_s / cpus, 3),
        "agent_core_share": round(agent_s / passed_s, 4),
        "bpf_core_share": round(bpf_s / passed_s, 4),
        "node_share": round((agent_s + bpf_s) / passed_s / cpus, 4),
        "pss_bytes": resident,
        "memory_bytes": group.peak_bytes,
        "network_bytes_a_second": round(sent / passed_s),
        "network_bound": BYTES_A_CORE * cpus + BYTES_A_NODE,
        "rows_a_second": rows,
        "lost": rows.pop("lost"),
    }


def rows_of(server: Server, start_s: float, end_s: float) -> dict[str, float]:
    """Samples a second that arrived, and events lost."""
    given = {"from": start_s, "to": end_s}
    found = {
        kind: round(server.ask("totals", kind=kind, **given)["rows"] / (end_s - start_s), 1)
        for kind in ("cpu", "blocked", "runqueue")
    }
    lost: Counter[str] = Counter()
    for row in server.ask("losses", **given):
        lost[row["name"]] += row["value"]
    return found | {"lost": dict(lost)}


def main() -> int:
    """Print the table; 1 where a bound is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--with", dest="options", default="group_pressure,traces")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    options = [one for one in args.options.split(",") if one]
    if unknown := set(options) - set(OPTIONS):
        parser.error(f"no such option: {', '.join(sorted(unknown))}")
    load = os.getloadavg()[0]
    one = measured(options, args.seconds)
    found = {
        "machine": f"{os.cpu_count()} CPUs, {platform.release()}",
        "load_average": load,
        "runs": [one],
    }
    print(
        f"agent {one['agent_core_share']:.2%} of a core, BPF {one['bpf_core_share']:.2%}, "
        f"together {one['node_share']:.2%} of the node ({BOUNDS['node_share']:.1%}); memory "
        f"{one['memory_bytes'] / 1e6:.0f} MB with the kernel's, {one['pss_bytes'] / 1e6:.0f} "
        f"without ({BOUNDS['memory_bytes'] / 1e6:.0f}); "
        f"network {one['network_bytes_a_second']} B/s "
        f"({one['network_bound']:.0f})"
    )
    text = json.dumps(found, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    good = all(one[name] <= bound for name, bound in BOUNDS.items())
    return 0 if good and one["network_bytes_a_second"] <= one["network_bound"] else 1


if __name__ == "__main__":
    sys.exit(main())
