# SPDX-License-Identifier: Apache-2.0
"""The page that Prometheus scrapes: GET /metrics on an address of the operator's choice.

Loopback unless another address is named. Requests are few and small: one thread each, at most
`CONNECTIONS` at a time, each with little time to say what it wants.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6, socket
from typing import Any

from sonde.errors import SinkError, UsageError
from sonde.sinks.exposition import CONTENT_TYPE

CONNECTIONS = 8
REQUEST_S = 5.0


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT, :PORT or PORT; the host is 127.0.0.1 unless named. Raises UsageError."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdecimal() or int(port) > 65_535:
        raise UsageError(f"{text!r} is no address", "write HOST:PORT, as in 127.0.0.1:9400")
    return host, int(port)


class PrometheusServer:
    """Serves a page that is made anew for each request."""

    def __init__(self, address: str, page: Callable[[], str]) -> None:
        """Raises UsageError for what is no address, SinkError where it cannot listen."""
        host, port = parse_address(address)
        try:
            self._server = _Server((host, port), page)
        except OSError as error:
            raise SinkError(
                f"cannot listen on {address}: {error.strerror or error}", "choose another address"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve, name="sonde-prometheus", daemon=True
        )

    @property
    def address(self) -> str:
        """Where it listens: HOST:PORT."""
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        if self._thread.is_alive():
            self._server.leave()
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    timeout = 0  # handle_request is called when somebody is there

    def __init__(self, address: tuple[str, int], page: Callable[[], str]) -> None:
        if ":" in address[0]:
            self.address_family = AF_INET6
        self.page = page
        self._room = threading.BoundedSemaphore(CONNECTIONS)
        self._left, self._leave = os.pipe()
        super().__init__(address, _Handler)

    def serve(self) -> None:
        """Answer until `leave`. Unlike serve_forever, which looks twice a second whether it should
        go on, this sleeps until somebody asks."""
        waiting = select.poll()
        for fd in (self.fileno(), self._left):
            waiting.register(fd, select.POLLIN)
        while self._left not in (ready := dict(waiting.poll())):
            if ready:
                self.handle_request()

    def leave(self) -> None:
        """Have `serve` return."""
        os.write(self._leave, b"!")

    def server_close(self) -> None:
        super().server_close()
        for fd in (self._left, self._leave):
            with suppress(OSError):
                os.close(fd)
        self._left = self._leave = -1

    def process_request(self, request: socket | tuple[bytes, socket], client: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: socket | tuple[bytes, socket], client: Any) -> None:
        try:
            super().process_request_thread(request, client)
        finally:
            self._room.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_S
    server: _Server
    server_version = "sonde"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path.split("?")[0] != "/metrics":
            self.send_error(404, "there is only /metrics")
            return
        body = self.server.page().encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: an agent's log is no access log."""
