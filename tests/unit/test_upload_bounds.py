# SPDX-License-Identifier: Apache-2.0
"""Sending a capture that somebody made up takes no more memory than its chunks may."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from hostile_inputs import holes
from sonde.server import upload


def test_a_hole_in_the_file_is_damage_and_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.sonde"
    holes(path, 150 << 20, 150 << 20, 2)
    bodies: list[int] = []

    def send(*args: Any) -> None:
        bodies.append(len(args[2]))

    monkeypatch.setattr(upload, "_send", send)
    tracemalloc.start()
    try:
        sent = upload.upload(path, "http://127.0.0.1:1", "node")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(bodies) == 2
    assert sent.damaged == 2
    assert peak < 32 << 20
