# SPDX-License-Identifier: Apache-2.0
"""Fleet at scale: verified reports per second, exactness, memory, errors by epsilon, cost of a
node.

python bench/fleet.py                     a fleet of 10,000
python bench/fleet.py --nodes 100000      the full figure (minutes; two cores)
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace

import numpy as np

from sonde._fleet import Aggregation
from sonde.fleet import hpke
from sonde.fleet.buckets import BucketSpace
from sonde.fleet.budget import releases_a_year
from sonde.fleet.evaluation import accuracy, simulation
from sonde.fleet.evaluation.local_deployment import small_task
from sonde.fleet.evaluation.population import Population
from sonde.fleet.node import make_report
from sonde.fleet.roster import Identity
from sonde.fleet.sampling import KernelRecord, Sampler
from sonde.fleet.task import chunk_length

WEEK_S = 7 * 86_400
EPSILONS = [0.1, 0.5, 1.0, 2.0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--buckets", type=int, default=4096)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--engine", default="local")
    parser.add_argument("--skip", nargs="*", default=[], choices=["scale", "errors", "node"])
    args = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    if "node" not in args.skip:
        node(args.buckets)
    if "errors" not in args.skip:
        errors()
    if "scale" not in args.skip:
        shares_only(args.buckets, args.workers)
        for kind in ("plain", "histogram"):
            scale(args.nodes, args.buckets, kind, args.engine, args.workers)


def scale(nodes: int, buckets: int, kind: str, engine: str, workers: int) -> None:
    """The whole protocol except network and disk: encryption, signatures, proofs, sums."""
    scenario = simulation.Scenario(nodes, buckets, 1000, kind=kind)  # type: ignore[arg-type]
    began = time.perf_counter()
    with simulation.open_engine(engine, workers) as running:
        outcome = simulation.run(scenario, running)
    print(f"\n== {kind}, {engine} engine, {workers} workers, 30 % dropouts, 5 % one-sided ==")
    print(outcome.summary())
    print(f"load {os.getloadavg()[0]:.2f}; whole run {time.perf_counter() - began:.0f} s")


def shares_only(buckets: int, workers: int, reports: int = 4000) -> None:
    """Verification and summing alone: no encryption, no signatures."""
    print(f"\n== shares to sums, both parties, {buckets} buckets, {workers} threads ==")
    for kind in ("plain", "histogram"):
        aggregation = Aggregation(kind, buckets, 1, chunk_length(buckets), b"bench")
        count = reports * (10 if kind == "plain" else 1) // 4
        ids, key = [os.urandom(16) for _ in range(count)], os.urandom(32)
        made = aggregation.shard(ids, [[i % buckets] for i in range(count)], workers)
        publics, leaders, helpers = (list(part) for part in zip(*made, strict=True))
        rates = []
        for _ in range(3):
            began = time.perf_counter()
            pending = aggregation.begin(key, ids, publics, leaders, workers)
            messages = [message or b"" for message in pending.messages]
            replies, _, theirs = aggregation.check(key, ids, publics, helpers, messages, workers)
            _, ours = pending.finish(replies, workers)
            rates.append(count / (time.perf_counter() - began))
            assert sum(aggregation.unshard([ours, theirs])) == count
        print(f"{kind:<10} {sorted(rates)[1]:>10,.0f} reports/s (median of 3)")


def errors() -> None:
    """Relative error of the top 50 of 4,096 buckets and of per-tenant classes; 100,000 nodes."""
    rng = np.random.default_rng(1)
    population = Population.draw(100_000, 4096, 1000, rng)
    print("\n== top-50 relative error: one day's release, an hourly sample of each of 100,000 ==")
    header = f"{'':<38} {'noise median':>12} {'p90':>8} {'total median':>13} {'p90':>8}"
    print(header)
    lines = accuracy.by_epsilon(population, 24, EPSILONS, rng)
    lines.append(accuracy.yearly(population, 168, releases_a_year(WEEK_S), 8.0, rng))
    lines.append(accuracy.yearly(population, 24, 365, 8.0, rng))
    for line in lines:
        show(line)
    tenants_table(rng)


def tenants_table(rng: np.random.Generator) -> None:
    """A line per fleet composition: tenant sizes by Zipf's law, by concentration (share of a
    tenant's nodes on its main application).
    """
    print("\n== per tenant, ε = 1, 64 classes, one day; median class, bias of the cap included ==")
    print(
        f"{'nodes':>9} {'tenants':>8} {'conc.':>6} {'cap':>5} {'total':>7} {'noise':>7} "
        f"{'best cap':>9} {'total':>7}"
    )
    for nodes, fleets in ((100_000, 5), (1_000_000, 1)):
        for tenants in (1000, 2000, 5000, 20_000, 100_000):
            for concentration in (0.0, 0.3, 0.7):
                mix = accuracy.error_by_mix(nodes, tenants, concentration, 24, 1.0, rng, fleets)
                print(
                    f"{nodes:>9} {tenants:>8} {concentration:>6.0%} {mix.cap:>5} {mix.total:>7.1%} "
                    f"{mix.noise:>7.1%} {mix.best_cap:>9} {mix.best:>7.1%}"
                    + ("" if mix.total > 0.1 else "  within 10 %"),
                    flush=True,
                )


def show(line: accuracy.ErrorSummary) -> None:
    print(
        f"{line.name:<38} {line.noise_median:>12.2%} {line.noise_p90:>8.2%} "
        f"{line.total_median:>13.2%} {line.total_p90:>8.2%}"
    )


def node(buckets: int, rounds: int = 50) -> None:
    """CPU of one report: classification, proof, encryption, signature."""
    space = BucketSpace(64, buckets // 64, 1)
    keys = [hpke.generate_key_pair()[1] for _ in range(2)]
    task = replace(small_task(buckets), leader_key=keys[0], helper_key=keys[1])
    names = ["sm90_gemm", "flash_fwd", "ncclAllReduce", "vectorized_elementwise"]
    records = [KernelRecord(names[i % 4], i * 1000, 900) for i in range(1000)]
    identity, cost, seen = Identity(), [], []
    for _ in range(rounds):
        before = time.process_time()
        sampler = Sampler(space, 0, 1_000_000, 1)
        for record in records:
            sampler.observe(record)
        buckets_seen = sampler.buckets()
        seen.append(time.process_time() - before)
        before = time.process_time()
        body = make_report(task, identity, buckets_seen, 1_800_000_000).encode()
        cost.append(time.process_time() - before)
    print("\n== a node, one report an hour ==")
    print(
        f"report: {1000 * float(np.median(cost)):.2f} ms CPU, {len(body) / 1000:.1f} kB; "
        f"sampling 1,000 kernel records: {1000 * float(np.median(seen)):.2f} ms"
    )


if __name__ == "__main__":
    main()
