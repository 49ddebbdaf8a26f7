# SPDX-License-Identifier: Apache-2.0
"""Traces of torch.profiler: read, checked for columns that fit together, explained."""

from __future__ import annotations

from data import MemoryFile
from sonde.analyze.bound import explain
from sonde.export import verdict
from sonde.readers import kineto
from timeline_checks import check

_file = MemoryFile()


def one(raw: bytes) -> None:
    """Read a trace and explain it."""
    timeline = kineto.read(_file.holding(raw))
    check(timeline)
    explanation = explain(timeline)
    verdict.render(explanation, 3)
    verdict.to_json(explanation)
