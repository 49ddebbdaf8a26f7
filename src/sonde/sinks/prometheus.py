# SPDX-License-Identifier: Apache-2.0
"""The page that Prometheus scrapes: GET /metrics on an address of the operator's choice.

Loopback unless another address is named. One thread serves everybody and waits for nobody: who
sends a request or takes an answer too slowly is hung up on, and where there are too many, the
slowest goes first. So sockets that say nothing shut no scrape out, and what they hold is bounded.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from sonde.errors import SinkError, UsageError
from sonde.sinks.exposition import CONTENT_TYPE

CONNECTIONS = 256
"""At a time. With one more, the slowest goes."""
ANSWERING = 16
"""Of these, at most so many hold a page that they have not taken."""
STAY_S = 0.1
"""Nobody goes sooner, not to lose a scrape whose request is on its way."""
REQUEST_S = 5.0
"""For a whole request, however it comes."""
ANSWER_S = 10.0
"""For taking a whole answer."""
REQUEST_BYTES = 8192
PAGE_S = 0.1
"""Requests so close to one another are given the same page; for longer where a page is much work,
so that no flood of requests takes more than a fifth of a core."""
_ACCEPTED = 32
"""Between two looks at those who are here."""


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT, :PORT or PORT; the host is 127.0.0.1 unless named. Raises UsageError."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdecimal() or int(port) > 65_535:
        raise UsageError(f"{text!r} is no address", "write HOST:PORT, as in 127.0.0.1:9400")
    return host, int(port)


def _nothing(_name: str, _count: float) -> None:
    pass


class NothingNewError(Exception):
    """What a page would show has not changed for too long; its text says why, in one line."""


class PrometheusServer:
    """Serves a page that is made when somebody asks."""

    def __init__(
        self,
        address: str,
        page: Callable[[], str],
        lose: Callable[[str, float], None] = _nothing,
    ) -> None:
        """`lose` is given the name and number of scrapes that went unanswered.

        Raises UsageError for what is no address, SinkError where it cannot listen."""
        host, port = parse_address(address)
        try:
            self._server = _Server((host, port), page, lose)
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
        self._server.close()


class _RefusedError(Exception):
    """A request that gets no page."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status, self.words = status, words


@dataclass(eq=False, slots=True)
class _Client:
    sock: socket.socket
    came_s: float
    until_s: float
    request: bytearray = field(default_factory=bytearray)
    answer: memoryview | None = None

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


