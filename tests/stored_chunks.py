# SPDX-License-Identifier: Apache-2.0
"""Real chunks, from captures of real GPUs, made into those of any node and time."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from sonde.query import framing

DATA = Path(__file__).parent / "data"


def recorded() -> list[bytes]:
    """Every chunk of the captures in tests/data, as it was written."""
    contents = (path.read_bytes() for path in sorted(DATA.glob("*.sonde")))
    return [chunk for content in contents for chunk in chunks_of(content)]


def chunks_of(content: bytes) -> Iterator[bytes]:
    """The chunks of a capture's file."""
    at = framing.FILE_HEADER.size
    for chunk in framing.chunks(BytesIO(content), len(content)):
        assert isinstance(chunk, framing.RawChunk)
        yield content[at : chunk.end]
        at = chunk.end


def rows_of(chunk: bytes, table: str) -> int:
    """Number of rows of a table, by the description of the chunk."""
    meta = meta_of(chunk)
    return sum(entry["rows"] for entry in meta["tables"] if entry["name"] == table)


def as_of(chunk: bytes, capture: str, seq: int, ends_ns: int) -> bytes:
    """The chunk as number `seq` of another recording that ended at a time since 1970."""
    meta = meta_of(chunk)
    meta["seq"] = seq
    meta["capture"] = dict(meta["capture"], id=capture)
    meta["wall_offset_ns"] = ends_ns - meta["end_ns"]
    return with_meta(chunk, meta)


def with_meta(chunk: bytes, meta: dict[str, object]) -> bytes:
    """The chunk with another description, and correct checksums."""
    fields = list(framing.CHUNK_HEADER.unpack(chunk[: framing.CHUNK_HEADER.size]))
    payload = chunk[framing.CHUNK_HEADER.size + fields[3] :]
    text = json.dumps(meta, separators=(",", ":")).encode()
    fields[3], fields[4] = len(text), zlib.crc32(text)
    head = framing.CHUNK_HEADER.pack(*fields)[:-4]
    return head + struct.pack("<I", zlib.crc32(head)) + text + payload


def meta_of(chunk: bytes) -> dict[str, Any]:
    """The description of a chunk."""
    size = framing.CHUNK_HEADER.unpack(chunk[: framing.CHUNK_HEADER.size])[3]
    meta: dict[str, Any] = json.loads(chunk[framing.CHUNK_HEADER.size :][:size])
    return meta


def endless(capture: str, first_ns: int, step_ns: int) -> Iterator[bytes]:
    """Chunks of one recording, one every `step_ns`, repeating the recorded ones."""
    chunks = recorded()
    seq = 0
    while True:
        yield as_of(chunks[seq % len(chunks)], capture, seq, first_ns + seq * step_ns)
        seq += 1
