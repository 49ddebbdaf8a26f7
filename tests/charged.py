# SPDX-License-Identifier: Apache-2.0
"""How much memory a reader takes, beside what it accounts for."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from types import ModuleType

import pytest

from sonde.limits import Budget


def charged(reader: ModuleType, path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """(bytes that Python took at most, bytes that were accounted for) while a file was read."""
    made: list[Budget] = []

    def budget(name: str, packed_bytes: int) -> Budget:
        made.append(Budget(name, packed_bytes))
        return made[-1]

    monkeypatch.setattr(reader, "Budget", budget)
    tracemalloc.start()
    try:
        timeline = reader.read(path)
        taken_bytes = tracemalloc.get_traced_memory()[1]
        del timeline
    finally:
        tracemalloc.stop()
    return taken_bytes, made[0].held_bytes
