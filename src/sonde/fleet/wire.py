# SPDX-License-Identifier: Apache-2.0
"""The messages, in bytes. Big endian; `lp` is a u32 length and as many bytes.

```
report        task 32, id 16, time_s u64, node 32,
              public lp, leader lp, helper lp, signature 64
job           job 16, n u32, n × item
  item        id 16, time_s u64, node 32, leader digest 32,
              public lp, helper lp, signature 64, message lp
job reply     n u32, n × (ok u8, reply lp or reason lp)
```

A node is its Ed25519 public key. It signs the digests of all parts, so each aggregator checks for
itself that an enrolled node made the report, whatever the other one claims.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

_HEAD = struct.Struct(">32s16sQ32s")
_ITEM = struct.Struct(">16sQ32s32s")
_LENGTH = struct.Struct(">I")
SIGNATURE_BYTES = 64
JOB_REPORTS = 256
"""In one job, at most."""
JOB_HEAD_BYTES = 16 + _LENGTH.size


class Malformed(Exception):
    """Bytes that are no such message."""


class OtherCount(Malformed):
    """A message of another number of parts than was asked for: refused before it is taken apart."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a node uploads to the leader. Shares are sealed, one for each aggregator."""

    task: bytes
    id: bytes
    time_s: int
    node: bytes
    public: bytes
    leader: bytes
    helper: bytes
    signature: bytes = b""
    _digest: bytes = field(default=b"", init=False, repr=False, compare=False)

    @property
    def leader_digest(self) -> bytes:
        """SHA-256 of the leader's sealed share, worked out once."""
        if not self._digest:
            object.__setattr__(self, "_digest", sha256(self.leader).digest())
        return self._digest

    def signed(self) -> bytes:
        return signed_part(
            self.task, self.id, self.time_s, self.public, self.leader_digest, self.helper
        )

    def binding(self, role: bytes) -> bytes:
        return share_binding(role, self.task, self.id, self.time_s, self.node)

    def encode(self) -> bytes:
        head = _HEAD.pack(self.task, self.id, self.time_s, self.node)
        return b"".join((head, lp(self.public), lp(self.leader), lp(self.helper), self.signature))

    @staticmethod
    def decode(data: bytes | memoryview) -> Report:
        reader = Reader(data)
        task, id_, time_s, node = reader.unpack(_HEAD)
        public, leader, helper = reader.lp(), reader.lp(), reader.lp()
        signature = reader.take(SIGNATURE_BYTES)
        reader.end()
        return Report(task, id_, time_s, node, public, leader, helper, signature)


@dataclass(frozen=True, slots=True)
class Item:
    """One report as the leader hands it to the helper: without the leader's share."""

    id: bytes
    time_s: int
    node: bytes
    leader_digest: bytes
    public: bytes
    helper: bytes
    signature: bytes
    message: bytes

    @staticmethod
    def of(report: Report, message: bytes) -> Item:
        """A report with the leader's first message about it."""
        return Item(
            report.id,
            report.time_s,
            report.node,
            report.leader_digest,
            report.public,
            report.helper,
            report.signature,
            message,
        )

    def signed(self, task: bytes) -> bytes:
        return signed_part(task, self.id, self.time_s, self.public, self.leader_digest, self.helper)

    def binding(self, role: bytes, task: bytes) -> bytes:
        return share_binding(role, task, self.id, self.time_s, self.node)


def signed_part(
    task: bytes, id_: bytes, time_s: int, public: bytes, leader_digest: bytes, helper: bytes
) -> bytes:
    """What a node signs."""
    digests = sha256(public).digest() + leader_digest + sha256(helper).digest()
    return b"sonde fleet report 1" + task + id_ + struct.pack(">Q", time_s) + digests


def share_binding(role: bytes, task: bytes, id_: bytes, time_s: int, node: bytes) -> bytes:
    """What a sealed input share is bound to: it opens in no other report."""
    return b"sonde fleet share 1" + role + task + id_ + struct.pack(">Q", time_s) + node


