# SPDX-License-Identifier: Apache-2.0
"""The server's port belongs to who started it, also while no server runs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from sonde.cli import up
from sonde.errors import UsageError
from sonde.server.addresses import handed_over, parse
from sonde.server.tokens import Scope, Tokens


@pytest.mark.parametrize("text", ["nowhere", "a:b", "1.2.3.4:65536", "1.2.3.4:", "1.2.3.4:¹"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no address"):
        parse(text)


def test_addresses() -> None:
    assert parse("[::1]:80") == ("::1", 80)
    assert parse(":80") == ("127.0.0.1", 80)


def test_a_socket_of_another_process_is_not_taken() -> None:
    environ = {"LISTEN_PID": str(os.getpid() + 1), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "a"}
    assert handed_over(None, environ) is None
    assert not environ


def test_what_does_not_listen_is_refused() -> None:
    with socket.socket() as sock, pytest.raises(UsageError, match="does not listen"):
        handed_over(os.dup(sock.fileno()), {})
    with pytest.raises(UsageError, match="2 sockets"):
        handed_over(None, {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2"})
    reading, writing = os.pipe()
    with pytest.raises(UsageError, match="no socket"):
        handed_over(reading, {})
    os.close(reading)
    os.close(writing)


def test_the_port_stays_taken_while_the_server_is_started_again(tmp_path: Path) -> None:
    with up._listening("127.0.0.1:0") as listening:
        address = listening.getsockname()
        command = [sys.executable, "-m", "sonde", "serve", "--store", str(tmp_path / "store")]
        command += ["--open", "--listen-fd", str(listening.fileno())]
        for _ in range(2):
            server = subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, pass_fds=[listening.fileno()]
            )
            assert server.stdout
            with server.stdout as out:
                assert out.readline() == f"serving http://127.0.0.1:{address[1]}\n"
                url = f"http://127.0.0.1:{address[1]}/healthz"
                with urllib.request.urlopen(url, timeout=20) as answer:
                    assert answer.status == 200
                server.send_signal(signal.SIGKILL)
                server.wait(20)
            with socket.socket() as thief:
                thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with pytest.raises(OSError, match="in use"):
                    thief.bind(address)


def test_a_socket_of_systemd_is_taken(tmp_path: Path) -> None:
    with up._listening("127.0.0.1:0") as listening:
        code = (
            "import os, sys; os.dup2(int(sys.argv[1]), 3); os.environ |= {'LISTEN_FDS': '1', "
            "'LISTEN_PID': str(os.getpid())}; from sonde.cli.main import main; sys.exit(main("
            "['serve', '--open', '--store', sys.argv[2]]))"
        )
        server = subprocess.Popen(
            [sys.executable, "-c", code, str(listening.fileno()), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[listening.fileno()],
        )
        assert server.stdout
        with server.stdout as out:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            assert out.readline() == f"serving {url}\n"
        urllib.request.urlopen(f"{url}/healthz", timeout=20).close()
        server.terminate()
        assert server.wait(30) == 0


def test_the_agents_token_can_only_send_and_one_for_more_is_revoked(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    (state / "store").mkdir(mode=0o700)
    tokens = Tokens(state / "store")
    _, former = tokens.make("default", [Scope.INGEST, Scope.READ])
    (state / "token").write_text(former)

    reads = up._tokens(state)

    sends = (state / "agent-token").read_text().strip()
    assert (state / "token").read_text().strip() == reads
    for text, scope in ((reads, Scope.READ), (sends, Scope.INGEST)):
        caller = tokens.caller(text)
        assert caller and caller.scopes == {scope}
    assert tokens.caller(former) is None
    assert up._tokens(state) == reads
    assert (state / "agent-token").read_text().strip() == sends
    assert len(tokens.listed()) == 3
    tokens.close()
