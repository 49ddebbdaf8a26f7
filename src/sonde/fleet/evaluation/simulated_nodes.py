# SPDX-License-Identifier: Apache-2.0
"""The nodes of a simulated fleet and their uploads: real keys, shares, encryption, signatures,
proofs.

Some nodes are absent, some reports lose one of their shares, some are late, some nodes lie.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from sonde._fleet import Aggregation
from sonde.fleet import hpke, unproved
from sonde.fleet.node import make_reports, sign
from sonde.fleet.roster import Identity
from sonde.fleet.session import Session
from sonde.fleet.task import Kind, Task, chunk_length
from sonde.fleet.wire import Report

HOUR_S = 3600
START_S = 1_800_000_000 // HOUR_S * HOUR_S
"""When the simulated batch begins: a full hour in January 2027, in seconds since 1970."""
PORTION_NODES = 1000
UNPROVED_PORTION_NODES = 2000
BUNDLE_REPORTS = 64
"""Reports without proofs in one bundle of a relay."""


@dataclass(frozen=True)
class Scenario:
    """A fleet and its faults. `dropouts` (that send nothing) is a share of all nodes; `one_sided`
    (one party's share is damaged), `stragglers` (of the batch before) and `liars` (that send more
    than they may) are shares of the remaining ones. `epsilon` and `delta` are of the one release.
    """

    nodes: int
    buckets: int
    tenants: int
    kind: Kind = "histogram"
    dropouts: float = 0.3
    one_sided: float = 0.05
    stragglers: float = 0.02
    liars: float = 0.01
    epsilon: float = 1.0
    delta: float = 1e-6
    seed: int = 1
    start_s: int = START_S


@dataclass(frozen=True)
class PortionUploads:
    """The uploads of a portion of the nodes.

    blocks         per block: its encoded reports, or a bundle of reports without proofs
    honest         the nodes whose report must be counted
    hellos         what opens the nodes' sessions, of reports without proofs
    report_bytes   of one report
    """

    blocks: list[Any]
    honest: list[int]
    hellos: list[bytes]
    report_bytes: int


def identity_of(scenario: Scenario, node: int) -> Identity:
    """The key of a simulated node, the same in every run of the scenario."""
    secret = scenario.seed.to_bytes(8, "big") + node.to_bytes(8, "big")
    return Identity(sha256(secret).digest())


def make_portion(
    scenario: Scenario, task: Task, nodes: Any, samples: Any, fault_draws: Any, workers: int
) -> PortionUploads:
    """The uploads of these nodes, in two blocks per worker or in bundles. `samples` (bucket
    indices) and `fault_draws` (in [0, 1): which fault a node has) are per node of the whole fleet.
    """
    if task.kind == "plain":
        return make_bundles(scenario, task, nodes, samples, fault_draws, workers)
    made, honest = make_uploads(scenario, task, nodes, samples, fault_draws, workers)
    size = -(-len(made) // (2 * workers))
    blocks = [made[b : b + size] for b in range(0, len(made), size)]
    return PortionUploads(blocks, honest, [], len(made[0]))


def make_bundles(
    scenario: Scenario, task: Task, nodes: Any, samples: Any, fault_draws: Any, threads: int
) -> PortionUploads:
    """Reports without proofs, through a relay. Lies cannot be detected there; these nodes send
    twice instead.
    """
    time_s = scenario.start_s + 60
    ids = [os.urandom(16) for _ in nodes]
    shares = task.aggregation().shard(ids, [[int(samples[n])] for n in nodes], threads)
    records, honest, hellos = [], [], []
    late = scenario.one_sided + scenario.stragglers  # draws below it: one-sided or late
    for node, id_, (_, leader, helper) in zip(nodes, ids, shares, strict=True):
        session = Session.open(task, identity_of(scenario, int(node)), time_s)
        hellos.append(session.hello)
        when_s = scenario.start_s - 60 if scenario.one_sided <= fault_draws[node] < late else time_s
        record = unproved.make_record(task, session, id_, when_s, leader, helper)
        if fault_draws[node] < scenario.one_sided / 2:  # the leader's share is damaged
            record = record[:40] + bytes(16) + record[56:]
        elif fault_draws[node] < scenario.one_sided:
            record = record[:-16] + bytes(16)
        elif fault_draws[node] >= late:
            honest.append(int(node))
        is_liar = late <= fault_draws[node] < late + scenario.liars
        records += [record, record] if is_liar else [record]
    starts = range(0, len(records), BUNDLE_REPORTS)
    groups = [records[at : at + BUNDLE_REPORTS] for at in starts]
    return PortionUploads(
        [unproved.bundle(task, group) for group in groups], honest, hellos, len(records[0])
    )


def make_uploads(
    scenario: Scenario, task: Task, nodes: Any, samples: Any, fault_draws: Any, threads: int
) -> tuple[list[bytes], list[int]]:
    """The portion's uploads with their faults, and the nodes whose report must be counted."""
    identities = [identity_of(scenario, int(n)) for n in nodes]
    buckets = [[int(samples[n])] for n in nodes]
    reports = make_reports(task, identities, buckets, scenario.start_s + 60, threads)
    late = scenario.one_sided + scenario.stragglers  # draws below it: one-sided or late
    lie = late + scenario.liars
    made, honest = [], []
    for node, identity, report in zip(nodes, identities, reports, strict=True):
        if fault_draws[node] < scenario.one_sided / 2:
            report = sign(identity, replace(report, leader=report.leader[:-1]))
        elif fault_draws[node] < scenario.one_sided:
            report = sign(identity, replace(report, helper=report.helper[:-1]))
        elif fault_draws[node] < late:
            report = sign(identity, replace(report, time_s=scenario.start_s - 60))
        elif fault_draws[node] < lie:
            report = overstated_report(task, identity, report)
        else:
            honest.append(int(node))
        made.append(report.encode())
    return made, honest


def overstated_report(task: Task, identity: Identity, report: Report, weight: int = 1000) -> Report:
    """A malicious report: bucket 0 counts `weight` times, with the best possible proof."""
    claim = [weight] + [0] * (task.buckets - 1)
    public, leader, helper = Aggregation.shard_dishonestly(
        task.buckets, chunk_length(task.buckets), task.id, report.id, claim
    )
    return sign(
        identity,
        replace(
            report,
            public=public,
            leader=hpke.seal(leader, task.leader_key, report.binding(hpke.LEADER)),
            helper=hpke.seal(helper, task.helper_key, report.binding(hpke.HELPER)),
        ),
    )
