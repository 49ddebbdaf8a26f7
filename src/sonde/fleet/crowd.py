# SPDX-License-Identifier: Apache-2.0
"""The nodes of a simulated fleet and what they send: real keys, shares, seals, signatures, proofs.

Some are away, some reports lose one of their halves, some come too late, some nodes lie.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from sonde._native import Aggregation
from sonde.fleet import seal, unproved
from sonde.fleet.node import make_reports, sign
from sonde.fleet.roster import Identity
from sonde.fleet.session import Session
from sonde.fleet.task import Kind, Task, chunk_length
from sonde.fleet.wire import Report

HOUR_S = 3600
BATCH_S = 1_800_000_000 // HOUR_S * HOUR_S
CHUNK = 1000
PLAIN_CHUNK = 2000
BUNDLE = 64  # reports without proofs that a relay hands on together


@dataclass(frozen=True)
class Scenario:
    """A fleet and its troubles; each share is of the nodes (dropouts) or of those left."""

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
    start_s: int = BATCH_S


@dataclass(frozen=True)
class Made:
    """A chunk of nodes' uploads, in blocks, and the nodes whose report must be counted."""

    blocks: list[Any]
    honest: list[int]
    hellos: list[bytes]
    report_bytes: int


def identity_of(scenario: Scenario, node: int) -> Identity:
    """The key of a simulated node, the same in every run of the scenario."""
    secret = scenario.seed.to_bytes(8, "big") + node.to_bytes(8, "big")
    return Identity(sha256(secret).digest())


def make_chunk(
    scenario: Scenario, task: Task, nodes: Any, samples: Any, fate: Any, workers: int
) -> Made:
    """A chunk's uploads in blocks, two for each worker."""
    if task.kind == "plain":
        return make_bundles(scenario, task, nodes, samples, fate, workers)
    made, honest = make_uploads(scenario, task, nodes, samples, fate, workers)
    size = -(-len(made) // (2 * workers))
    blocks = [made[b : b + size] for b in range(0, len(made), size)]
    return Made(blocks, honest, [], len(made[0]))


def make_bundles(
    scenario: Scenario, task: Task, nodes: Any, samples: Any, fate: Any, threads: int
) -> Made:
    """Reports without proofs, through a relay. Lying cannot be noticed; some send twice instead."""
    time_s = scenario.start_s + 60
    ids = [os.urandom(16) for _ in nodes]
    shares = task.aggregation().shard(ids, [[int(samples[n])] for n in nodes], threads)
    records, honest, hellos = [], [], []
    late = scenario.one_sided + scenario.stragglers
    for node, id_, (_, leader, helper) in zip(nodes, ids, shares, strict=True):
        session = Session.open(task, identity_of(scenario, int(node)), time_s)
        hellos.append(session.hello)
        when_s = scenario.start_s - 60 if scenario.one_sided <= fate[node] < late else time_s
        record = unproved.make_record(task, session, id_, when_s, leader, helper)
        if fate[node] < scenario.one_sided / 2:  # the leader's share is damaged
            record = record[:40] + bytes(16) + record[56:]
        elif fate[node] < scenario.one_sided:
            record = record[:-16] + bytes(16)
        elif fate[node] >= late:
            honest.append(int(node))
        twice = late <= fate[node] < late + scenario.liars
        records += [record, record] if twice else [record]
    groups = [records[at : at + BUNDLE] for at in range(0, len(records), BUNDLE)]
    return Made([unproved.bundle(task, group) for group in groups], honest, hellos, len(records[0]))


def make_uploads(
    scenario: Scenario, task: Task, nodes: Any, samples: Any, fate: Any, threads: int
) -> tuple[list[bytes], list[int]]:
    """The chunk's uploads with their troubles, and the nodes whose report must be counted."""
    identities = [identity_of(scenario, int(n)) for n in nodes]
    buckets = [[int(samples[n])] for n in nodes]
    reports = make_reports(task, identities, buckets, scenario.start_s + 60, threads)
    late = scenario.one_sided + scenario.stragglers
    lie = late + scenario.liars
    made, honest = [], []
    for node, identity, report in zip(nodes, identities, reports, strict=True):
        if fate[node] < scenario.one_sided / 2:
            report = sign(identity, replace(report, leader=report.leader[:-1]))
        elif fate[node] < scenario.one_sided:
            report = sign(identity, replace(report, helper=report.helper[:-1]))
        elif fate[node] < late:
            report = sign(identity, replace(report, time_s=scenario.start_s - 60))
        elif fate[node] < lie:
            report = overstate(task, identity, report)
        else:
            honest.append(int(node))
        made.append(report.encode())
    return made, honest


def overstate(task: Task, identity: Identity, report: Report, weight: int = 1000) -> Report:
    """A lying node's report: bucket 0 counts `weight` times, with the best proof there is."""
    claim = [weight] + [0] * (task.buckets - 1)
    public, leader, helper = Aggregation.shard_dishonestly(
        task.buckets, chunk_length(task.buckets), task.id, report.id, claim
    )
    return sign(
        identity,
        replace(
            report,
            public=public,
            leader=seal.seal(leader, task.leader_key, report.binding(seal.LEADER)),
            helper=seal.seal(helper, task.helper_key, report.binding(seal.HELPER)),
        ),
    )
