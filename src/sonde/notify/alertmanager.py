# SPDX-License-Identifier: Apache-2.0
"""Alerts as Alertmanager's API version 2 takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sonde.notify import texts

PATH: Final = "/api/v2/alerts"


def postable(
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    starts_ns: int,
    ends_ns: int,
    url: str = "",
) -> dict[str, Any]:
    """A PostableAlert. Times in ns since 1970; after `ends_ns` the alert is resolved.

    Labels without a value are left out: Alertmanager refuses them.
    """
    found: dict[str, Any] = {
        "labels": {name: texts.plain(text) for name, text in labels.items() if text},
        "annotations": {name: texts.plain(text) for name, text in annotations.items()},
        "startsAt": texts.iso(starts_ns),
        "endsAt": texts.iso(ends_ns),
    }
    return found | ({"generatorURL": url} if url else {})
