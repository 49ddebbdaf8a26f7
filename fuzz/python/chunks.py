# SPDX-License-Identifier: Apache-2.0
"""A capture's framing, damaged at will, and chunks whose checksums hold around content that an
input chose: description, Arrow streams."""

from __future__ import annotations

import io
import struct
import zlib

import pyarrow as pa

from data import Data, MemoryFile
from sonde.query import framing
from sonde.query.capture import read

_file = MemoryFile()
_HEADER = struct.pack("<8sH6x", framing.FILE_MAGIC, framing.VERSION)
_SEALED = struct.Struct("<4sHHIIQI")


def one(raw: bytes) -> None:
    """Walk a file; read it as a capture. Its first byte sets how much of it is made right."""
    data = Data(raw)
    kind = data.byte() % 3
    if kind == 0:
        content = _HEADER + data.rest()
    elif kind == 1:
        content = _HEADER + _sealed(data.rest())
    else:
        content = _HEADER
        while data.left:
            content += _chunk(data.part(), data.part())
    found = list(framing.chunks(io.BytesIO(content), len(content)))
    at = framing.FILE_HEADER.size
    for it in found:
        if isinstance(it, framing.BadChunk):
            assert it.offset == at and it.size_bytes > 0
            at += it.size_bytes
        else:
            at = it.end
    assert at == len(content) or not found
    capture = read(_file.holding(content))
    assert capture.info.chunks >= 1


def _sealed(raw: bytes) -> bytes:
    """The same with right checksums in every header."""
    out = bytearray(raw)
    at = out.find(framing.CHUNK_MAGIC)
    while 0 <= at <= len(out) - framing.CHUNK_HEADER.size:
        struct.pack_into("<I", out, at + 28, zlib.crc32(out[at : at + 28]))
        at = out.find(framing.CHUNK_MAGIC, at + 4)
    return bytes(out)


def _chunk(meta: bytes, payload: bytes) -> bytes:
    packed = pa.compress(payload, codec="zstd", asbytes=True)
    sizes = (len(meta), zlib.crc32(meta), len(packed), zlib.crc32(packed))
    head = _SEALED.pack(framing.CHUNK_MAGIC, framing.VERSION, 0, *sizes)
    return head + struct.pack("<I", zlib.crc32(head)) + meta + packed
