# SPDX-License-Identifier: Apache-2.0
"""The chunks of a request's body: taken apart and checked, before anything of them is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO

from sonde.limits import is_plausible
from sonde.query import framing
from sonde.query.chunk_metadata import DamagedChunkError, chunk_meta, separators

QUICK_BYTES, QUICK_VALUES = 8 << 10, 512
"""Metadata of a request that is quickly decoded, each once, however many chunks have it. Agents
send about a kilobyte and 70 values for each chunk, and one chunk at a time unless they catch up."""


class BodyRefusedError(Exception):
    """A body that is not taken."""

    def __init__(self, why: str, status: int, cause: str, remedy: str) -> None:
        """`why`: for `Counters.refuse`; `status`: of HTTP."""
        super().__init__(cause)
        self.why, self.status, self.cause, self.remedy = why, status, cause, remedy


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of one body."""

    chunks: int
    meta_bytes: int
    """Of the metadata of one chunk."""
    metas_bytes: int
    """Of the metadata of all chunks."""
    raw_bytes: int
    """Of one chunk, decompressed."""


@dataclass(frozen=True, slots=True)
class Framed:
    """A chunk with correct checksums, whose metadata is not decoded yet."""

    content: bytes
    """All of it, as it came."""
    meta: bytes
    payload_bytes: int


def framed(body: bytes, limits: BodyLimits) -> list[Framed]:
    """The chunks of a body. Raises BodyRefusedError."""
    found: list[Framed] = []
    at = metas_bytes = 0
    file = BytesIO(body)
    while at < len(body):
        chunk = framing.chunk_at(file, len(body), at)
        if chunk is None or len(found) >= limits.chunks:
            cause = "a chunk is damaged, or too many"
            raise BodyRefusedError("damaged", 400, cause, "send it again")
        if len(chunk.meta) > limits.meta_bytes:
            raise _wrong()
        metas_bytes += len(chunk.meta)
        if metas_bytes > limits.metas_bytes:
            raise BodyRefusedError(
                "meta", 413,
                f"the chunks have more than {limits.metas_bytes:,} bytes of metadata",
                "send fewer chunks at once",
            )  # fmt: skip
        found.append(Framed(body[at : chunk.end], chunk.meta, len(chunk.payload)))
        at = chunk.end
    if not found:
        raise BodyRefusedError("empty", 400, "there is no chunk in the request", "send one")
    return found


def is_quick(chunks: Sequence[Framed]) -> bool:
    """Whether `unpacked_bytes` takes no longer than what each request takes anyway."""
    metas = {one.meta for one in chunks}
    return sum(map(len, metas)) <= QUICK_BYTES and sum(map(separators, metas)) <= QUICK_VALUES


def unpacked_bytes(chunks: Sequence[Framed], limits: BodyLimits) -> int:
    """What the chunks come to, decompressed, as their metadata has it. Raises BodyRefusedError
    unless all metadata is valid. Decoding it may take milliseconds for each chunk."""
    known: dict[bytes, int] = {}
    total = 0
    for one in chunks:
        raw_len = known.get(one.meta)
        if raw_len is None:
            try:
                raw_len = known[one.meta] = chunk_meta(one.meta)["raw_len"]
            except DamagedChunkError:
                raise _wrong() from None
        if raw_len > limits.raw_bytes or not is_plausible(raw_len, one.payload_bytes):
            cause = f"a chunk unpacks to {raw_len:,} bytes"
            raise BodyRefusedError("unpacked", 413, cause, "send chunks more often")
        total += raw_len
    return total


def _wrong() -> BodyRefusedError:
    return BodyRefusedError("meta", 400, "a chunk is described wrongly", "")
