# SPDX-License-Identifier: Apache-2.0
"""What perf script prints: read, checked for columns that fit together, explained."""

from __future__ import annotations

from data import MemoryFile
from sonde.analyze.bound import explain
from sonde.export import verdict
from sonde.readers import perf_script
from timeline_checks import check

_file = MemoryFile()


def one(raw: bytes) -> None:
    """Read the text and explain it."""
    timeline = perf_script.read(_file.holding(raw))
    check(timeline)
    verdict.to_json(explain(timeline))
