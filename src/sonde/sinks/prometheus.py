# SPDX-License-Identifier: Apache-2.0
"""The HTTP server that Prometheus scrapes: GET /metrics on a configured address.

GET /healthz reports whether the agent's main loop still runs (200, else 503 with the reason), for
probes of Kubernetes and load balancers; GET / links both. Pages are compressed for clients that
accept gzip.

The default is loopback. One thread serves all clients without blocking. A client that sends its
request or reads its response too slowly is disconnected; with too many clients, the oldest is
disconnected first. So idle connections cannot block scrapes, and memory is bounded.
"""

from __future__ import annotations

import gzip
import ipaddress
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from sonde.errors import SinkError, UsageError
from sonde.http_host import is_direct
from sonde.sinks.exposition import CONTENT_TYPE

MAX_CONNECTIONS = 256
"""At a time. For one more, the oldest that waits for a request is disconnected."""
MAX_ANSWERING = 16
"""Of these, clients that have not read all of their response."""
MIN_STAY_S = 0.1
"""No client is disconnected for another one sooner: its request may still be on its way."""
REQUEST_S = 5.0
"""Deadline for a whole request."""
ANSWER_S = 10.0
"""Deadline for reading a whole response."""
REQUEST_BYTES = 8192
"""Limit of a request; a longer one gets status 431."""
PAGE_S = 0.1
"""Requests within this time get the same page. The time is longer (4 times its CPU time) where a
page takes much, so that a flood of requests uses at most a fifth of a core."""
_TEXT = "text/plain; charset=utf-8"
_ACCEPTED = 32
"""New connections accepted in one iteration of the event loop."""


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT, :PORT or PORT; the host is 127.0.0.1 unless named. Raises UsageError."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdecimal() or int(port) > 65_535:
        raise UsageError(f"{text!r} is not an address", "write HOST:PORT, as in 127.0.0.1:9400")
    return host, int(port)


def _nothing(_name: str, _count: float) -> None:
    pass


class NothingNewError(Exception):
    """The page has no new values, as the main loop is stuck; the message is the reason, in one
    line."""


class PrometheusServer:
    """Serves a page that is made on request."""

    def __init__(
        self,
        address: str,
        page: Callable[[], str],
        lose: Callable[[str, float], None] = _nothing,
        failure: Callable[[], str] = str,
    ) -> None:
        """`page` makes the text of all series. `lose` is called with the name of a loss and the
        number of scrapes without a page. `failure` returns why the agent does not work, on one
        line; '' where it does.

        Raises UsageError for an invalid address, SinkError where it cannot listen.
        """
        host, port = parse_address(address)
        try:
            self._server = _Server((host, port), page, lose, failure)
        except OSError as error:
            raise SinkError(
                f"cannot listen on {address}: {error.strerror or error}", "choose another address"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve, name="sonde-prometheus", daemon=True
        )

    @property
    def address(self) -> str:
        """The address that it listens on: HOST:PORT."""
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def start(self) -> None:
        """Start the server thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the server."""
        if self._thread.is_alive():
            self._server.leave()
            self._thread.join()
        self._server.close()


_INDEX = b"""<!doctype html>
<meta charset="utf-8">
<title>Sonde agent</title>
<h1>Sonde agent</h1>
<ul>
<li><a href="/metrics">/metrics</a>: metrics of this node, for Prometheus
<li><a href="/healthz">/healthz</a>: whether the agent still observes
</ul>
"""
_GZIP_LEVEL = 1
"""A page of metrics shrinks tenfold already; higher levels take more CPU time."""


class _RefusedError(Exception):
    """A request that gets an error status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(eq=False, slots=True)
class _Client:
    sock: socket.socket
    came_s: float
    """When it connected."""
    until_s: float
    """Deadline for what it does now."""
    request: bytearray = field(default_factory=bytearray)
    """What has been read."""
    answer: memoryview | None = None
    """What is left to send; None: its request is not whole yet."""

    @property
    def accepts_gzip(self) -> bool:
        """Whether the request's headers allow a compressed response."""
        accepted = next(iter(self.headers(b"accept-encoding")), b"")
        return re.search(rb"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))", accepted) is not None

    def headers(self, wanted: bytes) -> list[bytes]:
        """The values of a header, in lower case; `wanted`: its name, too."""
        lines = bytes(self.request).lower().split(b"\n")[1:]
        pairs = (line.partition(b":") for line in lines)
        return [value.strip() for name, _, value in pairs if name.strip() == wanted]

    def read(self) -> bytes | None:
        """The request's first line once the request is whole. Raises OSError, _RefusedError."""
        piece = self.sock.recv(REQUEST_BYTES)
        if not piece:
            raise ConnectionResetError
        self.request += piece
        if b"\r\n\r\n" in self.request or b"\n\n" in self.request:
            return bytes(self.request).split(b"\n", 1)[0].strip()
        if len(self.request) >= REQUEST_BYTES:
            raise _RefusedError(431, "Request Header Fields Too Large")
        return None


