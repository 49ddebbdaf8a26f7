# SPDX-License-Identifier: Apache-2.0
"""A token goes to no other user's process that took the server's port of loopback."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sonde import http_client
from sonde.errors import SinkError
from sonde.server.client import ServerClient
from sonde.server.upload import upload
from sonde.sinks.server import ServerSink
from sonde.sinks.spool import Spool

STRANGER = 61_234
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user's socket needs root")


def make_listener(user: int, host: str, pipe: Any) -> None:
    """In a child: what arrives at a socket of that user goes into the pipe, once."""
    if user:
        os.setgid(user)
        os.setuid(user)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.bind((host, 0))
        sock.listen(8)
        pipe.send(sock.getsockname()[1])
        while True:
            peer, _ = sock.accept()
            with peer:
                peer.settimeout(5)
                got = peer.recv(65_536)
                pipe.send(got)
                if got:
                    peer.sendall(ANSWER)


@contextmanager
def listener(user: int, host: str = "127.0.0.1") -> Iterator[tuple[int, Any]]:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(
        target=make_listener, args=(user, host, theirs), daemon=True
    )
    child.start()
    theirs.close()
    try:
        assert ours.poll(20)
        yield ours.recv(), ours
    finally:
        child.kill()
        child.join(20)
        ours.close()


def get(port: int, host: str = "127.0.0.1", **given: Any) -> http_client.Response:
    return http_client.request(
        "GET", f"http://{host}:{port}/", deadline_s=5, max_bytes=100, **given
    )


@as_root
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::", "127.0.0.7"])
def test_nothing_is_sent_to_a_stranger(address: str) -> None:
    with listener(STRANGER, address) as (port, got):
        host = address if address.startswith("127") else "127.0.0.1"
        with pytest.raises(http_client.StrangerListensError, match=f"user {STRANGER} listens"):
            get(port, host, headers={"Authorization": "Bearer secret"})
        with pytest.raises(http_client.StrangerListensError):
            get(port, host, ours=True)
        assert not got.poll(0.2)
        assert get(port, host).status == 200  # of a collector of anybody's, without a token


@as_root
def test_no_client_of_a_server_sends_a_stranger_anything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = tmp_path / "token"
    token.write_text("sonde_secret")
    capture = Path(__file__).parents[1] / "data" / "h200_signals.sonde"
    with listener(STRANGER) as (port, got):
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(SinkError, match="listens on port"):
            ServerClient(url, token).ask("top")
        with pytest.raises(SinkError, match="listens on port"):
            upload(capture, url, "node", "sonde_secret", give_up_s=0)
        sink = ServerSink(url, "node", Spool(tmp_path / "spool", 1 << 20), token)
        sink.write(b"chunk")
        sink.close()
        assert "listens on port" in sink.error
        assert len([one for one in caplog.records if "nothing is sent" in one.message]) == 1
        assert sink.collects and not sink.sent
        assert not got.poll(0.2)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::", "::1"])
def test_a_server_of_the_same_user_is_asked(address: str) -> None:
    with listener(0, address) as (port, got):
        host = "[::1]" if address == "::1" else "127.0.0.1"
        assert get(port, host, headers={"Authorization": "Bearer a"}).status == 200
        assert b"Authorization: Bearer a" in got.recv()


@as_root
def test_who_called_sudo_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_UID", str(STRANGER))
    with listener(STRANGER) as (port, _):
        assert get(port, ours=True).status == 200


def test_a_socket_that_took_the_connection_and_went_away_gets_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What listens after the connection is another socket than before it."""
    first = socket.create_server(("127.0.0.1", 0))
    port = first.getsockname()[1]
    taken: list[socket.socket] = []
    second: list[socket.socket] = []
    connect = socket.socket.connect

    def connect_and_exchange(self: socket.socket, address: Any) -> None:
        connect(self, address)
        taken.append(first.accept()[0])
        first.close()
        second.append(socket.create_server(("127.0.0.1", port)))

    monkeypatch.setattr(socket.socket, "connect", connect_and_exchange)
    with pytest.raises(http_client.RequestError, match="another socket"):
        get(port, headers={"Authorization": "Bearer secret"})
    taken[0].settimeout(5)
    assert taken[0].recv(100) == b""
    for one in (*taken, *second):
        one.close()


def test_an_open_connection_is_checked_before_its_first_token() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepted = []

        def serve() -> None:
            for _ in range(2):
                peer, _ = server.accept()
                accepted.append(peer)
                for _ in range(2):
                    if not peer.recv(65_536):
                        break
                    peer.sendall(ANSWER)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        connection = http_client.Connection("127.0.0.1", server.getsockname()[1], None)
        ask = {"deadline_s": 5, "max_bytes": 100}
        connection.request("GET", "/", **ask)
        for _ in range(2):
            connection.request("GET", "/", headers={"Authorization": "Bearer a"}, **ask)
        connection.close()
        thread.join(20)
        assert len(accepted) == 2
        for peer in accepted:
            peer.close()
