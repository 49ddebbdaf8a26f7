# SPDX-License-Identifier: Apache-2.0
"""Runs the application on a socket, with limits that the HTTP server lacks."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sonde.errors import UsageError
from sonde.server.addresses import BACKLOG, Address, listening_socket
from sonde.server.app import Api
from sonde.server.handshakes import TlsServer
from sonde.server.held_connections import HeldConnections
from sonde.server.service import Bucket, ServerLimits, Service
from sonde.server.silent import ACCEPTED, Silent, origin

if TYPE_CHECKING:
    from sonde.server.otlp_grpc import GrpcReceiver

LEAST_READ_BYTES = 64 << 10
"""What a client must read of its answer within each `unread_s`."""
HEAD_BYTES = 64 << 10
"""Most bytes of a request's head, and of the trailers after a body."""
HEAD_FIELDS = 100
"""Most headers of a request."""
PIPELINED = 8
"""Most requests of one connection that are not answered yet."""
PIECE_BYTES = 16 << 10
"""Bytes that the parser gets at a time: limits may be exceeded by this much."""
LOGGED_A_SECOND = 2.0
"""Warnings, and likewise errors, of the HTTP server that are logged."""


class TooMuchError(Exception):
    """A request beyond a limit of its connection, which is closed."""


def protocol_with(
    limits: ServerLimits, refuse: Callable[[str], None] = lambda _why: None
) -> type[HttpToolsProtocol]:
    """The HTTP protocol that closes connections

    - whose request head does not arrive in time, or is beyond 64 KiB or 100 headers,
    - of which no request has had a valid token (`accepted`), until their last answer is read: the
      oldest of an origin that has many, and of all where these are half of what is allowed,
    - with more than 8 requests that are not answered yet,
    - that do not take their answer: within each `unread_s` the rest of what is written, or 64 KiB,
    - that only wait for another request, the longest first, while three quarters of all are used:
      of the tenant that holds most (before a valid token: of the client's machine),
    - and, while all are used, whose request is not here as a whole: likewise, for a new one.

    `refuse` is called with the reason where a connection is closed for what it sent, or for a new
    one (`displaced`). The memory of an answered request is freed while its connection waits for
    another.
    """
    strangers: Silent[HttpToolsProtocol] = Silent(limits)
    held: HeldConnections[HttpToolsProtocol] = HeldConnections()

    class Bounded(HttpToolsProtocol):
        _head_timer: asyncio.TimerHandle | None = None
        _unread_timer: asyncio.TimerHandle | None = None
        _head_bytes = 0
        """Of the URL and the headers so far."""
        _fields = 0
        """Headers so far."""
        _unparsed_bytes = 0
        """Received since the parser last reported the end of a head or a piece of a body."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            host = self.client[0] if self.client else ""
            excess = strangers.add(self, host)
            self._await_head()
            if excess is not None:
                strangers.remove(excess)
                self._displace(excess)
            elif len(self.connections) >= limits.connections:
                other = held.giving_way()
                if other is not None:  # else the HTTP server refuses this one
                    refuse("displaced")
                    self._displace(other)
            elif 4 * len(self.connections) > 3 * limits.connections:
                idle = held.longest_idle()
                if idle is not None:
                    held.remove(idle)
                    idle.transport.close()
            held.add(self, f"from {origin(host)}")

        def data_received(self, data: bytes) -> None:
            for at in range(0, len(data), PIECE_BYTES):
                if self.parser is None or self.transport.is_closing():
                    return
                piece = data[at : at + PIECE_BYTES]
                self._unparsed_bytes += len(piece)
                super().data_received(piece)
                if self._unparsed_bytes > HEAD_BYTES:
                    self._give_up("head")

        def on_message_begin(self) -> None:
            answered = self.cycle is None or self.cycle.response_complete
            if not answered and len(self.pipeline) + 1 >= PIPELINED:
                self._give_up("pipelined")
                raise TooMuchError
            self._head_bytes = self._fields = self._unparsed_bytes = 0
            if answered:
                held.sends(self)
            self._await_head()
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            self._count_head(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._fields += 1
            self._count_head(len(name) + len(value) + 4)
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._unparsed_bytes = 0
            self._stop()
            self.scope["extensions"] = {ACCEPTED: {"note": self._accepted}}
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._unparsed_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            super().on_message_complete()
            if not self.cycle.response_complete:
                held.serves(self)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.transport.is_closing():
                return
            if not self.cycle.response_complete:
                if self.cycle.more_body and not self.pipeline:
                    held.sends(self)  # the body of the last request: all before it are answered
                return
            if self.scope is not self.cycle.scope:  # the head of the next request has begun
                held.sends(self)
            else:
                held.idles(self)
                self.headers, self.url = [], b""
                self.scope = {}  # type: ignore[typeddict-item]
            self.cycle.scope, self.cycle.body = {}, bytearray()  # type: ignore[typeddict-item]

        def pause_writing(self) -> None:
            super().pause_writing()
            self._await_reader()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._has_read()

        def connection_lost(self, exc: Exception | None) -> None:
            held.remove(self)
            strangers.remove(self)
            self._has_read()
            self._stop()
            self.pipeline.clear()
            super().connection_lost(exc)

        def _accepted(self, tenant: str) -> None:
            strangers.remove(self)
            if tenant:
                held.move(self, f"of {tenant}")

        def _displace(self, other: HttpToolsProtocol) -> None:
            """Close another connection, which counts no more from now on."""
            held.remove(other)
            self.connections.discard(other)
            other.transport.abort()

        def _count_head(self, size: int) -> None:
            self._head_bytes += size
            if self._head_bytes > HEAD_BYTES or self._fields > HEAD_FIELDS:
                self._give_up("head")
                raise TooMuchError

        def _give_up(self, why: str) -> None:
            if not self.transport.is_closing():  # else it is counted already
                refuse(why)
            self.transport.abort()

        def _await_head(self) -> None:
            self._stop()
            self._head_timer = self.loop.call_later(limits.head_s, self._expired)

        def _stop(self) -> None:
            """No head is waited for any more."""
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _await_reader(self) -> None:
            """Check after `unread_s` how much of the answer the client has read."""
            self._has_read()
            left = self.transport.get_write_buffer_size()
            self._unread_timer = self.loop.call_later(limits.unread_s, self._look_at_reader, left)

        def _has_read(self) -> None:
            if self._unread_timer is not None:
                self._unread_timer.cancel()
                self._unread_timer = None

        def _look_at_reader(self, left: int) -> None:
            if self.transport.get_write_buffer_size() > left - LEAST_READ_BYTES:
                self.transport.abort()  # it may be closing: for that, too, all has to be read
            else:
                self._await_reader()

        def _expired(self) -> None:
            if not self.transport.is_closing():
                self.transport.abort()

    return Bounded


class _FewLines(logging.Filter):
    """Limits the lines that the HTTP server logs, since any client can cause them. Others are
    counted."""

    def __init__(self, refuse: Callable[[str], None]) -> None:
        super().__init__()
        self._refuse = refuse
        self._buckets = {True: Bucket(LOGGED_A_SECOND), False: Bucket(LOGGED_A_SECOND)}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        if self._buckets[record.levelno >= logging.ERROR].take(1):
            return True
        self._refuse("unlogged")
        return False


class Listener:
    """A service on a socket."""

    def __init__(
        self,
        service: Service,
        address: Address,
        listening: socket.socket | None = None,
        otlp_grpc: Address | None = None,
    ) -> None:
        """Bind and listen, unless a socket that does is given. `otlp_grpc`: where OTLP is received
        over gRPC, too. Raises UsageError for an address or certificate that cannot be used."""
        self._address, self._limits = address, service.limits
        self._refuse = service.counters.refuse
        self._socket = listening or listening_socket(address.host, address.port)
        api = Api(service)
        try:
            self._config = _config(service, address, api)
            self._config.load()
        except (OSError, ValueError) as error:
            self._socket.close()
            raise UsageError(
                f"the certificate cannot be used: {error}", "check --certificate and --key"
            ) from error
        self._receiver: GrpcReceiver | None = None
        if otlp_grpc is not None:
            from sonde.server.otlp_grpc import GrpcReceiver  # and with it gRPC's library

            try:
                self._receiver = GrpcReceiver(
                    service, otlp_grpc, api.bodies, api.requests, api.otlp
                )
            except UsageError:
                self._socket.close()
                raise

    @property
    def otlp_target(self) -> str:
        """HOST:PORT where OTLP is received over gRPC; '': nowhere."""
        return self._receiver.target if self._receiver else ""

    @property
    def url(self) -> str:
        """Where it answers."""
        host = self._address.host
        host = f"[{host}]" if self._socket.family == socket.AF_INET6 else host
        scheme = "https" if self._address.certificate else "http"
        return f"{scheme}://{host}:{self._socket.getsockname()[1]}"

    def run(self, on_turn: Callable[[], None]) -> None:
        """Serve until SIGTERM or SIGINT; `on_turn` is called about each second by the loop that
        serves, and must return at once."""

        async def turn() -> None:
            on_turn()

        self._config.callback_notify, self._config.timeout_notify = turn, 1
        log, few = logging.getLogger("uvicorn.error"), _FewLines(self._refuse)
        log.addFilter(few)
        try:
            with self._socket:
                server = TlsServer(self._config, self._limits, self._refuse, self._receiver)
                server.run(sockets=[self._socket])
        finally:
            if self._receiver is not None:
                self._receiver.close()
            log.removeFilter(few)

    def renew_certificate(self) -> bool:
        """Read certificate and key again, for new connections; returns whether the server has any.
        Raises UsageError where they do not belong together; then the former ones stay."""
        address, context = self._address, self._config.ssl
        if context is None or address.certificate is None:
            return False
        try:
            # Tried first: a key that does not fit would leave the context without one.
            for one in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
                one.load_cert_chain(address.certificate, address.key)
            if self._receiver is not None:
                self._receiver.renew_certificate()
        except (OSError, ValueError) as error:
            raise UsageError(
                f"the certificate cannot be used: {error}", "the former one stays in use"
            ) from error
        return True


def _config(service: Service, address: Address, api: Api | None = None) -> uvicorn.Config:
    return uvicorn.Config(
        (api or Api(service)).app(),
        http=protocol_with(service.limits, service.counters.refuse),
        loop="auto",
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # the audit log has the address that asked, not one that it claims
        server_header=False,
        limit_concurrency=service.limits.connections,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
        backlog=BACKLOG,
        ssl_certfile=str(address.certificate) if address.certificate else None,
        ssl_keyfile=str(address.key) if address.key else None,
        ssl_ca_certs=str(address.client_authority) if address.client_authority else None,
        ssl_cert_reqs=2 if address.client_authority else 0,
    )
