# SPDX-License-Identifier: Apache-2.0
"""A bound on an aggregator's connections. At the bound, the slowest connections are closed.

Idle sockets and slow handshakes therefore keep nobody out for longer than `MIN_AGE_S`. Closing a
connection during honest work costs a retry: a node's second copy is recognized as a replay, and the
helper does no job twice.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol, cast

MAX_CONNECTIONS = 2048
"""About 60 kB each."""
MIN_AGE_S = 1.0
"""No connection is closed sooner: its request may be on the way."""
HANDSHAKE_S = 10.0
"""A TLS handshake that takes longer fails."""
_SPARE_FILES = 128
"""Descriptors that are left for the process's own files and its connections to the helper."""
_MIN_LIMIT = 16
"""Connections that are accepted however few descriptors the process may have."""
_PAUSE_S = 0.02
"""Between two attempts to make room while no connection is old enough to be closed."""
_EVICT_AT_ONCE = 16
"""Connections closed in one step."""


class Handler(Protocol):
    """The handler of one connection: aiohttp's, which has no transport after it is closed."""

    transport: asyncio.Transport | None


@dataclass(eq=False, slots=True)
class _Connection:
    """An accepted connection. `accepted_s` is a time of the event loop."""

    accepted_s: float
    sock: socket.socket
    handler: Handler
    in_handshake: bool = True

    @property
    def is_closed(self) -> bool:
        return not self.in_handshake and self.handler.transport is None

    @property
    def priority(self) -> int:
        """0 in the handshake, 1 without a request, 2 with one. The lower is closed first."""
        if self.in_handshake:
            return 0
        return 1 if getattr(self.handler, "_current_request", None) is None else 2

    def close(self) -> None:
        if self.handler.transport is not None:
            self.handler.transport.abort()
        elif self.in_handshake:
            with suppress(OSError):  # then the handshake fails by itself
                self.sock.shutdown(socket.SHUT_RDWR)


class ConnectionLimiter:
    """Accepts connections, and closes the slowest at the bound."""

    def __init__(
        self,
        make_handler: Callable[[], Any],
        tls: ssl.SSLContext | None,
        count_refusals: Callable[[Counter[str]], None],
        limit: int | None = None,
    ) -> None:
        """`make_handler` returns a new `Handler`; `count_refusals` receives counts of closed
        connections; `limit` overrides the bound.
        """
        self._make_handler, self._tls, self._count_refusals = make_handler, tls, count_refusals
        self.limit = limit or _limit_by_descriptors()
        self._connections: dict[_Connection, None] = {}  # oldest first
        self._handshakes: set[asyncio.Task[None]] = set()

    async def accept(self, listener: socket.socket) -> None:
        """Accepts until the task is cancelled."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        with listener:
            while True:
                while len(self._connections) >= self.limit:
                    await self._evict()
                try:
                    sock, _ = await loop.sock_accept(listener)
                except OSError:  # out of descriptors, or the client is gone
                    await self._evict()
                    continue
                sock.setblocking(False)
                connection = _Connection(loop.time(), sock, self._make_handler())
                self._connections[connection] = None
                task = asyncio.create_task(self._handshake(connection))
                self._handshakes.add(task)
                task.add_done_callback(self._handshakes.discard)

    async def _evict(self) -> None:
        """Removes closed connections. If there are none, closes the slowest that are old enough:
        first those without a handshake, then those without a request, then the oldest.
        """
        gone = [connection for connection in self._connections if connection.is_closed]
        for connection in gone:
            del self._connections[connection]
        if not gone:
            before_s = asyncio.get_running_loop().time() - MIN_AGE_S
            had_time = takewhile(
                lambda connection: connection.accepted_s <= before_s, self._connections
            )
            oldest = sorted(had_time, key=lambda connection: connection.priority)[:_EVICT_AT_ONCE]
            for connection in oldest:
                connection.close()
                del self._connections[connection]
            if oldest:
                self._count_refusals(Counter({"evicted": len(oldest)}))
        await asyncio.sleep(0 if len(self._connections) < self.limit else _PAUSE_S)

    async def _handshake(self, connection: _Connection) -> None:
        """Performs the TLS handshake with a timeout, then hands the connection to its handler."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: cast(asyncio.BaseProtocol, connection.handler),
                connection.sock,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_S if self._tls else None,
            )
        except OSError:  # the handshake failed, or the connection was closed
            connection.sock.close()
        finally:
            connection.in_handshake = False


def _limit_by_descriptors() -> int:
    """`MAX_CONNECTIONS`, or fewer if the limit of descriptors allows no more; its soft limit is
    raised before, as far as its hard limit goes.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + _SPARE_FILES
    if soft < wanted:
        soft = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(_MIN_LIMIT, min(MAX_CONNECTIONS, soft - _SPARE_FILES))
