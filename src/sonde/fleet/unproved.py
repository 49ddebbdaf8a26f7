# SPDX-License-Identifier: Apache-2.0
"""Additive shares without proofs, at the rate of memory rather than of public-key cryptography.

```
bundle      task 32, n × record                        relay → leader
record      session 16, id 16, time_s u64,
            leader 4·buckets + 16, helper 48           sealed by the node, one for each party
asked       n × (session 16, id 16, time_s u64, helper 48)            leader → helper
verdict     n × u8: 1 if it counts
```

The relay holds no key. **What is given up against proved reports is stated in
docs/design/fleet.md**: a node can add any vector to the sums, so nothing bounds what one unit
moves, there is no epsilon, and the aggregators refuse to release such a task.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sonde._native import Opened, open_sealed
from sonde.fleet import seal
from sonde.fleet.session import SESSION_BYTES, Session, Sessions, binding
from sonde.fleet.task import Task
from sonde.fleet.wire import Malformed

_HEAD = struct.Struct(">16s16sQ")
_TAG_BYTES, _SEED_BYTES, _NONCE_BYTES = 16, 32, 12
_HELPER_BYTES = _SEED_BYTES + _TAG_BYTES
_ASKED_BYTES = _HEAD.size + _HELPER_BYTES

Ask = Callable[[bytes], bytes]


@dataclass
class Party:
    """One aggregator: its sessions, and the report that each (node, period) has sent.

    Threads may share it: a place in `taken` is given to one report alone.
    """

    task: Task
    sessions: Sessions
    taken: dict[tuple[bytes, int], bytes] = field(default_factory=dict)


@dataclass
class Added:
    """What came of a bundle: a share of the sum, the reports in it, the refusals."""

    aggregate: bytes
    accepted: list[bytes] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)


def leader_bytes(task: Task) -> int:
    return 4 * task.buckets + _TAG_BYTES


def make_record(
    task: Task, session: Session, id_: bytes, time_s: int, leader: bytes, helper: bytes
) -> bytes:
    """A node's report: its two shares, each sealed for one party."""
    head, nonce = _HEAD.pack(session.id, id_, time_s), id_[:_NONCE_BYTES]
    return b"".join(
        (
            head,
            session.leader.encrypt(nonce, leader, binding(seal.LEADER, task.id) + head),
            session.helper.encrypt(nonce, helper, binding(seal.HELPER, task.id) + head),
        )
    )


def bundle(task: Task, records: Sequence[bytes]) -> bytes:
    return b"".join((task.id, *records))


def lead(party: Party, body: bytes, start_s: int, ask: Ask) -> Added:
    """The leader's side of a bundle; a report counts only if the helper says that it does."""
    task = party.task
    size = leader_bytes(task)
    step = _HEAD.size + size + _HELPER_BYTES
    if body[:32] != task.id or (len(body) - 32) % step:
        raise Malformed("not a bundle of this task")
    refused: Counter[str] = Counter()
    found = _open(party, body, _Layout(32, step, size), start_s, refused)
    tail = _HEAD.size + size
    parts: list[bytes] = []
    for at in found.offsets:
        parts += (body[at : at + _HEAD.size], body[at + tail : at + step])
    verdict = ask(b"".join(parts))
    if len(verdict) != len(found.ids):
        raise Malformed("an answer that does not fit the bundle")
    total, accepted = found.add(task, verdict, leader=True)
    for owner, counts in zip(found.owners, verdict, strict=True):
        if not counts:
            del party.taken[owner]
    refused["refused by the helper"] += len(found.ids) - len(accepted)
    return Added(total, accepted, +refused)


def assist(party: Party, body: bytes, start_s: int) -> tuple[Added, bytes]:
    """The helper's side: its share of the sum, and the verdict on each report."""
    if len(body) % _ASKED_BYTES:
        raise Malformed("not a question")
    refused: Counter[str] = Counter()
    found = _open(party, body, _Layout(0, _ASKED_BYTES, _HELPER_BYTES), start_s, refused)
    verdict = bytearray(len(body) // _ASKED_BYTES)
    for at in found.offsets:
        verdict[at // _ASKED_BYTES] = 1
    total, accepted = found.add(party.task, bytes(len(found.ids) * [1]), leader=False)
    return Added(total, accepted, refused), bytes(verdict)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where records lie: the first, their length, and that of the sealed part after their head."""

    first: int
    step: int
    sealed: int


@dataclass(frozen=True, slots=True)
class _Found:
    """The records that are authentic and new: id, offset, (node, period) each."""

    opened: Opened
    kept: list[int]
    ids: list[bytes]
    offsets: list[int]
    owners: list[tuple[bytes, int]]
    known: int

    def add(self, task: Task, verdict: bytes, leader: bool) -> tuple[bytes, list[bytes]]:
        """(share of the sum, ids in it) of those that the verdict names."""
        keep = bytearray(self.known)
        accepted = []
        for number, id_, counts in zip(self.kept, self.ids, verdict, strict=True):
            if counts:
                keep[number] = 1
                accepted.append(id_)
        total, count = task.aggregation().add_opened(self.opened, bytes(keep), leader)
        assert count == len(accepted)  # a share that opened has the length that was sealed
        return total, accepted


def _open(
    party: Party, body: bytes, layout: _Layout, start_s: int, refused: Counter[str]
) -> _Found:
    """Per report there is nothing but this, so it does little and looks up much."""
    task, held, taken = party.task, party.sessions.held, party.taken
    end_s, period_s = start_s + task.release_s, task.period_s
    known: list[tuple[bytes, int]] = []
    nodes: list[tuple[bytes, int]] = []
    for at in range(layout.first, len(body), layout.step):
        session = held.get(body[at : at + SESSION_BYTES])
        if session is None:
            refused["unknown session"] += 1
            continue
        node, key, until_s = session
        time_s = int.from_bytes(body[at + 32 : at + 40], "big")
        if not start_s <= time_s < end_s or time_s > until_s:
            refused["late"] += 1
            continue
        known.append((key, at))
        nodes.append((node, time_s // period_s))
    bound = binding(party.sessions.role, task.id)
    opened = open_sealed(body, known, bound, _HEAD.size, (_HEAD.size, layout.sealed))
    found = _Found(opened, [], [], [], [], len(known))
    rows = zip(known, nodes, opened.authentic, strict=True)
    for number, ((_, at), owner, authentic) in enumerate(rows):
        if not authentic:
            refused["forged"] += 1
            continue
        id_ = body[at + 16 : at + 32]
        if taken.setdefault(owner, id_) is not id_:  # this very object: one step, no lock
            refused["quota"] += 1
            continue
        found.kept.append(number)
        found.ids.append(id_)
        found.offsets.append(at)
        found.owners.append(owner)
    return found
