# SPDX-License-Identifier: Apache-2.0
"""Verification of a block of reports: decrypt, check the signature, verify the proof, sum.

Pure functions: no clock, no file, no socket. The services call them with their jobs; the simulation
distributes them over threads or Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from sonde._fleet import signed_by
from sonde.fleet import hpke
from sonde.fleet.task import Task
from sonde.fleet.wire import Item, Reply, Report

Exchange = Callable[[list[Item]], list[Reply]]
"""Sends items to the helper and returns its replies, in their order."""


@dataclass(frozen=True)
class AggregatorKeys:
    """An aggregator's secrets: its own HPKE key, and the verify key that both share.

    The verify key (VDAF) chooses at which random points proofs are checked. Nodes must never learn
    it: a proof is sound only against a prover without it.
    """

    hpke_private: str
    verify_key: bytes


@dataclass
class BlockResult:
    """The outcome of a block: the share of the sum of its accepted reports, their ids, and the
    reason per refused id.
    """

    aggregate: bytes
    accepted: list[bytes] = field(default_factory=list)
    refused: dict[bytes, str] = field(default_factory=dict)


def checksum(ids: Sequence[bytes]) -> bytes:
    """XOR of the SHA-256 hashes of report ids: equal at both parties if they counted the same
    reports.
    """
    total = 0
    for id_ in ids:
        total ^= int.from_bytes(sha256(id_).digest(), "big")
    return total.to_bytes(32, "big")


def verify_as_leader(
    task: Task,
    keys: AggregatorKeys,
    reports: Sequence[Report],
    exchange: Exchange,
    threads: int = 1,
) -> BlockResult:
    """The leader's side of a block; `exchange` sends items to the helper and returns its replies.

    Signatures are checked earlier, at admission.
    """
    aggregation, opener = task.aggregation(), hpke.Opener(keys.hpke_private)
    block = BlockResult(aggregation.zero())
    opened: list[Report] = []
    shares: list[bytes] = []
    for report in reports:
        try:
            shares.append(opener.open(report.leader, report.binding(hpke.LEADER)))
            opened.append(report)
        except hpke.DecryptionError:
            block.refused[report.id] = "malformed"
    ids, publics = [r.id for r in opened], [r.public for r in opened]
    pending = aggregation.begin(keys.verify_key, ids, publics, shares, threads)
    asked: list[int] = []
    items: list[Item] = []
    for at, (report, message, fault) in enumerate(
        zip(opened, pending.messages, pending.faults, strict=True)
    ):
        if message is None:
            block.refused[report.id] = str(fault)
            continue
        asked.append(at)
        items.append(Item.of(report, message))
    answers: list[bytes | None] = [None] * len(opened)
    replies = exchange(items) if items else []
    for at, reply in zip(asked, replies, strict=True):
        answers[at] = reply.message
        if reply.message is None:
            block.refused[opened[at].id] = reply.reason
    faults, block.aggregate = pending.finish(answers, threads)
    for report, fault in zip(opened, faults, strict=True):
        if fault is None:
            block.accepted.append(report.id)
        else:
            block.refused.setdefault(report.id, fault)
    return block


def verify_as_helper(
    task: Task, keys: AggregatorKeys, items: Sequence[Item], threads: int = 1
) -> tuple[BlockResult, list[Reply]]:
    """The helper's side: its share of the sum, and one reply per item, in their order."""
    aggregation, opener = task.aggregation(), hpke.Opener(keys.hpke_private)
    refused: dict[bytes, str] = {}
    good: list[Item] = []
    shares: list[bytes] = []
    task_id = task.id
    for item in items:
        if not signed_by(item.node, item.signature, item.signed(task_id)):
            refused[item.id] = "forged"
            continue
        try:
            shares.append(opener.open(item.helper, item.binding(hpke.HELPER, task_id)))
            good.append(item)
        except hpke.DecryptionError:
            refused[item.id] = "malformed"
    messages, faults, aggregate = aggregation.check(
        keys.verify_key,
        [i.id for i in good],
        [i.public for i in good],
        shares,
        [i.message for i in good],
        threads,
    )
    block, by_id = BlockResult(aggregate, refused=refused), {}
    for item, message, fault in zip(good, messages, faults, strict=True):
        if message is None:
            refused[item.id] = str(fault)
        else:
            block.accepted.append(item.id)
            by_id[item.id] = Reply(message)
    replies = [by_id.get(i.id) or Reply(None, refused[i.id]) for i in items]
    return block, replies
