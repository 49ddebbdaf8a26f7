# SPDX-License-Identifier: Apache-2.0
"""Labels of metric series, as captures store them (JSON), parsed."""

from __future__ import annotations

import json


def attributes_of(labels: str) -> dict[str, str]:
    """Attributes of a series by name; empty where the labels are no JSON object."""
    try:
        found = json.loads(labels or "{}")
    except (ValueError, RecursionError):
        return {}
    return {key: str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def index_of(text: str) -> int:
    """The index of a device; -1 where the text is no number of up to five digits."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else -1
