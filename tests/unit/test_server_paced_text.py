# SPDX-License-Identifier: Apache-2.0
"""What the server answers without a token takes a bounded part of its time."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from sonde.server import app, paced_text
from sonde.server.paced_text import PacedText

TAKES_S = 0.02


def test_a_text_is_made_for_a_part_of_the_time_alone() -> None:
    made = 0

    async def make() -> str:
        nonlocal made
        made += 1
        time.sleep(TAKES_S)  # it holds up the server, as the real one
        return str(made)

    async def ask() -> None:
        text, until_s = PacedText(make), time.monotonic() + 1.0
        while time.monotonic() < until_s:
            await asyncio.gather(*(text.text() for _ in range(50)))
        assert await text.text() == str(made)

    asyncio.run(ask())
    assert 2 <= made <= 1 + 1.0 / (TAKES_S * paced_text.PART) + 1


def test_metrics_and_the_description_are_not_made_for_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = {"metrics": 0, "description": 0}

    def count(what: str) -> None:
        made[what] += 1
        time.sleep(TAKES_S)

    monkeypatch.setattr(app, "exposition", lambda *_: str(count("metrics")))
    monkeypatch.setattr(app, "document", lambda: {"made": count("description")})
    app._description.cache_clear()
    api = app.Api.__new__(app.Api)
    api._service = SimpleNamespace(catalog=SimpleNamespace(counters=dict))  # type: ignore[assignment]
    api._exposition = PacedText(api._exposed)

    async def ask() -> None:
        for _ in range(5):
            assert (await api._metrics(None)).body == b"None"  # type: ignore[arg-type]
            assert (await api._openapi(None)).body == b'{"made":null}'  # type: ignore[arg-type]

    asyncio.run(ask())
    app._description.cache_clear()
    assert made == {"metrics": 1, "description": 1}
