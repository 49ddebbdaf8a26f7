# SPDX-License-Identifier: Apache-2.0
"""The outer layout of a `.sonde` file: a header, then independent chunks.

```
file    "SONDE\\r\\n\\x1a"  u16 version  6 × 0                                        16 bytes
chunk   "SCHK" u16 version u16 flags u32 meta_len u32 meta_crc32
        u64 payload_len u32 payload_crc32 u32 header_crc32                          32 bytes
        meta      UTF-8 JSON, an object:
                    seq             number of the chunk in its capture, from 0
                    start_ns end_ns wall_offset_ns paused_ns     as in `capture.CaptureInfo`
                    capture         id, version, host (an object about the machine)
                    raw_len         bytes of the payload, decompressed
                    tables          of each: name, offset and length in the decompressed payload
                    last            true in the chunk with which the recorder closed the file
        payload   one zstd frame: an Arrow IPC stream for each table; in version 2, which agents
                  send to servers, with lengths instead of offsets (`lengths.py`)
```

All little endian; checksums are CRC-32 as in zlib, `header_crc32` over the 28 bytes before it. A
recorder that is killed leaves a truncated chunk; a bad disk leaves one with a wrong checksum.
Either costs that chunk only: the reader searches for the next header with a correct checksum.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from sonde.errors import CaptureTooNew, CaptureTruncated, NotACapture

FILE_NAME = b"SONDE"
"""What a capture begins with, also one whose line ends a transfer as text has changed."""
FILE_MAGIC = FILE_NAME + b"\r\n\x1a"
FILE_HEADER = struct.Struct("<8sH6x")
CHUNK_MAGIC = b"SCHK"
CHUNK_HEADER = struct.Struct("<4sHHIIQII")
VERSION = 1
"""Of files, and of chunks in them."""
WITH_LENGTHS = 2
"""Version of a chunk that was packed to be sent."""

_SCAN_BYTES = 1 << 20
"""Size of one read when the next header is searched for."""
_MAX_META_BYTES = 1 << 20
"""Greatest size of a chunk's metadata; Sonde writes about 2 KB."""
_MAX_PAYLOAD_BYTES = 512 << 20
"""Compressed; a larger one counts as damaged."""
_MAX_WASTED = 2
"""Reading stops once damaged chunks have claimed this many times the file's size: in a hostile file
each of many headers can claim the rest of the file."""


Admit = Callable[[bytes, int], bool]
"""Called with a chunk's metadata, whose checksum is correct, and the length of its payload before
that is read: False, the chunk is a `BadChunk` and its payload is not read. May raise."""


@dataclass(frozen=True, slots=True)
class RawChunk:
    """A chunk with correct checksums."""

    meta: bytes
    payload: bytes
    """Compressed."""
    end: int
    """Offset in the file of the byte after it."""
    has_lengths: bool
    """Its payload has lengths instead of offsets (`lengths.py`)."""


@dataclass(frozen=True, slots=True)
class BadChunk:
    """A part of the file without a readable chunk."""

    offset: int
    size_bytes: int
    at_end: bool
    """The file ends within it, and no other header follows: the end of a truncated recording."""

    @property
    def end(self) -> int:
        """Where reading goes on, in bytes of the file."""
        return self.offset + self.size_bytes


@dataclass(frozen=True, slots=True)
class _Header:
    """Of a chunk; its checksum is correct."""

    version: int
    meta_len: int
    meta_crc32: int
    payload_len: int
    payload_crc32: int

    @property
    def size_bytes(self) -> int:
        return CHUNK_HEADER.size + self.meta_len + self.payload_len


def check_file_header(head: bytes, name: str) -> None:
    """Check the first 16 bytes of a file; `name` is the file's, for the message.

    Raises NotACapture, CaptureTruncated or CaptureTooNew.
    """
    if len(head) < FILE_HEADER.size:
        if head == FILE_MAGIC[: len(head)] or head.startswith(FILE_MAGIC):
            what = "is empty" if not head else f"ends after {len(head)} bytes"
            raise CaptureTruncated(
                f"{name} {what}: it holds no chunk",
                "record again and let the recorder run for at least a second",
            )
        raise NotACapture(f"{name} is no Sonde capture", "give a file that `sonde record` wrote")
    magic, version = FILE_HEADER.unpack(head[: FILE_HEADER.size])
    if magic != FILE_MAGIC or version == 0:
        raise NotACapture(f"{name} is no Sonde capture", "give a file that `sonde record` wrote")
    if version > VERSION:
        raise CaptureTooNew(
            f"{name} has format {version}, this Sonde reads up to {VERSION}",
            "upgrade Sonde here, or report on the machine that recorded it",
        )


def most_packed_bytes(raw_bytes: int) -> int:
    """Greatest length of a payload that decompresses to so much.

    What does not compress grows by 1/256 and 64 bytes at most (`ZSTD_compressBound`), which a
    kilobyte more leaves room to: for a frame that is made piece by piece.
    """
    return raw_bytes + (raw_bytes >> 8) + 1_024


