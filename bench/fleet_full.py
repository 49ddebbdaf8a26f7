# SPDX-License-Identifier: Apache-2.0
"""All figures of the fleet protocol; above all the whole fleet against two real aggregators.

    python -m bench.fleet_full                      all figures (ten minutes; 100,000 nodes, 5 GB)
    python -m bench.fleet_full --throughput         only the rates, each in less than two minutes
    python -m bench.fleet_full --throughput --times 3

The rate with proofs is measured in two steps, because in production the nodes' CPUs make the
reports, not the servers'. The first step is valid for a day (a batch is a day) and runs if needed:

    python -m bench.fleet_full prepare [DIR] --nodes 100000   the report of each node, into files
    python -m bench.fleet_full measure [DIR]                  upload, verify, sum: the timed part

`prepare` creates the parties, the roster and each node's report (a separate key, shares and proof;
no report is used twice), with dropouts, one-sided losses, stragglers and malicious nodes. `measure`
starts leader and helper as processes, uploads the files over TLS 1.3 through a relay without keys
(its cost is on the same cores and in the timed part), waits until each report is verified or
refused and durable at both, and compares the sums with the expected ones.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.fleet_services import SERVE, cost_of, status
from sonde.fleet import node, provision
from sonde.fleet.evaluation import simulated_nodes, simulation
from sonde.fleet.evaluation.population import Population
from sonde.fleet.roster import Roster
from sonde.fleet.store import Store
from sonde.fleet.task import Task
from sonde.fleet.wire import length_prefixed

DAY_S = 86_400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", nargs="?", choices=("all", "prepare", "measure"), default="all")
    parser.add_argument("directory", nargs="?", type=Path, default=Path("build/fleet"))
    parser.add_argument("--throughput", action="store_true", help="only the two rates")
    parser.add_argument("--times", type=int, default=1, help="repetitions of the rates")
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--buckets", type=int, default=4096)
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--dropouts", type=float, default=0.3)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--together", type=int, default=32, help="reports in one request")
    args = parser.parse_args()
    {"prepare": prepare, "measure": measure, "all": run_all}[args.step](args)


def run_all(args: argparse.Namespace) -> None:
    """All figures in sequence, each in a separate process, as when it is run alone."""
    if not prepared_today(args):
        shutil.rmtree(args.directory, ignore_errors=True)
        prepare(args)
    for _ in range(args.times):
        print("\n== 100,000 nodes, proved, end to end over TLS ==", flush=True)
        measure(args)
        print("\n== 100,000 nodes, without proofs ==", flush=True)
        _run("-m", "sonde", "fleet", "simulate", "--unproved", "--nodes", str(args.nodes))
    if args.throughput:
        return
    print("\n== a node's wire; upload to verified at 600 uploads/s ==", flush=True)
    _run("-m", "bench.fleet_services", "--reports", "8000", "--rate", "600")
    _run("-m", "bench.fleet", "--skip", "scale")
    print("\n== attacks ==", flush=True)
    _run("-m", "sonde", "fleet", "simulate", "--nodes", "2000", "--attacks")


def _run(*command: str) -> None:
    subprocess.run([sys.executable, *command], check=True)


def prepared_today(args: argparse.Namespace) -> bool:
    try:
        made = json.loads((args.directory / "truth.json").read_text())["scenario"]
    except (OSError, ValueError):
        return False
    today_s = int(time.time()) // DAY_S * DAY_S
    found = made["start_s"], made["nodes"], made["buckets"]
    return bool(found == (today_s, args.nodes, args.buckets))


# --- the nodes' part, not timed ------------------------------------------------------------------


def prepare(args: argparse.Namespace) -> None:
    now = int(time.time())
    scenario = simulated_nodes.Scenario(
        args.nodes, args.buckets, args.tenants, dropouts=args.dropouts, start_s=now - now % DAY_S
    )
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(free.getsockname()[1])
    task = replace(
        simulation.make_deployment(scenario).task,
        release_s=DAY_S,
        period_s=DAY_S,
        leader_url=f"https://127.0.0.1:{ports[0]}",
        helper_url=f"https://127.0.0.1:{ports[1]}",
    )
    task = provision.provision(args.directory, task, ["relay"])
    rng = np.random.default_rng(scenario.seed)
    population = Population.draw(scenario.nodes, scenario.buckets, scenario.tenants, rng)
    roster = Roster(
        {
            simulated_nodes.identity_of(scenario, number).public: f"tenant-{tag}"
            for number, tag in enumerate(population.tenant)
        }
    )
    for role in ("leader", "helper"):
        roster.save(args.directory / role / "roster.json")
    present = np.flatnonzero(rng.random(scenario.nodes) >= scenario.dropouts)
    samples, fault_draws = population.sample(12.0, rng), rng.random(scenario.nodes)
    expected = np.zeros(scenario.buckets, dtype=np.int64)
    before = time.process_time()
    with (args.directory / "uploads").open("wb") as file:
        for at in range(0, len(present), simulated_nodes.PORTION_NODES):
            chunk = present[at : at + simulated_nodes.PORTION_NODES]
            made, honest = simulated_nodes.make_uploads(
                scenario, task, chunk, samples, fault_draws, 1
            )
            np.add.at(expected, samples[honest], 1)
            file.writelines(length_prefixed(report) for report in made)
        file.flush()
        os.fsync(file.fileno())  # otherwise the parties' syncs wait for these 5 GB
    each_ms = 1000 * (time.process_time() - before) / len(present)
    known = {"sent": len(present), "node_ms": each_ms, "expected": expected.tolist()}
    (args.directory / "truth.json").write_text(json.dumps({**known, "scenario": asdict(scenario)}))
    print(f"{len(present)} reports of {args.nodes} nodes, {each_ms:.2f} ms CPU each")


# --- the servers' part, timed --------------------------------------------------------------------


def measure(args: argparse.Namespace) -> None:
    truth = json.loads((args.directory / "truth.json").read_text())
    task = Task.load(args.directory / "leader" / "task.json")
    for role in ("leader", "helper"):  # each measurement from an empty state
        for left in (args.directory / role).glob("state.sqlite*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    parties = {}
    for name in ("helper", "leader"):
        parties[name] = party = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(args.directory / name), "1"], stdout=subprocess.PIPE
        )
        assert party.stdout is not None
        party.stdout.readline()
    with (args.directory / "uploads").open("rb") as file:  # from memory, as from a network
        while file.read(8 << 20):
            pass
    print(f"load before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    try:
        relay_and_wait(args, task, truth, parties)
    finally:
        for process in parties.values():
            process.terminate()
            process.wait()
    compare(args.directory, task, truth)


Parties = dict[str, "subprocess.Popen[bytes]"]
"""The processes of both aggregators, by role."""


def relay_and_wait(
    args: argparse.Namespace, task: Task, truth: dict[str, Any], parties: Parties
) -> None:
    tls = provision.client_tls(args.directory / "nodes" / "0000")
    bundle = provision.Credentials.load(args.directory / "leader")
    bodies, lock = requests(args.directory / "uploads", args.together), threading.Lock()
    answers: Counter[str] = Counter()

    def relay() -> None:
        with node.UploadConnection(task, tls) as uplink:
            while True:
                with lock:
                    body = next(bodies, None)
                if body is None:
                    return
                receipts = uplink.send(body)
                with lock:
                    answers.update(r.reason for r in receipts if not r.accepted)
                    answers["accepted"] += sum(r.accepted for r in receipts)

    before = time.process_time()
    began = time.perf_counter()
    relays = [threading.Thread(target=relay) for _ in range(args.connections)]
    for thread in relays:
        thread.start()
    for thread in relays:
        thread.join()
    uploaded_s = time.perf_counter() - began
    client_ms = 1000 * (time.process_time() - before) / truth["sent"]
    while status(task, bundle)["waiting"]:
        time.sleep(0.1)
    whole_s = time.perf_counter() - began
    found = status(task, bundle)
    verified = sum(found["verified"].values())
    waits = np.repeat([w for _, w in found["latency_s"]], [n for n, _ in found["latency_s"]])
    print(f"{truth['sent']} reports sent in {uploaded_s:.1f} s; answers: {dict(answers)}")
    print(
        f"{verified} verified, summed and durable at both after {whole_s:.1f} s: "
        f"{verified / whole_s:,.0f} verified reports/s ({truth['sent'] / whole_s:,.0f} handled/s)"
    )
    print(f"refused, as the leader counts: {found['refused']}")
    print(
        f"upload to verified: median {np.median(waits):.2f} s, p90 {np.quantile(waits, 0.9):.2f} s"
        " (of the oldest report of each job: an upper bound)"
    )
    print(f"relay: {client_ms:.2f} ms CPU a report (inside the timed part)")
    for name, process in parties.items():
        print(cost_of(name, process.pid, truth["sent"]))


def requests(path: Path, together: int) -> Iterator[memoryview]:
    """Yields request bodies of `together` length-prefixed reports."""
    with path.open("rb") as file:
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    begin = at = held = 0
    while at < len(whole):
        at += 4 + int.from_bytes(whole[at : at + 4], "big")
        held += 1
        if held == together or at == len(whole):
            yield whole[begin:at]
            begin, held = at, 0


def compare(directory: Path, task: Task, truth: dict[str, Any]) -> None:
    """Compares the sum of both shares before noise, which no single party can compute, with the
    expected sums.
    """
    stores = [Store(directory / role / "state.sqlite", task) for role in ("leader", "helper")]
    start_s = truth["scenario"]["start_s"]
    batches = [store.batch(start_s) for store in stores]
    for store in stores:
        store.close()
    sums = task.aggregation().unshard([batch.share for batch in batches])
    agree = batches[0].checksum == batches[1].checksum
    print(
        f"sums before noise: {'exact' if sums == truth['expected'] else 'WRONG'}; "
        f"the parties {'agree' if agree else 'DISAGREE'} on the reports"
    )


if __name__ == "__main__":
    main()
