# SPDX-License-Identifier: Apache-2.0
"""TLS connections that never finish their handshake: bounded, and nobody else is kept out."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.test_server_listen import connect, write_certificate

from sonde.server import handshakes, listen
from sonde.server.addresses import Address
from sonde.server.service import ServerLimits, Service

GET = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"
OF_AN_ORIGIN = 6


@pytest.fixture
def served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Service, int, handshakes.TlsServer]]:
    monkeypatch.setattr(handshakes, "HANDSHAKE_S", 3.0)
    write_certificate(tmp_path / "c.pem", tmp_path / "k.pem")
    limits = ServerLimits(connections=16, connections_unknown=OF_AN_ORIGIN)
    service = Service(tmp_path / "store", limits, flushes=False)
    address = Address("127.0.0.1", 0, tmp_path / "c.pem", tmp_path / "k.pem")
    config = listen._config(service, address)
    server = handshakes.TlsServer(config, limits, service.counters.refuse)
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield service, listening.getsockname()[1], server
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()
    service.close()


def answered(port: int) -> bool:
    with connect(port) as one:
        one.sendall(GET)
        return b" 200 " in one.recv(1000)


def hello() -> bytes:
    """The first message of a client's handshake."""
    out = ssl.MemoryBIO()
    context = ssl.create_default_context()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out, server_hostname="a").do_handshake()
    return out.read()


@pytest.mark.parametrize("first", [b"", hello()[:40], hello()], ids=["none", "part", "hello"])
def test_handshakes_of_an_origin_are_bounded(
    served: tuple[Service, int, handshakes.TlsServer], first: bytes
) -> None:
    service, port, server = served
    ours = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(60)]
    for one in ours:
        with contextlib.suppress(ConnectionError):  # closed by then
            one.sendall(first)
    ends = time.monotonic() + 20
    while service.counters.refused.get("handshake", 0) < len(ours) - OF_AN_ORIGIN:
        assert time.monotonic() < ends
        time.sleep(0.01)
    assert len(server._silent) <= OF_AN_ORIGIN
    assert answered(port)
    for one in ours:
        one.close()


def test_a_handshake_that_takes_too_long_ends(
    served: tuple[Service, int, handshakes.TlsServer],
) -> None:
    _, port, server = served
    with socket.create_connection(("127.0.0.1", port), timeout=20) as one:
        assert answered(port)
        while one.recv(100):
            pass
    ends = time.monotonic() + 10
    while server._silent:
        assert time.monotonic() < ends
        time.sleep(0.01)
    assert answered(port)
