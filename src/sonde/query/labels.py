# SPDX-License-Identifier: Apache-2.0
"""Labels of a series as attributes."""

from __future__ import annotations

import json


def attributes_of(labels: str) -> dict[str, str]:
    """Attributes of a series; none where the capture holds something else in their place."""
    try:
        found = json.loads(labels or "{}")
    except (ValueError, RecursionError):
        return {}
    return {key: str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def index_of(text: str) -> int:
    """The index of a device, -1 for what is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else -1
