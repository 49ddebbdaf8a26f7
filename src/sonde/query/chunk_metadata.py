# SPDX-License-Identifier: Apache-2.0
"""The metadata of a chunk: what is used of it, and what it and the payload cost to read.

A hostile file may have a megabyte of it in each chunk, and payloads that are holes in the file. So
both are charged to the budget before the payload is read, and what is decoded is not kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from sonde.limits import JSON_BYTES, Budget, is_plausible
from sonde.query import framing
from sonde.query.schema import TABLES

_MAX_RAW_BYTES = 512 << 20
"""A chunk covers seconds of one machine; one that claims more than this is damaged or hostile."""
_MAX_TABLES = 256
"""Tables that a chunk's metadata may list; Sonde writes at most one of each of `schema.TABLES`."""
MAX_NESTED = 16
"""Lists and objects within one another that a chunk's metadata (`capture`) may have: `json` could
not write again what is nested some hundreds deep."""
MAX_VALUES = 2_048
"""Values that a chunk's metadata may have; Sonde writes fewer than a hundred. Decoding values takes
far more time than reading as many bytes of text."""
CHUNK_BYTES = 1 << 10
"""Memory of a chunk besides its bytes: what is known of it until it is merged, then its number."""


class DamagedChunkError(Exception):
    """A chunk with correct checksums and invalid content."""


@contextmanager
def damage() -> Iterator[None]:
    """Whatever invalid content raises becomes a DamagedChunkError."""
    try:
        yield
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise DamagedChunkError(str(error)) from error


