# SPDX-License-Identifier: Apache-2.0
"""A tenant that takes all connections is in the way of none but itself."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send
from tests.unit.test_server_connections import ask_of, connected, is_closed, served

from sonde.mcp.accepted_tokens import AcceptedTokens
from sonde.mcp.http import REQUESTS_OF_TENANT, _WithToken
from sonde.server import answers
from sonde.server.held_connections import HeldConnections
from sonde.server.tokens import Scope as TokenScope

__all__ = ["served"]
PLACES = 16
"""Of `served`."""
CHUNK = b"POST /v1/chunks HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"


def head_of(service: Any, tenant: str, first_line: bytes) -> bytes:
    """A request's head with a token of a tenant."""
    token = service.tokens.make(tenant, [TokenScope.READ, TokenScope.INGEST])[1]
    return first_line + f"Authorization: Bearer {token}\r\n\r\n".encode()


@contextlib.contextmanager
def held(port: int, ask: bytes, more: bytes, number: int) -> Iterator[list[Any]]:
    """Connections on which something was asked with a valid token, and something more begins."""
    with contextlib.ExitStack() as stack:
        ones = []
        for _ in range(number):
            one = stack.enter_context(connected(port))
            one.sendall(ask)
            assert b" 200 " in one.recv(1000)
            one.sendall(more)
            ones.append(one)
        time.sleep(0.2)
        yield ones


@pytest.mark.parametrize("more", ["head", "body"])
def test_who_takes_all_connections_keeps_no_other_tenant_out(served, more):
    service, port, _ = served
    begun = {"head": b"G", "body": head_of(service, "flood", CHUNK) + b"1"}[more]
    flood = head_of(service, "flood", b"GET /v1/identity HTTP/1.1\r\nHost: localhost\r\n")
    with held(port, flood, begun, 2 * PLACES) as ones:
        for _ in range(3):
            with connected(port) as other:
                other.sendall(ask_of(service))
                assert b" 200 " in other.recv(1000)
        if more == "head":  # of bodies, one tenant's are refused before
            assert is_closed(ones[0])
            ones[-1].settimeout(0.3)
            assert not is_closed(ones[-1])
            assert service.counters.refused["displaced"] >= PLACES


def test_idle_connections_of_others_stay(served):
    service, port, _ = served
    flood = head_of(service, "flood", b"GET /v1/identity HTTP/1.1\r\nHost: localhost\r\n")
    ask = ask_of(service)
    with held(port, ask, b"", 4) as others, held(port, flood, b"G", 2 * PLACES):
        for other in others:
            other.sendall(ask)
            assert b" 200 " in other.recv(1000)


def test_what_is_being_answered_does_not_give_way(served, monkeypatch):
    service, port, _ = served
    goes_on = threading.Event()
    asked = threading.Event()

    def slow(*_: Any) -> answers.Answer:
        asked.set()
        assert goes_on.wait(20)
        return answers.Answer(b"[]", "application/json")

    monkeypatch.setattr(answers, "ask", slow)
    flood = head_of(service, "flood", b"GET /v1/identity HTTP/1.1\r\nHost: localhost\r\n")
    with connected(port) as one:
        one.sendall(head_of(service, "flood", b"GET /v1/nodes HTTP/1.1\r\nHost: localhost\r\n"))
        assert asked.wait(20)
        with held(port, flood, b"G", 2 * PLACES):
            goes_on.set()
            assert b" 200 " in one.recv(1000)


def test_the_party_that_holds_most_gives_way():
    all_: HeldConnections[str] = HeldConnections()
    for one in ("a1", "a2", "a3", "b1", "b2"):
        all_.add(one, one[0])
    assert all_.giving_way() == "a1"
    assert all_.longest_idle() is None
    all_.serves("a1")
    assert all_.giving_way() == "a2"
    all_.idles("a3")
    all_.idles("b1")
    assert all_.longest_idle() == all_.giving_way() == "a3"
    all_.sends("a3")
    assert all_.longest_idle() is None
    all_.idles("a1")
    assert all_.giving_way() == "a1"
    for one in ("a1", "a2", "a3"):
        all_.serves(one)
    assert all_.giving_way() is None  # b has less than an equal share
    all_.remove("a1")
    all_.remove("a1")
    all_.remove("a2")
    assert all_.giving_way() == "b1"


def test_a_connection_counts_for_who_shows_a_token():
    all_: HeldConnections[str] = HeldConnections()
    for one in ("1", "2", "3"):
        all_.add(one, "from here")
    all_.move("1", "of a")
    all_.serves("2")
    all_.move("2", "of a")
    all_.move("gone", "of a")
    assert all_.giving_way() == "1"  # 2 is being answered
    for one in ("1", "2", "3"):
        all_.remove(one)
    assert not all_ and not all_._held and not all_._idle and not all_._sending


def test_of_mcp_one_tenants_requests_leave_places_to_others():
    goes_on = asyncio.Event()

    async def inner(_scope: Scope, _receive: Receive, send: Send) -> None:
        await goes_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    tenants = {"one": "a", "two": "a", "three": "b"}
    app = _WithToken(inner, AcceptedTokens(tenants.get))

    async def status(token: str) -> int:
        got: list[int] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"{}"}

        async def send(message: Message) -> None:
            got.append(message.get("status", 0))

        header = (b"authorization", f"Bearer {token}".encode())
        await app({"type": "http", "headers": [header]}, receive, send)
        return got[0]

    async def run() -> list[int]:
        await asyncio.gather(*map(app._tokens.party_of, tenants))
        of_a = ["one", "two"] * (REQUESTS_OF_TENANT // 2 + 10)
        requests = [asyncio.create_task(status(token)) for token in (*of_a, "three")]
        await asyncio.sleep(0.2)
        goes_on.set()
        return await asyncio.gather(*requests)

    *of_a, of_b = asyncio.run(run())
    assert of_a.count(200) == REQUESTS_OF_TENANT
    assert of_a.count(503) == 20
    assert of_b == 200


def test_of_mcp_tokens_of_a_tenant_are_one_party():
    tenants = {"one": "a", "two": "a", "three": "b", "unreadable": "", "unreadable too": ""}
    tokens = AcceptedTokens(tenants.get)

    async def parties() -> list[str | None]:
        return [await tokens.party_of(token) for token in (*tenants, "random", "one")]

    one, two, three, first, second, random, again = asyncio.run(parties())
    assert one == two == again
    assert len({one, three, first, second}) == 4
    assert random is None
