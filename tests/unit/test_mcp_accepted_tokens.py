# SPDX-License-Identifier: Apache-2.0
"""Which tokens count as accepted beside a flood of random ones."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

from sonde.mcp import accepted_tokens
from sonde.mcp.accepted_tokens import MAX_ASKED, AcceptedTokens


def at(now_s: float) -> SimpleNamespace:
    """The module `time`, at this time."""
    return SimpleNamespace(monotonic=lambda: now_s)


class Server:
    """Accepts one token, and answers others when it is let."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked: list[str] = []
        self.accepted = {"good"}

    def tenant_of(self, token: str) -> str | None:
        self.asked.append(token)
        if token != "good":
            assert self.answers.wait(20)
        return "lab" if token in self.accepted else None


def test_a_flood_of_random_tokens_is_not_asked_about_and_holds_nobody_up(monkeypatch):
    server = Server()
    tokens = AcceptedTokens(server.tenant_of)

    async def flood() -> list[str | None]:
        assert await tokens.party_of("good")
        monkeypatch.setattr(accepted_tokens, "time", at(1e12))  # it is to be asked again
        waiting = [asyncio.create_task(tokens.party_of(f"random {it}")) for it in range(MAX_ASKED)]
        await asyncio.sleep(0.1)
        beyond = [await tokens.party_of(f"more {it}") for it in range(500)]
        assert await tokens.party_of("good")
        server.answers.set()
        return [*beyond, *await asyncio.gather(*waiting)]

    assert not any(asyncio.run(flood()))
    assert len(server.asked) == 1 + MAX_ASKED


def test_a_token_that_is_refused_later_counts_no_more(monkeypatch):
    server = Server()
    server.answers.set()
    tokens = AcceptedTokens(server.tenant_of)

    async def sequence() -> None:
        assert await tokens.party_of("good")
        server.accepted.clear()
        monkeypatch.setattr(accepted_tokens, "time", at(1e12))
        assert not await tokens.party_of("good")
        tokens._asked = MAX_ASKED
        monkeypatch.setattr(accepted_tokens, "time", at(2e12))
        assert not await tokens.party_of("good")

    asyncio.run(sequence())
