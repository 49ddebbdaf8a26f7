# SPDX-License-Identifier: Apache-2.0
"""Simulates a whole fleet through the real protocol in one process: real shares, encryption,
signatures, proofs.

Reports are made (the nodes' cost), then verified and summed by both parties (timed separately), one
portion at a time, so that memory does not grow with the fleet. Network and disk are left out;
`bench/fleet_services.py` measures the services.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np

from sonde._fleet import signed_by
from sonde.fleet import hpke, unproved
from sonde.fleet.collector import combine_shares
from sonde.fleet.evaluation.engine import Engine, open_engine
from sonde.fleet.evaluation.population import Population, grid
from sonde.fleet.evaluation.simulated_nodes import (
    HOUR_S,
    PORTION_NODES,
    UNPROVED_PORTION_NODES,
    Scenario,
    make_portion,
)
from sonde.fleet.noise import plan
from sonde.fleet.result import Result
from sonde.fleet.session import SESSION_S, Sessions
from sonde.fleet.task import Privacy, Task
from sonde.fleet.verification import (
    AggregatorKeys,
    BlockResult,
    checksum,
    verify_as_helper,
    verify_as_leader,
)
from sonde.fleet.wire import Item, Malformed, Reply, Report

__all__ = ["Scenario", "SimulationResult", "open_engine", "run"]

Progress = Callable[[int, int], None]
"""Called after each portion with (nodes done, nodes in all)."""


@dataclass
class SimulationResult:
    """The figures of a simulation.

    sent           nodes that reported; `verified`: reports that the leader counted
    refused        reports by reason
    exact          whether the sums before noise are those of the honest nodes
    agreed         whether both parties counted the same reports
    node_s         CPU seconds that making the reports took
    server_s       seconds of both parties' verification and sum; `server_cpu_s`: CPU seconds
    hello_s        seconds of opening the nodes' sessions at both parties (without proofs)
    report_bytes   of the longest report; `peak_bytes`: of this process's memory
    top_error      what `top_error` gives for the release
    """

    scenario: Scenario
    release: Result
    sent: int
    verified: int
    refused: Counter[str]
    exact: bool
    agreed: bool
    node_s: float
    server_s: float
    server_cpu_s: float
    hello_s: float
    report_bytes: int
    peak_bytes: int
    top_error: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Reports verified and summed in a second, the opening of their sessions included.

        A session serves a week of hourly reports; each report counts that share of its cost.
        """
        total_s = self.server_s + self.hello_s * HOUR_S / SESSION_S
        return self.verified / total_s if total_s else 0.0

    def figures(self) -> dict[str, Any]:
        """What `sonde fleet simulate` writes as JSON, by name."""
        return {
            "nodes": self.scenario.nodes,
            "buckets": self.scenario.buckets,
            "kind": self.scenario.kind,
            "sent": self.sent,
            "verified": self.verified,
            "refused": dict(self.refused),
            "exact_before_noise": self.exact,
            "parties_agree": self.agreed,
            "verified_per_s": self.rate,
            "server_cpu_ms": 1000 * self.server_cpu_s / max(1, self.sent),
            "without_sessions_per_s": self.verified / self.server_s if self.server_s else 0.0,
            "session_ms": 1000 * self.hello_s / max(1, self.sent),
            "node_ms": 1000 * self.node_s / max(1, self.sent),
            "report_bytes": self.report_bytes,
            "peak_bytes": self.peak_bytes,
            "privacy": self.release.privacy_guarantee(),
            "top_error": self.top_error,
        }

    def summary(self) -> str:
        """The figures as text."""
        refused = ", ".join(f"{count} {reason}" for reason, count in sorted(self.refused.items()))
        lines = [
            f"{self.scenario.nodes} nodes, {self.scenario.buckets} buckets, "
            f"{'proved' if self.scenario.kind != 'plain' else 'NOT proved'}",
            f"sent {self.sent}, verified {self.verified}; refused: {refused or 'none'}",
            f"sums before noise: {'exact' if self.exact else 'WRONG'}; "
            f"the parties {'agree' if self.agreed else 'DISAGREE'} on the reports",
            f"{'verified' if self.scenario.kind != 'plain' else 'authenticated'} "
            f"and summed by both parties: {self.rate:,.0f} reports/s "
            f"({1000 * self.server_cpu_s / max(1, self.sent):.2g} ms CPU each)",
            f"node: {1000 * self.node_s / max(1, self.sent):.2f} ms CPU, "
            f"{self.report_bytes / 1000:.1f} kB a report; "
            f"peak memory {self.peak_bytes / 1e6:.0f} MB",
            f"privacy: {self.release.privacy_guarantee()}",
            "top-50 error by the noise: "
            + ", ".join(f"{name} {value:.2%}" for name, value in self.top_error.items()),
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Deployment:
    """The task and both aggregators' keys."""

    task: Task
    leader: AggregatorKeys
    helper: AggregatorKeys


@dataclass
class _BlockOutcome:
    """Both parties' results for a block of uploads."""

    leader: BlockResult
    helper: BlockResult
    refused: Counter[str]


def verify_block(deployment: _Deployment, start_s: int, uploads: Sequence[bytes]) -> _BlockOutcome:
    """All work of both aggregators for a block of uploads to the batch that begins at `start_s`,
    except network and disk.
    """
    refused: Counter[str] = Counter()
    reports = []
    for upload in uploads:
        try:
            report = Report.decode(upload)
        except Malformed:
            refused["malformed"] += 1
            continue
        if deployment.task.batch_of(report.time_s) != start_s:
            refused["late"] += 1
        elif not signed_by(report.node, report.signature, report.signed()):
            refused["forged"] += 1
        else:
            reports.append(report)
    helper_block = BlockResult(deployment.task.aggregation().zero())

    def exchange(items: list[Item]) -> list[Reply]:
        nonlocal helper_block
        helper_block, replies = verify_as_helper(deployment.task, deployment.helper, items)
        return replies

    leader_block = verify_as_leader(deployment.task, deployment.leader, reports, exchange)
    refused.update(leader_block.refused.values())
    return _BlockOutcome(leader_block, helper_block, refused)


@dataclass(frozen=True)
class _Parties:
    """Both aggregators of a task without proofs."""

    leader: unproved.Party
    helper: unproved.Party
    start_s: int

    @staticmethod
    def of(deployment: _Deployment, start_s: int) -> _Parties:
        task = deployment.task
        parties = [
            unproved.Party(task, Sessions(task, role, keys.hpke_private), start_s)
            for role, keys in ((hpke.LEADER, deployment.leader), (hpke.HELPER, deployment.helper))
        ]
        return _Parties(parties[0], parties[1], start_s)

    def open(self, hellos: Sequence[bytes]) -> None:
        """Opens nodes' sessions at both parties."""
        for hello in hellos:
            for party in (self.leader, self.helper):
                reason = party.sessions.admit(hello, lambda node: True, self.start_s + 60)
                assert not reason, reason


def add_bundle(parties: _Parties, bundle: bytes) -> _BlockOutcome:
    """All work of both aggregators for a bundle of reports without proofs, except the network."""
    helper_block: list[unproved.BundleResult] = []

    def query(body: bytes) -> bytes:
        added, verdict = unproved.add_as_helper(parties.helper, body)
        helper_block.append(added)
        return verdict

    leader_block = unproved.add_as_leader(parties.leader, bundle, query)
    blocks = [
        BlockResult(added.aggregate, added.accepted) for added in (leader_block, helper_block[0])
    ]
    return _BlockOutcome(blocks[0], blocks[1], leader_block.refused)


def run(scenario: Scenario, engine: Engine, progress: Progress | None = None) -> SimulationResult:
    """Simulates one release with one report per node."""
    rng = np.random.default_rng(scenario.seed)
    population = Population.draw(scenario.nodes, scenario.buckets, scenario.tenants, rng)
    deployment = make_deployment(scenario)
    task = deployment.task
    present = rng.random(scenario.nodes) >= scenario.dropouts
    nodes = np.flatnonzero(present)
    samples = population.sample(12.0, rng)
    fault_draws = rng.random(scenario.nodes)
    expected = np.zeros(scenario.buckets, dtype=np.int64)
    aggregation = task.aggregation()
    leader_block, helper_block = aggregation.zero(), aggregation.zero()
    accepted: tuple[list[bytes], list[bytes]] = ([], [])
    refused: Counter[str] = Counter()
    node_s = server_s = server_cpu_s = hello_s = 0.0
    report_bytes = 0
    parties = _Parties.of(deployment, scenario.start_s)
    portion_nodes = PORTION_NODES if scenario.kind != "plain" else UNPROVED_PORTION_NODES
    verify: Callable[[Any], _BlockOutcome] = (
        partial(verify_block, deployment, scenario.start_s)
        if scenario.kind != "plain"
        else partial(add_bundle, parties)
    )
    for at in range(0, len(nodes), portion_nodes):
        portion = nodes[at : at + portion_nodes]
        before = time.process_time()
        made = make_portion(scenario, task, portion, samples, fault_draws, engine.workers)
        node_s += time.process_time() - before
        np.add.at(expected, samples[made.honest], 1)
        report_bytes = max(report_bytes, made.report_bytes)
        began = time.perf_counter()
        parties.open(made.hellos)
        hello_s += time.perf_counter() - began
        began, began_cpu = time.perf_counter(), time.process_time()
        shares: tuple[list[bytes], list[bytes]] = ([leader_block], [helper_block])
        for done in engine.map(verify, made.blocks):
            shares[0].append(done.leader.aggregate)
            shares[1].append(done.helper.aggregate)
            accepted[0].extend(done.leader.accepted)
            accepted[1].extend(done.helper.accepted)
            refused.update(done.refused)
        leader_block, helper_block = (aggregation.merge(party) for party in shares)
        server_s += time.perf_counter() - began
        server_cpu_s += time.process_time() - began_cpu
        if progress is not None:
            progress(at + len(portion), len(nodes))
    exact = np.array_equal(aggregation.unshard([leader_block, helper_block]), expected)
    mechanism = task.mechanism
    noised = [
        aggregation.add_noise(share, mechanism.sample(scenario.buckets))
        for share in (leader_block, helper_block)
    ]
    release = combine_shares(task, scenario.start_s, noised)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return SimulationResult(
        scenario,
        release,
        len(nodes),
        len(accepted[0]),
        refused,
        exact,
        checksum(accepted[0]) == checksum(accepted[1]),
        node_s,
        server_s,
        server_cpu_s,
        hello_s,
        report_bytes,
        peak,
        top_error(expected, np.array([row.count for row in release.rows])),
    )


def top_error(exact: Any, released: Any, count: int = 50) -> dict[str, float]:
    """Relative error of the largest buckets: median and 90th percentile."""
    top = np.argsort(exact)[::-1][:count]
    top = top[exact[top] > 0]
    if not len(top):
        return {"median": 0.0, "p90": 0.0}
    error = np.abs(released[top] - exact[top]) / exact[top]
    return {"median": float(np.median(error)), "p90": float(np.quantile(error, 0.9))}


def make_deployment(scenario: Scenario) -> _Deployment:
    """A task of one-hour releases and both parties' keys."""
    leader, helper, collector = (
        hpke.generate_key_pair(),
        hpke.generate_key_pair(),
        hpke.generate_key_pair(),
    )
    mechanism = plan(1, scenario.epsilon, scenario.delta)
    applications, kernels = grid(scenario.buckets)
    task = Task(
        name="simulated",
        kind=scenario.kind,
        buckets=scenario.buckets,
        max_samples=1,
        period_s=HOUR_S,
        release_s=HOUR_S,
        grace_s=HOUR_S,
        min_batch=1,
        privacy=Privacy("gpu", mechanism.kind, mechanism.scale, scenario.delta, scenario.epsilon),
        leader_key=leader[1],
        helper_key=helper[1],
        collector_key=collector[1],
        space={"applications": applications, "kernels": kernels},
    )
    verify_key = sha256(b"verify key" + leader[0].encode()).digest()
    return _Deployment(
        task, AggregatorKeys(leader[0], verify_key), AggregatorKeys(helper[0], verify_key)
    )
