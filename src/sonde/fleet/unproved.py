# SPDX-License-Identifier: Apache-2.0
"""Additive shares without proofs: a report costs a symmetric decryption and a sum, no public-key
operation.

```
bundle      task 32, n × record                        relay → leader
record      session 16, id 16, time_s u64,
            leader 4·buckets + 16, helper 48           sealed by the node, one for each party
query       n × (session 16, id 16, time_s u64, helper 48)            leader → helper
answer      n × u8: 1 if the report counts                            helper → leader
```

A record is one report; lengths are in bytes; an id is random, so that its first 12 bytes, the nonce
of the encryption, are another in each report of a session. The relay holds no key.
**docs/design/fleet.md lists what is lost against proved reports**: a node can add any vector to the
sums, so one unit's contribution is unbounded, there is no epsilon, and the aggregators refuse to
release such a task.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sonde._fleet import Intake, Taken
from sonde.fleet import hpke
from sonde.fleet.session import Session, Sessions, binding
from sonde.fleet.task import Task
from sonde.fleet.wire import Malformed

_HEAD = struct.Struct(">16s16sQ")
_ID = slice(16, 32)
"""The report's id in a head."""
_TAG_BYTES, _SEED_BYTES, _NONCE_BYTES = 16, 32, 12
_HELPER_BYTES = _SEED_BYTES + _TAG_BYTES
_QUERY_BYTES = _HEAD.size + _HELPER_BYTES
_COUNTED = 0
"""The native module's verdict on a record that counts."""
_REASONS = ("", "unknown session", "late", "forged", "quota")
"""The reason for each verdict of the native module."""
_REFUSED_BY_HELPER = "refused by the helper"
"""The leader's reason where its own verdict is that the report counts."""

AskHelper = Callable[[bytes], bytes]
"""Sends a query to the helper and returns its answer."""


class Party:
    """One aggregator in one batch (from `start_s` on): its sessions, and the report of each (node,
    period). Thread-safe.
    """

    def __init__(self, task: Task, sessions: Sessions, start_s: int) -> None:
        self.task, self.sessions = task, sessions
        is_leader = sessions.role == hpke.LEADER
        sealed_bytes = leader_bytes(task) if is_leader else _HELPER_BYTES
        first = len(task.id) if is_leader else 0  # where the first record begins
        self.record_bytes = _HEAD.size + sealed_bytes + (_HELPER_BYTES if is_leader else 0)
        self.intake = Intake(
            task.aggregation(),
            sessions.keyring,
            is_leader,
            binding(sessions.role, task.id),
            (first, self.record_bytes, sealed_bytes),
            (start_s, start_s + task.release_s),
            task.period_s,
        )


@dataclass
class BundleResult:
    """The outcome of a bundle: a share of the sum, the ids of the reports in it, and counts of
    refusals by reason.
    """

    aggregate: bytes
    accepted: list[bytes] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)


def leader_bytes(task: Task) -> int:
    """Bytes of the leader's sealed share in a record."""
    return 4 * task.buckets + _TAG_BYTES


def make_record(
    task: Task, session: Session, id_: bytes, time_s: int, leader: bytes, helper: bytes
) -> bytes:
    """A node's report; `leader` and `helper` are the shares, which this seals."""
    head, nonce = _HEAD.pack(session.id, id_, time_s), id_[:_NONCE_BYTES]
    return b"".join(
        (
            head,
            session.leader.encrypt(nonce, leader, binding(hpke.LEADER, task.id) + head),
            session.helper.encrypt(nonce, helper, binding(hpke.HELPER, task.id) + head),
        )
    )


def bundle(task: Task, records: Sequence[bytes]) -> bytes:
    """What a relay sends to the leader: the records (`make_record`) of many nodes, for one task."""
    return b"".join((task.id, *records))


def add_as_leader(party: Party, body: bytes, ask: AskHelper) -> BundleResult:
    """The leader's side of a bundle. A report counts only if the helper accepts it as well. Raises
    Malformed.
    """
    first = len(party.task.id)
    if body[:first] != party.task.id or (len(body) - first) % party.record_bytes:
        raise Malformed("not a bundle of this task")
    taken = party.intake.add(body)
    starts = range(first, len(body), party.record_bytes)
    counted = [number for number, why in enumerate(taken.verdicts) if why == _COUNTED]
    helper_at = party.record_bytes - _HELPER_BYTES  # of a record: where the helper's part begins
    parts: list[bytes] = []
    for number in counted:
        at = starts[number]
        parts += (body[at : at + _HEAD.size], body[at + helper_at : at + party.record_bytes])
    try:
        answer = ask(b"".join(parts))
        if len(answer) != len(counted):
            raise Malformed("the answer does not fit the bundle")
    except BaseException:
        taken.leave_out(counted)  # the bundle may be sent again
        raise
    refused = _refusals(taken)
    denied = [number for number, counts in zip(counted, answer, strict=True) if not counts]
    if denied:
        taken.leave_out(denied)
        refused[_REFUSED_BY_HELPER] = len(denied)
    accepted = [
        _id_at(body, starts[number])
        for number, counts in zip(counted, answer, strict=True)
        if counts
    ]
    return BundleResult(taken.share(), accepted, refused)


def add_as_helper(party: Party, body: bytes) -> tuple[BundleResult, bytes]:
    """The helper's side: its share of the sum, and its answer to the leader. Raises Malformed."""
    if len(body) % _QUERY_BYTES:
        raise Malformed("not a query")
    taken = party.intake.add(body)
    answer = bytes(why == _COUNTED for why in taken.verdicts)
    accepted = [
        _id_at(body, number * _QUERY_BYTES) for number, counts in enumerate(answer) if counts
    ]
    return BundleResult(taken.share(), accepted, _refusals(taken)), answer


def _id_at(body: bytes, record: int) -> bytes:
    """The id of the report whose record begins at `record`."""
    return body[record + _ID.start : record + _ID.stop]


def _refusals(taken: Taken) -> Counter[str]:
    found = Counter(taken.verdicts)
    return Counter({_REASONS[why]: count for why, count in found.items() if why != _COUNTED})
