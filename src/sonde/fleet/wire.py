# SPDX-License-Identifier: Apache-2.0
"""The messages as bytes. Big endian; numbers are sizes in bytes; `lp` is a length-prefixed field: a
u32 length and that number of bytes.

```
report        task 32, id 16, time_s u64, node 32,
              public lp, leader lp, helper lp, signature 64
job           job 16, n u32, n × item
  item        id 16, time_s u64, node 32, leader digest 32,
              public lp, helper lp, signature 64, message lp
job reply     n u32, n × (ok u8, reply lp or reason lp)
```

`node` is a node's Ed25519 public key, `public` the report's public share, `leader` and `helper` are
its sealed input shares, `message` and `reply` what the aggregators send each other to check the
proof. A node signs the digests of all parts, so each aggregator can verify alone that it made the
report.
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
"""Maximum reports of one job."""
_MAX_REASON_CHARACTERS = 40
"""Of a refusal in a job's reply; the rest of a longer text is left out: no honest one is longer."""
JOB_HEAD_BYTES = 16 + _LENGTH.size


class Malformed(Exception):
    """Bytes that are not a valid message."""


class WrongCount(Malformed):
    """A message with an unexpected number of parts: refused before it is decoded."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a node uploads to the leader, with the fields that the module's docstring describes."""

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
        """SHA-256 of the leader's sealed share, computed once."""
        if not self._digest:
            object.__setattr__(self, "_digest", sha256(self.leader).digest())
        return self._digest

    def signed(self) -> bytes:
        """The bytes that the node signs."""
        return signed_part(
            self.task, self.id, self.time_s, self.public, self.leader_digest, self.helper
        )

    def binding(self, role: bytes) -> bytes:
        return share_binding(role, self.task, self.id, self.time_s, self.node)

    def encode(self) -> bytes:
        head = _HEAD.pack(self.task, self.id, self.time_s, self.node)
        return b"".join(
            (
                head,
                length_prefixed(self.public),
                length_prefixed(self.leader),
                length_prefixed(self.helper),
                self.signature,
            )
        )

    @staticmethod
    def decode(data: bytes | memoryview) -> Report:
        """Raises Malformed."""
        reader = Reader(data)
        task, id_, time_s, node = reader.unpack(_HEAD)
        public, leader, helper = (
            reader.length_prefixed(),
            reader.length_prefixed(),
            reader.length_prefixed(),
        )
        signature = reader.take(SIGNATURE_BYTES)
        reader.end()
        return Report(task, id_, time_s, node, public, leader, helper, signature)


@dataclass(frozen=True, slots=True)
class Item:
    """One report as the leader sends it to the helper: without the leader's share."""

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
        """The item of a report and the leader's first message about it."""
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
    """The bytes that a node signs."""
    digests = sha256(public).digest() + leader_digest + sha256(helper).digest()
    return b"sonde fleet report 1" + task + id_ + struct.pack(">Q", time_s) + digests


def share_binding(role: bytes, task: bytes, id_: bytes, time_s: int, node: bytes) -> bytes:
    """The binding of a sealed input share: it opens in no other report."""
    return b"sonde fleet share 1" + role + task + id_ + struct.pack(">Q", time_s) + node


def aggregate_binding(role: bytes, task: bytes, start_s: int, duration_s: int) -> bytes:
    """The binding of a sealed aggregate share."""
    return b"sonde fleet aggregate 1" + role + task + struct.pack(">QQ", start_s, duration_s)


def encode_job(job: bytes, items: Iterable[Item]) -> bytes:
    parts = []
    for item in items:
        parts.append(_ITEM.pack(item.id, item.time_s, item.node, item.leader_digest))
        parts += (
            length_prefixed(item.public),
            length_prefixed(item.helper),
            item.signature,
            length_prefixed(item.message),
        )
    return b"".join((job, _LENGTH.pack(len(parts) // 5), *parts))


def decode_job(data: bytes) -> tuple[bytes, list[Item]]:
    """(job, items). Raises WrongCount if there are more items than a job may hold; Malformed."""
    reader = Reader(data)
    job = reader.take(16)
    (count,) = reader.unpack(_LENGTH)
    if count > JOB_REPORTS:
        raise WrongCount(f"{count} reports in a job")
    items = []
    for _ in range(count):
        id_, time_s, node, digest = reader.unpack(_ITEM)
        public, helper = reader.length_prefixed(), reader.length_prefixed()
        signature = reader.take(SIGNATURE_BYTES)
        items.append(
            Item(id_, time_s, node, digest, public, helper, signature, reader.length_prefixed())
        )
    reader.end()
    return job, items


@dataclass(frozen=True, slots=True)
class Reply:
    """The helper's reply to one report: its message; None where it refuses the report, with a
    reason.
    """

    message: bytes | None
    reason: str = ""


def encode_replies(replies: Iterable[Reply]) -> bytes:
    parts = [
        b"\x00" + length_prefixed(reply.reason.encode())
        if reply.message is None
        else b"\x01" + length_prefixed(reply.message)
        for reply in replies
    ]
    return _LENGTH.pack(len(parts)) + b"".join(parts)


def decode_replies(data: bytes, expected: int) -> list[Reply]:
    """The replies to a job of `expected` items. Raises WrongCount for any other number;
    Malformed.
    """
    reader = Reader(data)
    (count,) = reader.unpack(_LENGTH)
    if count != expected:
        raise WrongCount(f"{count} replies to {expected} reports")
    replies = []
    for _ in range(count):
        accepted, body = reader.take(1), reader.length_prefixed()
        if accepted == b"\x01":
            replies.append(Reply(body))
        else:
            replies.append(Reply(None, body.decode("ascii", "replace")[:_MAX_REASON_CHARACTERS]))
    reader.end()
    return replies


def length_prefixed(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def split_length_prefixed(data: bytes, max_parts: int) -> list[memoryview]:
    """The length-prefixed parts of a request, as views, not copies. Raises Malformed if there are
    more than `max_parts`: a request could hold millions of empty ones.
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
        if len(parts) > max_parts:
            raise Malformed("too many reports")
    return parts


def first_length_prefixed_bytes(data: bytes | bytearray) -> int:
    """Size of the first length-prefixed part with its length, from the first bytes of the request;
    0 if they are missing.
    """
    return _LENGTH.size + _LENGTH.unpack_from(data)[0] if len(data) >= _LENGTH.size else 0


def first_length_prefixed(data: bytes) -> memoryview:
    """The first length-prefixed part; empty if it is incomplete."""
    end = first_length_prefixed_bytes(data)
    return (
        memoryview(data)[_LENGTH.size : end] if _LENGTH.size < end <= len(data) else memoryview(b"")
    )


class Reader:
    """Decodes a message front to back. Raises Malformed if it is too short or too long."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        end = self._at + size
        if end > len(self._data):
            raise Malformed("cut short")
        part = bytes(self._data[self._at : end])
        self._at = end
        return part

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack(self.take(layout.size))

    def length_prefixed(self) -> bytes:
        (size,) = self.unpack(_LENGTH)
        return self.take(size)

    def end(self) -> None:
        """Raises Malformed unless all bytes were taken."""
        if self._at != len(self._data):
            raise Malformed("bytes after the end")
