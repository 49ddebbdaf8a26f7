# SPDX-License-Identifier: Apache-2.0
"""The two aggregators as processes over TLS on loopback: rate, latency, a node's CPU with its
upload.

Nodes, leader and helper share this machine's cores, so the rate is a lower bound.

    python bench/fleet_services.py --reports 4000
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from sonde.fleet import node, provision
from sonde.fleet.task import Privacy, Task

SERVE = (
    "import sys, pathlib; from sonde.fleet.service import serve; "
    "serve(pathlib.Path(sys.argv[1]), int(sys.argv[2]), lambda url: print(url, flush=True))"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reports", type=int, default=4000)
    parser.add_argument("--buckets", type=int, default=4096)
    parser.add_argument("--rate", type=float, default=0, help="uploads/s; 0: as fast as they go")
    parser.add_argument("--connections", type=int, default=4)
    args = parser.parse_args()
    with TemporaryDirectory() as directory:
        measure(Path(directory), args)


def measure(directory: Path, args: argparse.Namespace) -> None:
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(free.getsockname()[1])
    task = provision.provision(
        directory,
        Task(
            "bench",
            "histogram",
            args.buckets,
            1,
            3600,
            3600,
            3600,
            1,
            Privacy("gpu", "laplace", 1.0, 1e-6, 8.0),
            f"https://127.0.0.1:{ports[0]}",
            f"https://127.0.0.1:{ports[1]}",
        ),
        ["t"] * args.reports,
    )
    parties = {}
    for name in ("helper", "leader"):
        parties[name] = party = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(directory / name), "1"], stdout=subprocess.PIPE
        )
        assert party.stdout is not None
        party.stdout.readline()
    try:
        drive(directory, task, args, parties)
    finally:
        for process in parties.values():
            process.terminate()
            process.wait()


Parties = dict[str, "subprocess.Popen[bytes]"]
"""The processes of both aggregators, by role."""


def drive(directory: Path, task: Task, args: argparse.Namespace, parties: Parties) -> None:
    nodes = [provision.load_node(directory / "nodes" / f"{n:04}") for n in range(args.reports)]
    tls = provision.client_tls(directory / "nodes" / "0000")
    now = int(time.time())
    bodies = [
        r.encode()
        for r in node.make_reports(
            task, nodes, [[n % 64] for n in range(args.reports)], now, os.cpu_count() or 1
        )
    ]
    costs = []
    for body in bodies[:20]:  # a node's upload: a new connection and handshake each
        before = time.thread_time()
        assert node.upload(task, body, tls).accepted
        costs.append(time.thread_time() - before)
    print(
        f"upload with a fresh TLS 1.3 connection: {1000 * float(np.median(costs)):.2f} ms CPU, "
        f"{len(bodies[0]) / 1000:.1f} kB"
    )
    rest, lock = iter(bodies[20:]), threading.Lock()
    began = time.perf_counter()
    sent = [0]

    def gateway(_: int) -> None:
        url = urlsplit(task.leader_url)
        connection = http.client.HTTPSConnection(url.hostname or "", url.port, context=tls)
        while True:
            with lock:
                body = next(rest, None)
                sent[0] += 1
                due = began + sent[0] / args.rate if args.rate else 0
            if body is None:
                return
            time.sleep(max(0.0, due - time.perf_counter()))
            connection.request("POST", f"/tasks/{task.id.hex()}/reports", body)
            answer = connection.getresponse()
            assert answer.status == 201, answer.read()
            answer.read()

    with ThreadPoolExecutor(args.connections) as pool:
        list(pool.map(gateway, range(args.connections)))
    uploaded_s = time.perf_counter() - began
    bundle = provision.Credentials.load(directory / "leader")
    while True:
        found = status(task, bundle)
        if sum(found["verified"].values()) >= args.reports:
            break
        time.sleep(0.1)
    whole_s = time.perf_counter() - began
    count = args.reports - 20
    waits = np.repeat([w for _, w in found["latency_s"]], [n for n, _ in found["latency_s"]])
    print(
        f"{count} uploads in {uploaded_s:.1f} s ({count / uploaded_s:,.0f}/s); "
        f"all verified and durable at both after {whole_s:.1f} s ({count / whole_s:,.0f}/s)"
    )
    print(
        f"upload to verified: median {np.median(waits):.2f} s, p90 {np.quantile(waits, 0.9):.2f} s"
        f" (of the oldest report of each job: an upper bound); load {os.getloadavg()[0]:.2f}"
    )
    for name, process in parties.items():
        print(cost_of(name, process.pid, args.reports))


def cost_of(name: str, pid: int, reports: int) -> str:
    """CPU and peak memory of a party."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    memory = Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]
    return f"{name}: {1000 * cpu_s / reports:.2f} ms CPU a report, peak {int(memory) / 1024:.0f} MB"


def status(task: Task, bundle: provision.Credentials) -> dict[str, Any]:
    url = urlsplit(task.leader_url)
    connection = http.client.HTTPSConnection(
        url.hostname or "", url.port, context=bundle.client_tls()
    )
    connection.request(
        "GET",
        f"/tasks/{task.id.hex()}/status",
        headers={"Authorization": f"Bearer {bundle.operator_token}"},
    )
    found: dict[str, Any] = json.loads(connection.getresponse().read())
    return found


if __name__ == "__main__":
    main()
