# SPDX-License-Identifier: Apache-2.0
"""Bounds TLS handshakes, which the HTTP server sees only when they are over.

Until then a connection costs a descriptor and some 50 kB, and its client has shown nothing.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

import uvicorn

from sonde.server.service import ServerLimits
from sonde.server.silent import Silent

HANDSHAKE_S: Final = 10.0
"""A handshake that takes longer fails."""
_PAUSE_S: Final = 0.05
"""Before the next attempt to accept, where there was no descriptor."""


class Companion(Protocol):
    """Another server of the same event loop."""

    async def start(self) -> None:
        """Begin to accept."""

    async def stop(self) -> None:
        """Accept no more, finish the rest."""


class TlsServer(uvicorn.Server):
    """A server whose TLS handshakes are bounded as connections without a request are: the oldest of
    an origin that has many, and of all where they are half of what is allowed, are closed. Without
    TLS it is what uvicorn's is."""

    def __init__(
        self,
        config: uvicorn.Config,
        limits: ServerLimits,
        refuse: Callable[[str], None],
        companion: Companion | None = None,
    ) -> None:
        """`refuse` is called with the reason where a handshake is ended; `companion`: what starts
        and stops with this server, in its event loop."""
        super().__init__(config)
        self._companion = companion
        self._refuse = refuse
        self._silent: Silent[socket.socket] = Silent(limits)
        self._accepting: list[asyncio.Task[None]] = []
        self._handshakes: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept."""
        if self._companion is not None:
            await self._companion.start()
        if self.config.ssl is None or sockets is None:
            await super().startup(sockets)
            return
        await super().startup([])
        self._accepting = [
            asyncio.create_task(self._accept(one, self.config.ssl)) for one in sockets
        ]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, end what is only in its handshake, finish the rest."""
        for task in (*self._accepting, *self._handshakes):
            task.cancel()
        await asyncio.gather(*self._accepting, *self._handshakes, return_exceptions=True)
        if self._companion is not None:
            await self._companion.stop()
        await super().shutdown(sockets)

    async def _accept(self, listening: socket.socket, tls: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        while True:
            try:
                accepted, address = await loop.sock_accept(listening)
            except OSError:  # out of descriptors, or the client is gone
                await asyncio.sleep(_PAUSE_S)
                continue
            accepted.setblocking(False)
            excess = self._silent.add(accepted, str(address[0]))
            if excess is not None:
                self._silent.remove(excess)
                self._refuse("handshake")
                with suppress(OSError):  # it is closed already
                    excess.shutdown(socket.SHUT_RDWR)
            task = asyncio.create_task(self._shake(accepted, tls))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _shake(self, accepted: socket.socket, tls: ssl.SSLContext) -> None:
        """The handshake of one connection, which then is the HTTP protocol's."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol, accepted, ssl=tls, ssl_handshake_timeout=HANDSHAKE_S
            )
        except (OSError, asyncio.CancelledError):
            accepted.close()
        finally:
            self._silent.remove(accepted)

    def _protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made
