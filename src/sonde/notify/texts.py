# SPDX-License-Identifier: Apache-2.0
"""Values as every receiver takes them: names of processes and files are others' to choose."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

import msgspec

TEXT: Final = 512
"""Characters of any text."""


def plain(text: str) -> str:
    """Printable, valid UTF-8, at most `TEXT` characters."""
    cut = text[:TEXT]
    return "".join(c if c.isprintable() else "?" for c in cut).encode("utf-8", "replace").decode()


def number(value: float) -> float:
    """A value of any unit, finite: JSON has no other."""
    return round(min(max(value, -1e9), 1e9), 6) if value == value else 0.0


def iso(unix_ns: int) -> str:
    """A time in UTC, RFC 3339, within the years that every parser takes."""
    seconds = min(max(unix_ns / 1e9, 0.0), 253_402_300_799.0)  # the year 9999
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def encoded(body: object) -> bytes:
    """As JSON that every receiver takes."""
    return msgspec.json.encode(body)