def aggregate_binding(role: bytes, task: bytes, start_s: int, duration_s: int) -> bytes:
    """What a sealed aggregate share is bound to."""
    return b"sonde fleet aggregate 1" + role + task + struct.pack(">QQ", start_s, duration_s)


def encode_job(job: bytes, items: Iterable[Item]) -> bytes:
    parts = []
    for item in items:
        parts.append(_ITEM.pack(item.id, item.time_s, item.node, item.leader_digest))
        parts += (lp(item.public), lp(item.helper), item.signature, lp(item.message))
    return b"".join((job, _LENGTH.pack(len(parts) // 5), *parts))


def decode_job(data: bytes) -> tuple[bytes, list[Item]]:
    """(job, items). Raises OtherCount where there are more than a job holds."""
    reader = Reader(data)
    job = reader.take(16)
    (count,) = reader.unpack(_LENGTH)
    if count > JOB_REPORTS:
        raise OtherCount(f"{count} reports in a job")
    items = []
    for _ in range(count):
        id_, time_s, node, digest = reader.unpack(_ITEM)
        public, helper = reader.lp(), reader.lp()
        signature = reader.take(SIGNATURE_BYTES)
        items.append(Item(id_, time_s, node, digest, public, helper, signature, reader.lp()))
    reader.end()
    return job, items


@dataclass(frozen=True, slots=True)
class Reply:
    """The helper's word on one report: its message, or the reason of its refusal."""

    message: bytes | None
    reason: str = ""


def encode_replies(replies: Iterable[Reply]) -> bytes:
    parts = [
        b"\x00" + lp(reply.reason.encode())
        if reply.message is None
        else b"\x01" + lp(reply.message)
        for reply in replies
    ]
    return _LENGTH.pack(len(parts)) + b"".join(parts)


def decode_replies(data: bytes, expected: int) -> list[Reply]:
    """As many replies as the job had items. Raises OtherCount where there are more or fewer."""
    reader = Reader(data)
    (count,) = reader.unpack(_LENGTH)
    if count != expected:
        raise OtherCount(f"{count} replies to {expected} reports")
    replies = []
    for _ in range(count):
        accepted, body = reader.take(1), reader.lp()
        if accepted == b"\x01":
            replies.append(Reply(body))
        else:
            replies.append(Reply(None, body.decode("ascii", "replace")[:40]))
    reader.end()
    return replies


def lp(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def split_lp(data: bytes, most: int) -> list[memoryview]:
    """The parts of a request that holds several reports, `lp` each: views, not copies. Raises
    Malformed where there are more than `most`: of empty ones a request could hold millions.
    """
    view, at, parts = memoryview(data), 0, []
    while at < len(view):
        if at + _LENGTH.size > len(view):
            raise Malformed("cut short")
        (size,) = _LENGTH.unpack_from(view, at)
        at += _LENGTH.size
        if at + size > len(view):
            raise Malformed("cut short")
        parts.append(view[at : at + size])
        at += size
        if len(parts) > most:
            raise Malformed("too many reports")
    return parts


def first_lp_bytes(data: bytes | bytearray) -> int:
    """How much of a request of `lp` parts its first takes, as its first bytes say."""
    return _LENGTH.size + _LENGTH.unpack_from(data)[0] if len(data) >= _LENGTH.size else 0


def first_lp(data: bytes) -> memoryview:
    """The first part; empty where it is not all there."""
    end = first_lp_bytes(data)
    return (
        memoryview(data)[_LENGTH.size : end] if _LENGTH.size < end <= len(data) else memoryview(b"")
    )


class Reader:
    """Reads a message front to back; raises Malformed where it ends too soon or too late."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise Malformed("cut short")
        part = bytes(self._data[self._at : end])
        self._at = end
        return part

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack(self.take(layout.size))

    def lp(self) -> bytes:
        (size,) = self.unpack(_LENGTH)
        return self.take(size)

    def end(self) -> None:
        if self._at != len(self._data):
            raise Malformed("bytes after the end")