class _Server:
    """An event loop over its sockets. One thread's, but for `leave`."""

    def __init__(
        self, address: tuple[str, int], page: Callable[[], str], lose: Callable[[str, float], None]
    ) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._page, self._lose = page, lose
        self._made = b""
        self._made_until_s = float("-inf")
        self._clients: dict[_Client, None] = {}  # who came first, first
        self._listener = socket.create_server(address, family=family, backlog=512)
        self._listener.setblocking(False)
        self._is_listening = False
        self._left, self._leave = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._left, selectors.EVENT_READ)
        self.server_address = self._listener.getsockname()

    def serve(self) -> None:
        """Answer until `leave`; sleeps while nobody asks."""
        self._listen(True)
        while True:
            ready = self._selector.select(self._wait_s())
            now_s = time.monotonic()
            asked: list[_Client] = []
            for key, _ in ready:
                if key.fd == self._left:
                    return
                if key.data is not None:
                    self._go_on(key.data, asked, now_s)
            if asked:
                self._answer_all(asked)
            self._hang_up_late(time.monotonic())
            if self._is_listening or len(self._clients) < CONNECTIONS or self._may_evict(now_s):
                self._listen(True)
                self._accept(time.monotonic())

    def leave(self) -> None:
        """Have `serve` return."""
        os.write(self._leave, b"!")

    def close(self) -> None:
        """Hang up on everybody."""
        for client in list(self._clients):
            self._hang_up(client)
        self._listener.close()
        self._selector.close()
        for fd in (self._left, self._leave):
            with suppress(OSError):
                os.close(fd)
        self._left = self._leave = -1

    # --- who comes and goes ---------------------------------------------------------------------

    def _listen(self, on: bool) -> None:
        if on and not self._is_listening:
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif self._is_listening and not on:
            self._selector.unregister(self._listener)
        self._is_listening = on

    def _wait_s(self) -> float | None:
        ends_s = [client.until_s for client in self._clients]
        if not self._is_listening:  # full of newcomers: until the first of them may be sent away
            ends_s.append(min(client.came_s for client in self._clients) + STAY_S)
        return max(0.0, min(ends_s) - time.monotonic()) if ends_s else None

    def _may_evict(self, now_s: float) -> bool:
        return next(iter(self._clients)).came_s + STAY_S <= now_s

    def _accept(self, now_s: float) -> None:
        for _ in range(_ACCEPTED):
            if len(self._clients) >= CONNECTIONS:
                if not self._may_evict(now_s):
                    self._listen(False)  # the others wait in the kernel's queue
                    return
                asking = (client for client in self._clients if client.answer is None)
                self._hang_up(next(asking, next(iter(self._clients))), "scrapes evicted")
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # out of descriptors, or the caller is gone: the slowest makes room
                if self._clients:
                    self._hang_up(next(iter(self._clients)), "scrapes evicted")
                return
            sock.setblocking(False)
            client = _Client(sock, now_s, now_s + REQUEST_S)
            self._clients[client] = None
            self._selector.register(sock, selectors.EVENT_READ, client)

    def _hang_up(self, client: _Client, lost: str = "") -> None:
        del self._clients[client]
        self._selector.unregister(client.sock)
        client.sock.close()
        if lost:
            self._lose(lost, 1)

    def _hang_up_late(self, now_s: float) -> None:
        for client in [one for one in self._clients if one.until_s <= now_s]:
            self._hang_up(client, "scrapes too slow")

    # --- what they ask ----------------------------------------------------------------------------

    def _go_on(self, client: _Client, asked: list[_Client], now_s: float) -> None:
        """The next piece of a request or of an answer."""
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
            if words[1].split(b"?")[0] != b"/metrics":
                raise _RefusedError(404, "there is only /metrics")
            asked.append(client)
        except BlockingIOError:
            return
        except _RefusedError as refused:
            self._begin(client, _message(refused.status, refused.words, "text/plain", b""))
        except OSError:
            self._hang_up(client)

    def _answer_all(self, asked: list[_Client]) -> None:
        now_s = time.monotonic()
        if now_s >= self._made_until_s:
            began_s = time.thread_time()
            try:
                page = self._page().encode("utf-8", "replace")
                self._made = _message(200, "OK", CONTENT_TYPE, page)
            except NothingNewError as stale:
                text = f"{stale}\n".encode()
                self._made = _message(503, "Service Unavailable", "text/plain", text)
                self._lose("scrapes refused", 1)
            except Exception:  # a bug in one metric ends no agent
                self._made = _message(500, "Internal Server Error", "text/plain", b"")
                self._lose("scrapes failed", 1)
            work_s = time.thread_time() - began_s
            self._made_until_s = time.monotonic() + max(PAGE_S, 4 * work_s)
        for client in asked:
            self._begin(client, self._made)

    def _begin(self, client: _Client, answer: bytes) -> None:
        client.answer = memoryview(answer)
        client.until_s = time.monotonic() + ANSWER_S
        client.request.clear()
        try:
            if self._send(client):
                return
        except BlockingIOError:
            pass
        except OSError:
            self._hang_up(client)
            return
        self._selector.modify(client.sock, selectors.EVENT_WRITE, client)
        taking = [one for one in self._clients if one.answer is not None]
        if len(taking) > ANSWERING:
            self._hang_up(min(taking, key=lambda one: one.until_s), "scrapes too slow")

    def _send(self, client: _Client) -> bool:
        """True once it has all of it."""
        assert client.answer is not None
        client.answer = client.answer[client.sock.send(client.answer) :]
        if client.answer:
            return False
        with suppress(OSError):
            client.sock.shutdown(socket.SHUT_WR)
        self._hang_up(client)
        return True


def _message(status: int, words: str, kind: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status} {words}\r\nServer: sonde\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
