# SPDX-License-Identifier: Apache-2.0
"""Times as assistants and people write them."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime

from sonde.errors import UsageError

_AGO = re.compile(r"-(\d{1,6}(?:\.\d{1,3})?)\s*([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_MAX_S = 4e9


def seconds(text: str, now_s: float) -> float:
    """Seconds since 1970 of `now`, `-15m`, `2026-11-24T10:00:00Z` or `1795300000`. A time without a
    zone is UTC. Raises UsageError."""
    text = text.strip()
    if text in ("", "now"):
        return now_s
    if ago := _AGO.fullmatch(text):
        return now_s - float(ago[1]) * _UNIT_S[ago[2]]
    try:
        found = float(text)
    except ValueError:
        try:
            parsed = datetime.fromisoformat(text)
            zoned = parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)
            found = zoned.timestamp()
        except (ValueError, OverflowError):
            found = math.nan
    if not 0 <= found <= _MAX_S:
        raise UsageError(
            f"{text[:40]!r} is no time", "write now, -15m, 2026-11-24T10:00:00Z, or seconds"
        )
    return found


def iso(time_s: float) -> str:
    """A time since 1970 as ISO 8601, in UTC, with milliseconds."""
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds")
