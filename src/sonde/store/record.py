# SPDX-License-Identifier: Apache-2.0
"""The layout of the write-ahead log: one record for each chunk, with checksums.

```
record   "SWAL" u32 sender_len u64 body_len u32 body_crc32 16s digest i64 received_ns 16s head_mac
         sender  UTF-8 JSON: [tenant, node], whose chunk it is
         body    the chunk as it came (src/sonde/query/framing.py)
```

All little endian. `head_mac` is the BLAKE2b of the fixed part before it and the sender, keyed by
the log's secret: senders choose bodies, which may look like records, but cannot have the right
`head_mac`. Of a record that was cut or changed only that record is lost: the scan goes on at the
next head that is right. Only one record is in memory at a time, so a scan needs the same memory for
a log of any size.
"""

from __future__ import annotations

import hmac
import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

MAGIC = b"SWAL"
FIXED = struct.Struct("<4sIQI16sq")
"""The fields before `head_mac`."""
MAC_BYTES = 16
HEAD_BYTES = FIXED.size + MAC_BYTES
MAX_SENDER_BYTES = 1_024
MAX_BODY_BYTES = 64 << 20
"""A head that claims more is damage."""
_SCAN_BYTES = 1 << 20
"""Size of one read when the next head is searched for."""


@dataclass(frozen=True, slots=True)
class Record:
    """A chunk in the log."""

    tenant: str
    node: str
    digest: bytes
    """`digest_of` tenant, node and content: a chunk that comes again has the same, and is stored
    once."""
    received_ns: int
    """Since 1970."""
    body: bytes
    """Empty where only heads were asked for."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A part of a log without a readable record."""

    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Found:
    """A record or damage, and the offset after it."""

    item: Record | Damage
    end: int


def digest_of(tenant: str, node: str, body: bytes) -> bytes:
    """16 bytes that name a chunk of a node of a tenant by its content."""
    key = json.dumps([tenant, node]).encode()
    return blake2b(body, digest_size=16, key=blake2b(key, digest_size=32).digest()).digest()


def _mac(secret: bytes, fixed: bytes, sender: bytes) -> bytes:
    return blake2b(fixed + sender, digest_size=MAC_BYTES, key=secret).digest()


def encode(record: Record, secret: bytes) -> list[bytes]:
    """The parts of a record, for one `writev`. `secret`: the log's, 32 bytes. The caller must not
    exceed `MAX_SENDER_BYTES` and `MAX_BODY_BYTES`: a scan would take the record for damage."""
    sender = json.dumps([record.tenant, record.node]).encode()
    fixed = FIXED.pack(
        MAGIC, len(sender), len(record.body), zlib.crc32(record.body), record.digest,
        record.received_ns,
    )  # fmt: skip
    return [fixed, _mac(secret, fixed, sender), sender, record.body]


def scan(path: Path, secret: bytes, start: int = 0, bodies: bool = True) -> Iterator[Found]:
    """The records of a log from an offset on. `bodies`: False reads heads alone, and does not check
    bodies.

    Raises OSError; no content of the file raises anything.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        position = start
        while position < size:
            head = _head_at(file, position, secret)
            if head is None:
                following = _next_head(file, position + 1, size, secret)
                yield Found(Damage(position, following - position), following)
            else:
                following = min(head.end, size)
                yield Found(_record(file, head, bodies), following)
            position = following


@dataclass(frozen=True, slots=True)
class _Head:
    """What a record has before its body; its MAC is right."""

    position: int
    body_at: int
    body_len: int
    body_crc: int
    digest: bytes
    received_ns: int
    sender: bytes

    @property
    def end(self) -> int:
        return self.body_at + self.body_len


def _read(file: BinaryIO, offset: int, count: int) -> bytes:
    """Up to `count` bytes; fewer at the end of the file."""
    parts = []
    while count > 0:
        part = os.pread(file.fileno(), count, offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        count -= len(part)
    return b"".join(parts)


def _head_at(file: BinaryIO, position: int, secret: bytes) -> _Head | None:
    """The head at an offset; None where there is no right one."""
    raw = _read(file, position, HEAD_BYTES)
    if len(raw) < HEAD_BYTES or not raw.startswith(MAGIC):
        return None
    fixed, mac = raw[: FIXED.size], raw[FIXED.size :]
    _, sender_len, body_len, body_crc, digest, received_ns = FIXED.unpack(fixed)
    if sender_len > MAX_SENDER_BYTES or body_len > MAX_BODY_BYTES:
        return None
    sender = _read(file, position + HEAD_BYTES, sender_len)
    if not hmac.compare_digest(mac, _mac(secret, fixed, sender)):
        return None
    body_at = position + HEAD_BYTES + sender_len
    return _Head(position, body_at, body_len, body_crc, digest, received_ns, sender)


def _record(file: BinaryIO, head: _Head, bodies: bool) -> Record | Damage:
    """The record of a head; damage where its body was cut or changed."""
    tenant, node = json.loads(head.sender)
    if not bodies:
        return Record(tenant, node, head.digest, head.received_ns, b"")
    body = _read(file, head.body_at, head.body_len)
    if len(body) < head.body_len or zlib.crc32(body) != head.body_crc:
        return Damage(head.position, head.body_at + len(body) - head.position)
    return Record(tenant, node, head.digest, head.received_ns, body)


def _next_head(file: BinaryIO, position: int, size: int, secret: bytes) -> int:
    """Offset of the next head that is right, or the end."""
    while position < size:
        block = _read(file, position, _SCAN_BYTES)
        found = block.find(MAGIC)
        while found >= 0:
            if _head_at(file, position + found, secret) is not None:
                return position + found
            found = block.find(MAGIC, found + 1)
        if len(block) < _SCAN_BYTES:
            break
        position += len(block) - len(MAGIC) + 1
    return size
