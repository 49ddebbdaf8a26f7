# SPDX-License-Identifier: Apache-2.0
"""What strangers send to the server: endless heads, pipelines, silent connections, bad requests."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from sonde.server import listen, pages, silent
from sonde.server.addresses import Address
from sonde.server.service import ServerLimits, Service
from sonde.server.tokens import Scope

GET = b"GET /healthz HTTP/1.1\r\nHost: a\r\n"


def ask_of(service: Service) -> bytes:
    """A question with a valid token, whose connection stays open."""
    token = service.tokens.make("lab", [Scope.READ])[1]
    head = f"GET /v1/identity HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n"
    return head.encode()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Service, int, uvicorn.Server]]:
    limits = ServerLimits(connections=16, connections_unknown=6)
    service = Service(tmp_path / "store", limits, flushes=False)
    server = uvicorn.Server(listen._config(service, Address("127.0.0.1", 0)))
    log, few = logging.getLogger("uvicorn.error"), listen._FewLines(service.counters.refuse)
    log.addFilter(few)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield service, listening.getsockname()[1], server
        server.should_exit = True
        thread.join(30)
    log.removeFilter(few)
    service.close()


def connected(port: int, host: str = "127.0.0.1") -> socket.socket:
    one = socket.socket()
    one.settimeout(20)
    one.bind((host, 0))
    one.connect(("127.0.0.1", port))
    return one


def read(one: socket.socket) -> bytes:
    """All until the other side closes."""
    content = b""
    with contextlib.suppress(ConnectionError):
        while part := one.recv(65_536):
            content += part
    return content


def is_closed(one: socket.socket) -> bool:
    """Whether the other side closes it soon."""
    try:
        return one.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


@pytest.mark.parametrize(
    ("begin", "more"),
    ids=["headers", "header", "path", "trailer", "trailers"],
    argvalues=[
        (GET, b"a:b\r\n" * 10_000),
        (GET + b"X: ", b"a" * 50_000),
        (b"GET /", b"a" * 50_000),
        (b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ", b"a" * 50_000),
        (
            b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
            b"a:b\r\n" * 999,
        ),
    ],
)
def test_an_endless_head_is_cut_off(
    served: tuple[Service, int, uvicorn.Server], begin: bytes, more: bytes
) -> None:
    service, port, _ = served
    with connected(port) as one:
        one.sendall(begin)
        sent = 0
        while sent < 64 << 20:
            try:
                one.sendall(more)
            except ConnectionError:
                break
            sent += len(more)
        assert sent < 64 << 20
    assert service.counters.refused["head"] == 1


def test_an_answered_request_leaves_nothing_in_its_connection(
    served: tuple[Service, int, uvicorn.Server],
) -> None:
    service, port, server = served
    with connected(port) as one:
        one.sendall(ask_of(service)[:-2] + b"X: " + b"a" * 60_000 + b"\r\n\r\n")
        assert b" 200 " in one.recv(1000)
        ends = time.monotonic() + 10
        (kept,) = server.server_state.connections
        while isinstance(kept, listen.HttpToolsProtocol) and kept.headers:
            assert time.monotonic() < ends
            time.sleep(0.01)
        gc.collect()
        large = [x for x in gc.get_referents(kept, kept.cycle) if len(str(x)) > 50_000]
        assert not large
        one.sendall(GET + b"\r\n")
        assert b" 200 " in one.recv(1000)


def test_few_requests_are_answered_in_turn_and_many_close_the_connection(
    served: tuple[Service, int, uvicorn.Server],
) -> None:
    service, port, _ = served
    ask = ask_of(service)
    with connected(port) as one:
        few = listen.PIPELINED - 1
        one.sendall(ask * few + GET[:9])
        content = b""
        while content.count(b'"tenant"') < few:
            part = one.recv(65_536)
            assert part
            content += part
        one.sendall(GET[9:] + b"Connection: close\r\n\r\n")
        assert b" 200 " in read(one)
    with connected(port) as one:
        one.sendall(ask * 5_000)
        assert read(one).count(b'"tenant"') <= listen.PIPELINED
    assert service.counters.refused["pipelined"] == 1


def test_silent_connections_give_way_the_oldest_first(
    served: tuple[Service, int, uvicorn.Server],
) -> None:
    _, port, _ = served
    with contextlib.ExitStack() as held:
        silent = [held.enter_context(connected(port, f"127.0.0.{2 + at}")) for at in range(7)]
        assert is_closed(silent[0])
        silent[1].settimeout(0.3)
        assert not is_closed(silent[1])
        silent[1].sendall(GET + b"\r\n")
        silent[1].settimeout(20)
        assert b" 200 " in silent[1].recv(1000)


def test_strangers_who_do_not_read_hold_few_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    static = tmp_path / "static"
    (static / "assets").mkdir(parents=True)
    (static / "assets" / "page.js").write_bytes(b" " * (16 << 20))
    monkeypatch.setattr(pages, "routes", functools.partial(pages.routes, static))
    service, port, _ = request.getfixturevalue("served")
    ask = ask_of(service)
    with contextlib.ExitStack() as held:
        for at in range(2 * service.limits.connections):
            one = held.enter_context(connected(port, f"127.0.0.{2 + at}"))
            one.sendall(b"GET /assets/page.js HTTP/1.1\r\nHost: a\r\n\r\n")
            time.sleep(0.02)
        for _ in range(3):
            with connected(port) as one:
                one.sendall(ask)
                assert b" 200 " in one.recv(1000)


def test_who_has_shown_a_token_is_no_stranger(
    served: tuple[Service, int, uvicorn.Server],
) -> None:
    service, port, _ = served
    ask = ask_of(service)
    with contextlib.ExitStack() as held:
        known = [held.enter_context(connected(port)) for _ in range(4)]
        for one in known:
            one.sendall(ask)
            assert b" 200 " in one.recv(1000)
        for _ in range(8):
            held.enter_context(connected(port))
        for one in known:
            one.sendall(ask)
            assert b" 200 " in one.recv(1000)


@pytest.mark.parametrize("path", ["/", "/assets/nothing.js", "/nothing", "/v1/nodes", "/healthz"])
def test_answers_to_strangers_end_their_connection(
    served: tuple[Service, int, uvicorn.Server], path: str
) -> None:
    with connected(served[1]) as one:
        one.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        begun = time.monotonic()
        assert b"connection: close" in read(one).lower()
        assert time.monotonic() - begun < 10


def test_silent_connections_of_all_together_leave_room() -> None:
    class One:
        pass

    waiting: silent.Silent[One] = silent.Silent(ServerLimits(connections=8, connections_unknown=3))
    ones = [One() for _ in range(6)]
    closed = [waiting.add(one, f"10.0.0.{at}") for at, one in enumerate(ones)]
    assert closed[:4] == [None] * 4
    assert closed[4] is ones[0]
    for one in ones:
        waiting.remove(one)
        waiting.remove(one)
    assert not waiting._all and not waiting._by_origin


def test_whom_a_connection_counts_for() -> None:
    assert len({silent.origin(host) for host in ("127.0.0.1", "127.9.9.9", "::1")}) == 1
    assert silent.origin("::ffff:127.0.0.1") == silent.origin("127.0.0.1")
    assert silent.origin("2001:db8::1") == silent.origin("2001:db8:0:0:ffff::1")
    assert silent.origin("fe80::1%eth0") == silent.origin("fe80::2")
    assert silent.origin("2001:db8::1") != silent.origin("2001:db8:0:1::1")
    assert silent.origin("10.0.0.1") != silent.origin("10.0.0.2")
    assert silent.origin("::ffff:10.0.0.1") == silent.origin("10.0.0.1")
    assert silent.origin("") == ""


def test_bad_requests_fill_no_log(
    served: tuple[Service, int, uvicorn.Server], caplog: pytest.LogCaptureFixture
) -> None:
    service, port, _ = served
    for _ in range(100):
        with connected(port) as one:
            one.sendall(b"nonsense\r\n\r\n")
            assert b" 400 " in read(one)
    lines = [record for record in caplog.records if "Invalid HTTP" in record.message]
    assert 1 <= len(lines) < 60
    assert len(lines) + service.counters.refused["unlogged"] == 100


def test_the_audit_log_has_the_address_that_asked(
    served: tuple[Service, int, uvicorn.Server], caplog: pytest.LogCaptureFixture
) -> None:
    service, port, _ = served
    _, token = service.tokens.make("lab", [Scope.READ])
    caplog.set_level(logging.INFO, "sonde.audit")
    with connected(port) as one:
        head = f"GET /v1/identity HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
        one.sendall(f"{head}X-Forwarded-For: 203.0.113.9\r\nConnection: close\r\n\r\n".encode())
        assert b" 200 " in read(one)
    (line,) = [record.message for record in caplog.records if record.name == "sonde.audit"]
    assert '"from": "127.0.0.1"' in line
