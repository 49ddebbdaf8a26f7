# SPDX-License-Identifier: Apache-2.0
"""Commands that ask a server which is none of ours, or means harm."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

BODY_BYTES = 63 << 20


class Hostile(ThreadingHTTPServer):
    """Answers every question with `body`."""

    body = b""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Hostile)
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Hostile]:
    one = Hostile(("127.0.0.1", 0), Handler)
    threading.Thread(target=one.serve_forever, daemon=True).start()
    yield one
    one.shutdown()
    one.server_close()


def ask(server: Hostile, command: str, *arguments: str, most_bytes: int = 1 << 40) -> str:
    """What a command prints as it fails."""
    url = f"http://127.0.0.1:{server.server_address[1]}"
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "sonde", command, *arguments, "--server", url],
        capture_output=True, text=True, timeout=60, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes)),
    )  # fmt: skip
    assert ran.returncode not in (0, 70) and "Traceback" not in ran.stderr, ran.stderr
    return ran.stderr


def test_many_small_values_are_not_decoded(server: Hostile) -> None:
    """They would be 1.6 GB of lists."""
    server.body = b'{"owners":[' + b"[]," * (BODY_BYTES // 3) + b"[]]}"

    assert "no answer of a Sonde server" in ask(server, "owners", most_bytes=1 << 30)


@pytest.mark.parametrize(
    "body", [b'{"owners":[[]]}', b'{"owners":[{"by":7}],"by":[]}', b"[]", b'"x"', b"7"]
)
@pytest.mark.parametrize("command", [("owners",), ("job", "1")], ids=["owners", "job"])
def test_an_answer_of_another_kind_is_refused(
    server: Hostile, command: tuple[str, ...], body: bytes
) -> None:
    server.body = body

    assert "no answer of a Sonde server" in ask(server, *command)