def chunks(
    file: BinaryIO, size_bytes: int, admit: Admit | None = None
) -> Iterator[RawChunk | BadChunk]:
    """Iterate over the chunks after the file header.

    `file` must be seekable; `size_bytes` is its length. `admit` is called once at most for each
    item. No content of the file raises an error, unless `admit` does.
    """
    return framed_chunks(file, size_bytes, FILE_HEADER.size, admit)


def framed_chunks(
    file: BinaryIO, size_bytes: int, position: int = 0, admit: Admit | None = None
) -> Iterator[RawChunk | BadChunk]:
    """Iterate over the chunks from an offset on. Chunks are sent to servers so: without a file
    header."""
    wasted_bytes = 0
    while position < size_bytes:
        header = _header_at(file, position)
        chunk = _chunk_at(file, position, header, size_bytes, admit) if header else None
        if chunk:
            yield chunk
            position = chunk.end
            continue
        wasted_bytes += header.size_bytes if header else 0
        if wasted_bytes > _MAX_WASTED * size_bytes:
            yield BadChunk(offset=position, size_bytes=size_bytes - position, at_end=False)
            return
        following = _after_damage(file, position, header, size_bytes)
        at_end = following is None
        end = size_bytes if following is None else following
        yield BadChunk(offset=position, size_bytes=end - position, at_end=at_end)
        position = end


def chunk_at(file: BinaryIO, size_bytes: int, position: int) -> RawChunk | None:
    """The chunk at an offset; None where none begins there or it is damaged."""
    header = _header_at(file, position)
    found = _chunk_at(file, position, header, size_bytes) if header else None
    return found if isinstance(found, RawChunk) else None


def _header_at(file: BinaryIO, position: int) -> _Header | None:
    file.seek(position)
    raw = file.read(CHUNK_HEADER.size)
    if len(raw) < CHUNK_HEADER.size:
        return None
    magic, version, _flags, meta_len, meta_crc32, payload_len, payload_crc32, header_crc32 = (
        CHUNK_HEADER.unpack(raw)
    )
    if magic != CHUNK_MAGIC or zlib.crc32(raw[:-4]) != header_crc32:
        return None
    return _Header(version, meta_len, meta_crc32, payload_len, payload_crc32)


def _chunk_at(
    file: BinaryIO,
    position: int,
    header: _Header,
    size_bytes: int,
    admit: Admit | None = None,
) -> RawChunk | BadChunk | None:
    """Read the chunk after its header, where the file is positioned; BadChunk if it is not
    admitted, None if it is damaged."""
    end = position + header.size_bytes
    if header.version not in (VERSION, WITH_LENGTHS) or end > size_bytes:
        return None
    if header.meta_len > _MAX_META_BYTES or header.payload_len > _MAX_PAYLOAD_BYTES:
        return None
    begin = position + CHUNK_HEADER.size
    meta = file.read(header.meta_len)
    if len(meta) != header.meta_len or zlib.crc32(meta) != header.meta_crc32:
        return None
    if admit and not admit(meta, header.payload_len):
        return BadChunk(begin, end - begin, at_end=False)
    payload = file.read(header.payload_len)
    if len(payload) != header.payload_len or zlib.crc32(payload) != header.payload_crc32:
        return None
    return RawChunk(meta, payload, end, header.version == WITH_LENGTHS)


def _after_damage(
    file: BinaryIO, position: int, header: _Header | None, size_bytes: int
) -> int | None:
    """Where reading goes on after a bad chunk: at the next correct header; at the end of the file
    where the bad chunk ends there by its header; None where no header follows."""
    if header:
        # The header is correct, so its lengths are too, unless bytes were removed or inserted.
        end = position + header.size_bytes
        if end == size_bytes:
            return end
        if end < size_bytes and _header_at(file, end):
            return end
    scan = position + 1
    while scan < size_bytes:
        scan = _past_hole(file, scan, size_bytes)
        file.seek(scan)
        block = file.read(_SCAN_BYTES)
        if not block:
            return None
        found = block.find(CHUNK_MAGIC)
        while found >= 0:
            if _header_at(file, scan + found):
                return scan + found
            found = block.find(CHUNK_MAGIC, found + 1)
        scan += max(1, len(block) - len(CHUNK_MAGIC) + 1)
    return None


def _past_hole(file: BinaryIO, position: int, size_bytes: int) -> int:
    """Offset of the next data: skips holes of sparse files, which may be terabytes."""
    try:
        return max(position, file.seek(position, os.SEEK_DATA))
    except OSError as error:  # ENXIO: no more data; others: a file system without holes
        return size_bytes if error.errno == errno.ENXIO else position
    except ValueError:  # an object that is not a real file, such as BytesIO
        return position
