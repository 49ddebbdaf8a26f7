# SPDX-License-Identifier: Apache-2.0
"""One tenant beside another: slow senders, clients that do not read, floods of refused requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import uvicorn
from starlette.routing import Route
from test_server_opened import unpacked

from captures import scene
from sonde.server import answers, listen, opened
from sonde.server.admission import REFUSALS_A_SECOND
from sonde.server.app import Api
from sonde.server.opened import Opener
from sonde.server.service import RefusedRequestError, ServerLimits, Service
from sonde.server.tokens import Scope
from sonde.server.turns import Turns

PROFILES = "v1development/profiles"


async def slowly() -> AsyncIterator[bytes]:
    for _ in range(1_000):
        yield b"S"
        await asyncio.sleep(0.05)


async def at_once(content: bytes) -> AsyncIterator[bytes]:
    yield content


def test_a_slow_file_keeps_nobody_elses_from_being_read(tmp_path: Path) -> None:
    async def beside() -> tuple[bytes, int]:
        opener = Opener(tmp_path)
        slow = [
            asyncio.create_task(opener.open("evil", 0, slowly()))
            for _ in range(opened.FILES_OF_TENANT)
        ]
        await asyncio.sleep(0.1)
        with pytest.raises(RefusedRequestError) as refused:
            await opener.open("evil", 0, at_once(b"x"))
        found = await opener.open("victim", 0, at_once(scene().bytes()))
        for one in slow:
            one.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        return found.content, refused.value.status

    content, status = asyncio.run(beside())
    assert unpacked(content)["flames"]["cpu"]["total"]["n"] == 650
    assert status == 503
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_comes_too_slowly_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "BEGIN_S", 0.3)
    begun = time.monotonic()
    with pytest.raises(RefusedRequestError) as refused:
        asyncio.run(Opener(tmp_path).open("a", 0, slowly()))
    assert refused.value.status == 408
    assert time.monotonic() - begun < 5


def test_turns_of_a_tenant_leave_room_for_others() -> None:
    async def sequence() -> list[str]:
        turns = Turns(1, 4, 3)
        order: list[str] = []

        async def one(tenant: str, name: str) -> None:
            with turns.place(tenant):
                async with turns.turn(tenant):
                    order.append(name)
                    await asyncio.sleep(0.01)

        await asyncio.gather(*(one("a", f"a{at}") for at in range(3)), one("b", "b0"))
        await one("a", "a3")
        return order

    order = asyncio.run(sequence())
    assert order[:2] == ["a0", "b0"]
    assert sorted(order) == ["a0", "a1", "a2", "a3", "b0"]

    turns = Turns(1, 4, 3)
    with turns.place("a"), turns.place("a"), turns.place("a"):
        with pytest.raises(RefusedRequestError), turns.place("a"):
            pass
        with turns.place("b"), pytest.raises(RefusedRequestError), turns.place("b"):
            pass
        with turns.place("b"), turns.place("c"):  # who holds none gets one beyond all
            pass
    with turns.place("a"):
        pass


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Service, int]]:
    """A server that answers `/v1/nodes` with 8 MB, and where it listens."""
    big = answers.Answer(bytes(8 << 20), "application/octet-stream")
    monkeypatch.setattr(answers, "ask", lambda *_: big)
    limits = ServerLimits(unread_s=1.5, unsent_bytes=12 << 20, connections=16)
    service = Service(tmp_path / "store", limits, flushes=False)
    config = uvicorn.Config(
        Api(service).app(), log_config=None, lifespan="off", limit_concurrency=limits.connections,
        http=listen.protocol_with(limits),
    )  # fmt: skip
    server = uvicorn.Server(config)
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield service, listening.getsockname()[1]
    server.should_exit = True
    thread.join(30)
    listening.close()
    service.close()


def asked(port: int, token: str, *, window_bytes: int = 0) -> socket.socket:
    """A connection on which something was asked."""
    one = socket.socket()
    if window_bytes:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window_bytes)
    one.settimeout(30)
    one.connect(("127.0.0.1", port))
    head = f"GET /v1/nodes HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {token}\r\n\r\n"
    one.sendall(head.encode())
    return one


def read(one: socket.socket) -> bytes:
    """All that comes until the other side closes, or the whole answer."""
    content = b""
    while part := one.recv(1 << 20):
        content += part
        if len(content) > 8 << 20:
            break
    return content


def read_until(one: socket.socket, end: bytes) -> bytes:
    """What comes until `end`, or until the other side closes."""
    content = b""
    while end not in content and (part := one.recv(1 << 20)):
        content += part
    return content


def test_answers_that_are_not_read_are_given_up(served: tuple[Service, int]) -> None:
    service, port = served
    evil = service.tokens.make("evil", {Scope.READ})[1]
    victim = service.tokens.make("victim", {Scope.READ})[1]
    unread = [asked(port, evil, window_bytes=4096) for _ in range(2)]
    for one in unread:
        one.recv(1, socket.MSG_PEEK)
    assert b" 503 " in asked(port, evil).recv(1000)
    assert len(read(asked(port, victim))) > 8 << 20

    time.sleep(4)
    for one in unread:
        with contextlib.suppress(ConnectionResetError):
            assert len(read(one)) < 8 << 20
        one.close()
    assert len(read(asked(port, evil))) > 8 << 20


def test_a_slow_disk_holds_up_no_request_but_its_own(
    served: tuple[Service, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, port = served
    is_asked, may_go_on = threading.Event(), threading.Event()

    def slowly_counted() -> dict[str, int]:
        is_asked.set()
        assert may_go_on.wait(30)
        return {"chunks_stored": 7}

    monkeypatch.setattr(service.catalog, "counters", slowly_counted)

    def get(path: str) -> socket.socket:
        one = socket.create_connection(("127.0.0.1", port), 30)
        one.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
        return one

    with get("/metrics") as slow:
        assert is_asked.wait(10)
        with get("/healthz") as other:
            assert b" 200 " in other.recv(1000)
        may_go_on.set()
        assert b"sonde_store_chunks_stored_total 7\n" in read(slow)


def test_refused_requests_are_logged_at_a_bounded_rate(
    served: tuple[Service, int], caplog: pytest.LogCaptureFixture
) -> None:
    service, port = served
    token = service.tokens.make("evil", {Scope.INGEST})[1]
    other = service.tokens.make("victim", {Scope.INGEST})[1]
    with caplog.at_level(logging.INFO, "sonde.audit"):
        for _ in range(200):
            with asked(port, token) as one:
                assert b" 403 " in one.recv(1000)
        with asked(port, other) as one:
            assert b" 403 " in one.recv(1000)
    logged = [one.getMessage() for one in caplog.records if one.name == "sonde.audit"]
    assert len(logged) < 100 + REFUSALS_A_SECOND
    assert '"victim"' in logged[-1]
    assert service.counters.refused["unlogged"] > 100


def test_errors_of_ours_are_answered_and_logged_at_a_bounded_rate(
    served: tuple[Service, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service, port = served
    token = service.tokens.make("evil", {Scope.READ})[1]

    def fail(*_: object) -> None:
        raise ValueError("too large")

    monkeypatch.setattr(answers, "ask", fail)
    with caplog.at_level(logging.ERROR):
        for _ in range(30):
            with asked(port, token) as one:
                assert b" 500 " in one.recv(1000)
    assert 1 <= len(caplog.records) <= 10
    assert "ValueError" in caplog.text


def test_connections_that_only_wait_make_room_for_others(served: tuple[Service, int]) -> None:
    service, port = served
    evil = service.tokens.make("evil", {Scope.INGEST})[1]
    victim = service.tokens.make("victim", {Scope.READ})[1]
    waiting = []
    for _ in range(40):
        waiting.append(asked(port, evil))
        assert b" 403 " in waiting[-1].recv(1000)
    assert len(read(asked(port, victim))) > 8 << 20
    for one in waiting:
        one.close()


def test_bodies_that_arrive_slowly_leave_connections_to_others(
    served: tuple[Service, int],
) -> None:
    service, port = served
    evil = service.tokens.make("evil", {Scope.INGEST})[1]
    victim = service.tokens.make("victim", {Scope.READ})[1]
    slow = []
    for _ in range(20):
        one = socket.create_connection(("127.0.0.1", port), timeout=30)
        head = "POST /v1/chunks HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n"
        one.sendall(f"{head}Authorization: Bearer {evil}\r\n\r\nx".encode())
        slow.append(one)
    time.sleep(0.3)
    assert len(read(asked(port, victim))) > 8 << 20
    for one in slow:
        one.close()


def test_a_client_that_goes_away_is_no_defect(
    served: tuple[Service, int], caplog: pytest.LogCaptureFixture
) -> None:
    service, port = served
    token = service.tokens.make("a", {Scope.INGEST, Scope.READ})[1]
    with caplog.at_level(logging.ERROR):
        for path in ("chunks", "open"):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as one:
                head = f"POST /v1/{path} HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n"
                kind = "Content-Type: application/octet-stream"
                one.sendall(f"{head}{kind}\r\nAuthorization: Bearer {token}\r\n\r\nx".encode())
                time.sleep(0.3)
        deadline_s = time.monotonic() + 20
        while service.counters.refused.get("gone", 0) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.05)
    assert service.counters.refused.get("gone") == 2
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


def test_every_request_counts_against_its_token_s_rate(
    served: tuple[Service, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, port = served
    token = service.tokens.make("a", set(Scope))[1]

    def full(*_: object) -> None:
        raise RefusedRequestError(429, "this token sends too much", "send less")

    monkeypatch.setattr(service, "admit", full)
    kinds = {"/v1/open": "application/octet-stream"}
    routes = [one for one in Api(service).app().routes if isinstance(one, Route)]
    for route in routes:
        if not route.path.startswith("/v1/") or "{" in route.path:
            continue
        for method in sorted((route.methods or {"GET"}) - {"HEAD"}):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as one:
                kind = f"Content-Type: {kinds.get(route.path, '')}\r\nContent-Length: 0\r\n"
                head = f"{method} {route.path} HTTP/1.1\r\nHost: a\r\n{kind}"
                one.sendall(f"{head}Authorization: Bearer {token}\r\n\r\n".encode())
                assert b" 429 " in one.recv(1000), (method, route.path)


def test_senders_of_profiles_and_of_chunks_are_advised_on_their_encodings(
    served: tuple[Service, int],
) -> None:
    service, port = served
    token = service.tokens.make("a", {Scope.INGEST})[1]
    for path, remedy in (("v1/chunks", b"chunks as they are"), (PROFILES, b"use gzip")):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as one:
            head = f"POST /{path} HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nContent-Encoding: br"
            kind = "Content-Type: application/x-protobuf"
            one.sendall(f"{head}\r\n{kind}\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
            answer = read_until(one, b"}")
        assert b" 415 " in answer
        assert remedy in answer
