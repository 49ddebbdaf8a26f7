# SPDX-License-Identifier: Apache-2.0
"""The layout of the write-ahead log: one record a chunk, each with its own checksums.

```
record   "SWAL" u32 key_len u64 body_len u32 body_crc32 16s digest i64 received_ns u32 head_crc32
         key     UTF-8 JSON: [tenant, node]
         body    the chunk as it came (src/sonde/query/framing.py)
```

All little endian. `head_crc32` covers the fixed part before it and the key. A record that was cut
or changed costs itself: the scan goes on at the next head with a correct checksum. Only one record
is in memory at a time, so a scan needs the same memory for a log of any size.
"""

from __future__ import annotations

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
HEAD = struct.Struct("<4sIQI16sqI")
MOST_KEY_BYTES = 1_024
MOST_BODY_BYTES = 64 << 20
_SCAN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Record:
    """A chunk in the log."""

    tenant: str
    node: str
    digest: bytes
    """What is stored once: `digest_of` tenant, node and content."""
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


def encode(record: Record) -> list[bytes]:
    """The parts of a record, for one gathered write."""
    key = json.dumps([record.tenant, record.node]).encode()
    crc = zlib.crc32(record.body)
    fixed = HEAD.pack(MAGIC, len(key), len(record.body), crc, record.digest, record.received_ns, 0)[
        :-4
    ]
    return [fixed, struct.pack("<I", zlib.crc32(key, zlib.crc32(fixed))), key, record.body]


def scan(path: Path, start: int = 0, bodies: bool = True) -> Iterator[Found]:
    """The records of a log from an offset on. `bodies` False: heads alone, bodies unchecked.

    Raises OSError; no content of the file raises anything.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        position = start
        while position < size:
            found = _record_at(file, position, size, bodies)
            if found is None:
                following = _next_head(file, position + 1, size)
                yield Found(Damage(position, following - position), following)
                position = following
                continue
            yield found
            position = found.end


def _read(file: BinaryIO, offset: int, count: int) -> bytes:
    parts = []
    while count > 0:
        part = os.pread(file.fileno(), count, offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        count -= len(part)
    return b"".join(parts)


def _record_at(file: BinaryIO, position: int, size: int, bodies: bool) -> Found | None:
    head = _read(file, position, HEAD.size)
    if len(head) < HEAD.size:
        return None
    magic, key_len, body_len, body_crc, digest, received_ns, head_crc = HEAD.unpack(head)
    if magic != MAGIC or key_len > MOST_KEY_BYTES or body_len > MOST_BODY_BYTES:
        return None
    key = _read(file, position + HEAD.size, key_len)
    body_at = position + HEAD.size + key_len
    if zlib.crc32(key, zlib.crc32(head[:-4])) != head_crc or body_at + body_len > size:
        return None
    body = _read(file, body_at, body_len) if bodies else b""
    end = body_at + body_len
    if bodies and zlib.crc32(body) != body_crc:
        return Found(Damage(position, end - position), end)
    try:
        tenant, node = json.loads(key)
    except ValueError:
        return None
    return Found(Record(tenant, node, digest, received_ns, body), end)


def _next_head(file: BinaryIO, position: int, size: int) -> int:
    """Offset of the next correct head, or the end."""
    while position < size:
        block = _read(file, position, _SCAN_BYTES)
        found = block.find(MAGIC)
        while found >= 0:
            at = position + found
            head = _read(file, at, HEAD.size)
            if len(head) == HEAD.size:
                key_len = HEAD.unpack(head)[1]
                if key_len <= MOST_KEY_BYTES:
                    key = _read(file, at + HEAD.size, key_len)
                    if zlib.crc32(key, zlib.crc32(head[:-4])) == HEAD.unpack(head)[-1]:
                        return at
            found = block.find(MAGIC, found + 1)
        if len(block) < _SCAN_BYTES:
            break
        position += len(block) - len(MAGIC) + 1
    return size
