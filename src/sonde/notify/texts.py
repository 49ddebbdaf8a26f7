# SPDX-License-Identifier: Apache-2.0
"""Makes values such that every receiver accepts them: names of processes and files may contain
anything."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

import msgspec

MAX_TEXT: Final = 512
"""Characters of any text."""


def plain(text: str) -> str:
    """The text as printable, valid UTF-8, cut to `MAX_TEXT` characters."""
    cut = text[:MAX_TEXT]
    return "".join(c if c.isprintable() else "?" for c in cut).encode("utf-8", "replace").decode()


def number(value: float) -> float:
    """The value, of any unit, as JSON can have it: within ±1e9, 6 decimals, NaN as 0."""
    return round(min(max(value, -1e9), 1e9), 6) if value == value else 0.0


def iso(unix_ns: int) -> str:
    """A time in UTC as RFC 3339 has it, between the years 1970 and 9999."""
    seconds = min(max(unix_ns / 1e9, 0.0), 253_402_300_799.0)  # the year 9999
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def encoded(body: object) -> bytes:
    """The body as JSON."""
    return msgspec.json.encode(body)
