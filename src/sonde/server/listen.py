# SPDX-License-Identifier: Apache-2.0
"""Runs the application on a socket, with limits that the HTTP server lacks."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sonde.errors import UsageError
from sonde.server.addresses import BACKLOG, Address, bound
from sonde.server.app import Api
from sonde.server.service import ServerLimits, Service

LEAST_READ_BYTES = 64 << 10


def protocol_with(limits: ServerLimits) -> type[HttpToolsProtocol]:
    """The HTTP protocol that closes connections

    - whose request head does not arrive in time,
    - of an address that opens many and asks for nothing,
    - that do not take their answer: within each `unread_s` the rest of what is written, or 64 KiB,
    - that only wait for another request, the longest first, while three quarters of all are used.
    """
    unknown: Counter[str] = Counter()
    idle: OrderedDict[HttpToolsProtocol, None] = OrderedDict()

    class Bounded(HttpToolsProtocol):
        _head_timer: asyncio.TimerHandle | None = None
        _counted_for: str | None = None
        _unread_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            host = self.client[0] if self.client else ""
            if unknown[host] >= limits.connections_unknown:
                transport.abort()
                return
            unknown[host] += 1
            self._counted_for = host
            self._await_head()
            if idle and 4 * len(self.connections) > 3 * limits.connections:
                idle.popitem(last=False)[0].transport.close()

        def on_message_begin(self) -> None:
            idle.pop(self, None)
            self._await_head()
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._stop()
            self._is_known()
            super().on_headers_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self.transport.is_closing() and self.cycle.response_complete:
                idle[self] = None

        def pause_writing(self) -> None:
            super().pause_writing()
            self._await_reader()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._has_read()

        def connection_lost(self, exc: Exception | None) -> None:
            idle.pop(self, None)
            self._has_read()
            self._stop()
            self._is_known()
            super().connection_lost(exc)

        def _is_known(self) -> None:
            host, self._counted_for = self._counted_for, None
            if host is not None:
                unknown[host] -= 1
                if not unknown[host]:
                    del unknown[host]

        def _await_head(self) -> None:
            self._stop()
            self._head_timer = self.loop.call_later(limits.head_s, self._expired)

        def _stop(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _await_reader(self) -> None:
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


class Listener:
    """A service on a socket."""

    def __init__(
        self, service: Service, address: Address, listening: socket.socket | None = None
    ) -> None:
        """Bind and listen, unless a socket that does is given. Raises UsageError for an address or
        certificate that cannot be used."""
        self._address = address
        self._socket = listening or bound(address.host, address.port)
        try:
            self._config = _config(service, address)
            self._config.load()
        except (OSError, ValueError) as error:
            self._socket.close()
            raise UsageError(
                f"the certificate cannot be used: {error}", "check --certificate and --key"
            ) from error

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
        with self._socket:
            uvicorn.Server(self._config).run(sockets=[self._socket])

    def renew_certificate(self) -> bool:
        """Read certificate and key again, for connections from now on; whether there are any.
        Raises UsageError where they do not go together; then the former ones stay."""
        address, context = self._address, self._config.ssl
        if context is None or address.certificate is None:
            return False
        try:
            # Tried first: a key that does not fit would leave the context without one.
            for one in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
                one.load_cert_chain(address.certificate, address.key)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"the certificate cannot be used: {error}", "the former one stays in use"
            ) from error
        return True


def _config(service: Service, address: Address) -> uvicorn.Config:
    return uvicorn.Config(
        Api(service).app(),
        http=protocol_with(service.limits),
        loop="auto",
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
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