def chunk_meta(raw: bytes) -> dict[str, Any]:
    """The metadata of a chunk (`framing`). Raises DamagedChunkError where a value is impossible."""
    if _has_more_values(raw, MAX_VALUES):
        raise DamagedChunkError("meta: too many values")
    try:
        # Not of bytes, which `json` also takes as UTF-16, where no quote above was one.
        text = raw.decode("utf-8", "surrogatepass")
        meta: dict[str, Any] = json.loads(text, parse_constant=_no_number)
        numbers = [meta[k] for k in ("seq", "start_ns", "end_ns", "wall_offset_ns", "raw_len")]
        numbers.append(meta.get("paused_ns", 0))
        capture = meta["capture"]
        is_plausible_meta = (
            all(type(number) is int and abs(number) < 1 << 62 for number in numbers)
            and 0 <= meta["seq"] < 1 << 40
            and min(meta["start_ns"], meta["end_ns"], numbers[-1]) >= 0
            and meta["end_ns"] + meta["wall_offset_ns"] >= 0
            and meta["start_ns"] + meta["wall_offset_ns"] >= 0
            and len(meta["tables"]) <= _MAX_TABLES
            and 0 <= meta["raw_len"] <= _MAX_RAW_BYTES
            and isinstance(meta["tables"], list)
            and isinstance(capture.get("host"), dict)
            and not _is_nested_deeper(capture, MAX_NESTED)
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedChunkError(f"meta: {error}") from error
    if not is_plausible_meta:
        raise DamagedChunkError("meta: a value is out of range")
    return meta


def _has_more_values(raw: bytes, most: int) -> bool:
    """Whether a JSON text has more than `most` values, lists and objects, without decoding it:
    takes time in proportion to its length, some microseconds for 64 KiB without long texts."""
    if separators(raw) <= most:
        return False
    # What is within texts does not count: first no quote is left in them, then no text.
    unquoted = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    return separators(b"".join(unquoted.split(b'"')[::2])) > most


def separators(raw: bytes) -> int:
    """Characters of a JSON text that begin a list or an object, or end a value before another: no
    fewer than it has of these, as texts in it may have them, too."""
    return raw.count(b"[") + raw.count(b"{") + raw.count(b",")


def _is_nested_deeper(value: object, most: int) -> bool:
    """Whether more than `most` lists and objects are within one another."""
    level: list[Any] = [value]
    for _ in range(most + 1):
        level = [
            one
            for outer in level
            for one in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(one, dict | list)
        ]
        if not level:
            return False
    return True


def _no_number(name: str) -> float:
    """For `json`: refuses NaN and Infinity."""
    raise ValueError(f"{name} is not a number")


@dataclass(frozen=True, slots=True)
class Listed:
    """A table in a chunk's payload, as the metadata has it."""

    name: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class About:
    """What is used of a chunk's metadata, which may have far more in it."""

    raw: bytes
    """All of it."""
    seq: int
    start_ns: int
    end_ns: int
    paused_ns: int
    wall_offset_ns: int
    raw_len: int
    tables: list[Listed]
    is_last: bool


@dataclass(slots=True)
class Known:
    """What the metadata of all chunks read so far comes to."""

    last: About | None = None
    chunks: int = 0
    numbers: set[int] = field(default_factory=set)
    start_ns: int = 1 << 62
    end_ns: int = 0
    paused_ns: int = 0

    def add(self, about: About) -> None:
        self.last = about
        self.chunks += 1
        self.numbers.add(about.seq)
        self.start_ns = min(self.start_ns, about.start_ns)
        self.end_ns = max(self.end_ns, about.end_ns)
        self.paused_ns += about.paused_ns


class Gate:
    """Charges a chunk's metadata and payload to the budget before the payload is read."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._about: About | None = None
        self._held_bytes = 0
        """Of a chunk that was admitted and neither taken nor refused since."""

    def admit(self, raw: bytes, payload_bytes: int) -> bool:
        """See `framing.Admit`. Raises CaptureTooLarge."""
        decoded_bytes = JSON_BYTES * len(raw)
        self._budget.hold(decoded_bytes)
        try:
            self._about = about_of(raw, payload_bytes)
        except DamagedChunkError:
            return False
        finally:
            self._budget.hold(-decoded_bytes)
        self._held_bytes = len(raw) + payload_bytes + CHUNK_BYTES
        self._budget.hold(self._held_bytes)
        return True

    def take(self) -> About:
        """The chunk that was admitted has been read. What it holds is the caller's to give back."""
        assert self._about
        about, self._about, self._held_bytes = self._about, None, 0
        return about

    def refuse(self) -> None:
        """There is no chunk with a correct payload."""
        self._budget.hold(-self._held_bytes)
        self._about, self._held_bytes = None, 0


def about_of(raw: bytes, payload_bytes: int) -> About:
    """Raises DamagedChunkError."""
    meta = chunk_meta(raw)
    raw_len = meta["raw_len"]
    if not is_plausible(raw_len, payload_bytes):
        raise DamagedChunkError("it decompresses to an implausible size")
    if payload_bytes > framing.most_packed_bytes(raw_len):
        raise DamagedChunkError("no payload of this length decompresses to so little")
    with damage():
        tables = listed(meta)
    return About(
        raw=raw,
        seq=meta["seq"],
        start_ns=meta["start_ns"],
        end_ns=meta["end_ns"],
        paused_ns=meta.get("paused_ns", 0),
        wall_offset_ns=meta["wall_offset_ns"],
        raw_len=raw_len,
        tables=tables,
        is_last=bool(meta.get("last")),
    )


def listed(meta: dict[str, Any]) -> list[Listed]:
    """The tables of a chunk that are in `TABLES` and not empty. Raises what `damage` turns into
    DamagedChunkError, and that."""
    found: dict[str, Listed] = {}
    for entry in meta["tables"]:
        name, offset, length = entry["name"], entry["offset"], entry["length"]
        if name not in TABLES or not length:
            continue
        if name in found:
            raise DamagedChunkError(f"table {name} comes twice")
        if type(offset) is not int or type(length) is not int:
            raise DamagedChunkError(f"table {name} has no place in its payload")
        found[name] = Listed(name, offset, length)
    return list(found.values())
