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
from typing import NamedTuple

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
    added = _Adding(party, body, _Layout(32, step, size), start_s)
    tail = _HEAD.size + size
    parts: list[bytes] = []
    for record in added.records:
        at = record.at
        parts += (body[at : at + _HEAD.size], body[at + tail : at + step])
    verdict = ask(b"".join(parts))
    if len(verdict) != len(added.records):
        raise Malformed("an answer that does not fit the bundle")
    for record, counts in zip(added.records, verdict, strict=True):
        if not counts:
            added.leave_out(record, "refused by the helper")
            del party.taken[record.owner]
    return added.result()


def assist(party: Party, body: bytes, start_s: int) -> tuple[Added, bytes]:
    """The helper's side: its share of the sum, and the verdict on each report."""
    if len(body) % _ASKED_BYTES:
        raise Malformed("not a question")
    added = _Adding(party, body, _Layout(0, _ASKED_BYTES, _HELPER_BYTES), start_s)
    verdict = bytearray(len(body) // _ASKED_BYTES)
    for record in added.records:
        verdict[record.at // _ASKED_BYTES] = 1
    return added.result(), bytes(verdict)


class _Layout(NamedTuple):
    """Where records lie: the first, their length, and that of the sealed part after their head."""

    first: int
    step: int
    sealed: int


class _Record(NamedTuple):
    """An authentic and new report: its session's key, its offset, (node, period), its id."""

    key: bytes
    at: int
    owner: tuple[bytes, int]
    id: bytes


class _Adding:
    """Adds what is authentic, all at once, and then takes away again what must not count.

    Whether a report is new can be asked only of one that is authentic, or a stranger could use up a
    node's place. Per report there is nothing but this, so it does little and looks up much.
    """

    def __init__(self, party: Party, body: bytes, layout: _Layout, start_s: int) -> None:
        self._party, self._body, self._layout = party, body, layout
        self._out: list[tuple[bytes, int]] = []
        self._gone: set[int] = set()
        self.refused: Counter[str] = Counter()
        self.records: list[_Record] = []
        known, owners = self._known(start_s)
        within, self._total = self._add(known)
        taken = party.taken
        for (key, at), owner, authentic in zip(known, owners, within, strict=True):
            if not authentic:
                self.refused["forged"] += 1
                continue
            record = _Record(key, at, owner, body[at + 16 : at + 32])
            # this very object: whether it is the first is asked and settled in one step
            if taken.setdefault(owner, record.id) is record.id:
                self.records.append(record)
            else:
                self.leave_out(record, "quota")

    def _known(self, start_s: int) -> tuple[list[tuple[bytes, int]], list[tuple[bytes, int]]]:
        """(key, offset) and (node, period) of the records whose session and time are right."""
        task, held, body = self._party.task, self._party.sessions.held, self._body
        end_s, period_s = start_s + task.release_s, task.period_s
        known: list[tuple[bytes, int]] = []
        owners: list[tuple[bytes, int]] = []
        for at in range(self._layout.first, len(body), self._layout.step):
            session = held.get(body[at : at + SESSION_BYTES])
            if session is None:
                self.refused["unknown session"] += 1
                continue
            node, key, until_s = session
            time_s = int.from_bytes(body[at + 32 : at + 40], "big")
            if not start_s <= time_s < end_s or time_s > until_s:
                self.refused["late"] += 1
                continue
            known.append((key, at))
            owners.append((node, time_s // period_s))
        return known, owners

    def _add(self, records: list[tuple[bytes, int]]) -> tuple[bytes, bytes]:
        task, role = self._party.task, self._party.sessions.role
        part = _HEAD.size, self._layout.sealed
        bound, leads = binding(role, task.id), role == seal.LEADER
        return task.aggregation().add_sealed(self._body, records, bound, _HEAD.size, part, leads)

    def leave_out(self, record: _Record, reason: str) -> None:
        self.refused[reason] += 1
        self._out.append((record.key, record.at))
        self._gone.add(record.at)

    def result(self) -> Added:
        total = self._total
        if self._out:
            total = self._party.task.aggregation().without(total, self._add(self._out)[1])
        accepted = [record.id for record in self.records if record.at not in self._gone]
        return Added(total, accepted, self.refused)
