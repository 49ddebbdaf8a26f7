# SPDX-License-Identifier: Apache-2.0
"""Beginnings of batches, read before a sender is known: bounded in number, the slowest give way."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from sonde.fleet import request_body
from sonde.fleet.first_reads import FirstReads
from sonde.fleet.request_body import read_body, read_first
from sonde.fleet.upload_slots import MIN_HOLD_S, NoFreeSlot


class Content:
    """What a client sends, part after part, then nothing for long."""

    def __init__(self, *parts: bytes) -> None:
        self._parts = list(parts)

    async def readany(self) -> bytes:
        if not self._parts:
            await asyncio.sleep(100)
        return self._parts.pop(0)


class Request:
    def __init__(self, *parts: bytes) -> None:
        self.content = Content(*parts)


def reading(reads: FirstReads, *parts: bytes) -> asyncio.Task[bytes]:
    async def read() -> bytes:
        with reads.place() as one:
            request: Any = Request(*parts)
            return await read_first(request, one)

    return asyncio.create_task(read())


def test_what_was_read_before_counts_for_the_limit_of_a_body() -> None:
    request: Any = SimpleNamespace(content_length=None)

    with pytest.raises(web.HTTPRequestEntityTooLarge):
        asyncio.run(read_body(request, 10, first=bytes(11)))


def test_the_slowest_gives_way_and_a_new_one_is_read() -> None:
    async def run() -> None:
        reads = FirstReads(2)
        slow, faster = reading(reads, b"a"), reading(reads, bytes(50_000))
        await asyncio.sleep(0.01)
        with pytest.raises(NoFreeSlot):
            await reading(reads, b"a", b"")
        await asyncio.sleep(MIN_HOLD_S)
        assert await reading(reads, b"a", b"") == b"a"
        with pytest.raises(web.HTTPRequestTimeout):
            await slow
        assert not faster.done()
        faster.cancel()
        await asyncio.gather(faster, return_exceptions=True)
        assert not reads._held

    asyncio.run(run())


def test_a_long_first_report_must_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "PROGRESS_INTERVAL_S", 0.2)

    async def run() -> None:
        length = (200_000).to_bytes(4, "big")
        with pytest.raises(web.HTTPRequestTimeout):
            async with asyncio.timeout(10):
                await reading(FirstReads(), length + bytes(request_body.FIRST_BYTES), b"dripped")

    asyncio.run(run())