def _is_direct(host: bytes) -> bool:
    return is_direct(host.decode("latin-1"))


class _Server:
    """The event loop over all sockets. Used by one thread; only `leave` may be called by others."""

    def __init__(
        self,
        address: tuple[str, int],
        page: Callable[[], str],
        lose: Callable[[str, float], None],
        failure: Callable[[], str],
    ) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._page, self._lose, self._failure = page, lose, failure
        self._response = b""
        """The last page with its headers, or the error in place of it."""
        self._compressed = b""
        """The same in gzip, made for the first client that accepts it."""
        self._fresh_until_s = float("-inf")
        """Until when `_response` is sent again."""
        self._clients: dict[_Client, None] = {}  # in order of arrival
        self._listener = socket.create_server(address, family=family, backlog=512)
        self._listener.setblocking(False)
        self._is_listening = False
        """Whether new connections are accepted; else they wait in the kernel's queue."""
        host = self._listener.getsockname()[0]
        self._is_local = ipaddress.ip_address(host.partition("%")[0]).is_loopback
        """Only programs on this node connect: a browser that does so for a page of another site
        has that site's name for us."""
        self._left, self._leave = os.pipe()
        """A byte in it ends `serve`."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._left, selectors.EVENT_READ)
        self.server_address = self._listener.getsockname()

    def serve(self) -> None:
        """Run until `leave` is called; sleeps while there are no requests."""
        self._listen(True)
        while True:
            ready = self._selector.select(self._wait_s())
            now_s = time.monotonic()
            requests: list[_Client] = []
            for key, _ in ready:
                if key.fd == self._left:
                    return
                if key.data is not None:
                    self._advance(key.data, requests, now_s)
            if requests:
                self._answer_all(requests)
            self._disconnect_late(time.monotonic())
            if self._is_listening or len(self._clients) < MAX_CONNECTIONS or self._may_evict(now_s):
                self._listen(True)
                self._accept(time.monotonic())

    def leave(self) -> None:
        """Make `serve` return."""
        os.write(self._leave, b"!")

    def close(self) -> None:
        """Close all connections."""
        for client in list(self._clients):
            self._disconnect(client)
        self._listener.close()
        self._selector.close()
        for fd in (self._left, self._leave):
            with suppress(OSError):
                os.close(fd)
        self._left = self._leave = -1

    # --- connections ----------------------------------------------------------------------------

    def _listen(self, on: bool) -> None:
        if on and not self._is_listening:
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif self._is_listening and not on:
            self._selector.unregister(self._listener)
        self._is_listening = on

    def _wait_s(self) -> float | None:
        ends_s = [client.until_s for client in self._clients]
        if not self._is_listening:  # full of new clients: until the oldest may be disconnected
            ends_s.append(min(client.came_s for client in self._clients) + MIN_STAY_S)
        return max(0.0, min(ends_s) - time.monotonic()) if ends_s else None

    def _may_evict(self, now_s: float) -> bool:
        """Whether the oldest client has been there for long enough to be disconnected."""
        return next(iter(self._clients)).came_s + MIN_STAY_S <= now_s

    def _accept(self, now_s: float) -> None:
        for _ in range(_ACCEPTED):
            if len(self._clients) >= MAX_CONNECTIONS:
                if not self._may_evict(now_s):
                    self._listen(False)
                    return
                unanswered = (client for client in self._clients if client.answer is None)
                self._disconnect(next(unanswered, next(iter(self._clients))), "scrapes evicted")
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # out of descriptors, or the client is gone: disconnect the oldest
                if self._clients:
                    self._disconnect(next(iter(self._clients)), "scrapes evicted")
                return
            sock.setblocking(False)
            client = _Client(sock, now_s, now_s + REQUEST_S)
            self._clients[client] = None
            self._selector.register(sock, selectors.EVENT_READ, client)

    def _disconnect(self, client: _Client, lost: str = "") -> None:
        """Close a connection; `lost`: the loss that this is, '' for none."""
        del self._clients[client]
        self._selector.unregister(client.sock)
        client.sock.close()
        if lost:
            self._lose(lost, 1)

    def _disconnect_late(self, now_s: float) -> None:
        for client in [one for one in self._clients if one.until_s <= now_s]:
            self._disconnect(client, "scrapes too slow")

    # --- requests ---------------------------------------------------------------------------------

    def _advance(self, client: _Client, requests: list[_Client], now_s: float) -> None:
        """Read the next part of a request, or write the next part of a response."""
        if client not in self._clients:
            return
        try:
            if client.answer is not None:
                self._send(client)
                return
            line = client.read()
            if line is None:
                return
            words = line.split()
            if len(words) != 3:
                raise _RefusedError(400, "Bad Request")
            if words[0] != b"GET":
                raise _RefusedError(405, "Method Not Allowed")
            if self._is_local and not all(map(_is_direct, client.headers(b"host"))):
                raise _RefusedError(421, "the agent is not called that: use its address")
            path = words[1].split(b"?")[0]
            if path == b"/metrics":
                requests.append(client)
            elif path == b"/healthz":
                self._begin(client, self._health())
            elif path == b"/":
                self._begin(client, _message(200, "OK", "text/html; charset=utf-8", _INDEX))
            else:
                raise _RefusedError(404, "there are only /metrics and /healthz")
        except BlockingIOError:
            return
        except _RefusedError as refused:
            self._begin(client, _message(refused.status, refused.reason, _TEXT, b""))
        except OSError:
            self._disconnect(client)

    def _answer_all(self, requests: list[_Client]) -> None:
        """Send the page to these clients; make it where the last one is too old."""
        now_s = time.monotonic()
        if now_s >= self._fresh_until_s:
            began_s = time.thread_time()
            self._compressed = b""
            try:
                page = self._page().encode("utf-8", "replace")
                self._response = _message(200, "OK", CONTENT_TYPE, page)
            except NothingNewError as error:
                text = f"{error}\n".encode()
                self._response = _message(503, "Service Unavailable", _TEXT, text)
                self._lose("scrapes refused", 1)
            except Exception:  # a bug in one metric must not end the agent
                self._response = _message(500, "Internal Server Error", _TEXT, b"")
                self._lose("scrapes failed", 1)
            work_s = time.thread_time() - began_s
            self._fresh_until_s = time.monotonic() + max(PAGE_S, 4 * work_s)
        for client in requests:
            self._begin(client, self._gzipped() if client.accepts_gzip else self._response)

    def _health(self) -> bytes:
        if failure := self._failure():
            return _message(503, "Service Unavailable", _TEXT, f"{failure}\n".encode())
        return _message(200, "OK", _TEXT, b"ok\n")

    def _gzipped(self) -> bytes:
        """The page in gzip; the page itself where it is an error."""
        if not self._response.startswith(b"HTTP/1.1 200 "):
            return self._response
        if not self._compressed:
            began_s = time.thread_time()
            body = gzip.compress(self._response.split(b"\r\n\r\n", 1)[1], _GZIP_LEVEL)
            self._compressed = _message(200, "OK", CONTENT_TYPE, body, coding="gzip")
            self._fresh_until_s += 4 * (time.thread_time() - began_s)
        return self._compressed

    def _begin(self, client: _Client, answer: bytes) -> None:
        """Begin to send a response."""
        client.answer = memoryview(answer)
        client.until_s = time.monotonic() + ANSWER_S
        client.request.clear()
        try:
            if self._send(client):
                return
        except BlockingIOError:
            pass
        except OSError:
            self._disconnect(client)
            return
        self._selector.modify(client.sock, selectors.EVENT_WRITE, client)
        answering = [one for one in self._clients if one.answer is not None]
        if len(answering) > MAX_ANSWERING:
            self._disconnect(min(answering, key=lambda one: one.until_s), "scrapes too slow")

    def _send(self, client: _Client) -> bool:
        """Send what the socket takes; True where that was all, and the connection is closed."""
        assert client.answer is not None
        client.answer = client.answer[client.sock.send(client.answer) :]
        if client.answer:
            return False
        with suppress(OSError):
            client.sock.shutdown(socket.SHUT_WR)
        self._disconnect(client)
        return True


def _message(status: int, reason: str, kind: str, body: bytes, coding: str = "") -> bytes:
    """A response; `kind`: Content-Type, `coding`: Content-Encoding."""
    encoding = f"Content-Encoding: {coding}\r\n" if coding else ""
    head = (
        f"HTTP/1.1 {status} {reason}\r\nServer: sonde\r\nContent-Type: {kind}\r\n"
        f"{encoding}Vary: Accept-Encoding\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
