# SPDX-License-Identifier: Apache-2.0
"""Connections that an aggregator holds at a time: bounded, and with one more the slowest go.

So sockets that say nothing, or take an hour over their handshake, shut nobody out. A connection
that is hung up on in the middle of honest work costs a retry: a node's second copy is known as a
replay, and the helper does nothing twice.
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

LIMIT = 2048
"""At some 60 kB each."""
STAY_S = 1.0
"""No connection goes sooner, not to lose those whose request is on its way."""
HANDSHAKE_S = 10.0
_SPARE_FILES = 128
_PAUSE_S = 0.02
_TOGETHER = 16
"""Hung up on at a time."""


class Handler(Protocol):
    """What serves one connection: aiohttp's handler, which has no transport once it is over."""

    transport: asyncio.Transport | None


@dataclass(eq=False, slots=True)
class _Held:
    came_s: float
    sock: socket.socket
    handler: Handler
    is_shaking: bool = True

    @property
    def is_over(self) -> bool:
        return not self.is_shaking and self.handler.transport is None

    @property
    def progress(self) -> int:
        """Who has not asked for anything goes before those who are being answered."""
        if self.is_shaking:
            return 0
        return 1 if getattr(self.handler, "_current_request", None) is None else 2

    def hang_up(self) -> None:
        if self.handler.transport is not None:
            self.handler.transport.abort()
        elif self.is_shaking:
            with suppress(OSError):  # then the handshake ends by itself
                self.sock.shutdown(socket.SHUT_RDWR)


class Connections:
    """Accepts, and hangs up."""

    def __init__(
        self,
        make: Callable[[], Any],
        tls: ssl.SSLContext | None,
        note: Callable[[Counter[str]], None],
        limit: int | None = None,
    ) -> None:
        """`make` makes a `Handler`; `note` counts those who were hung up on; `limit`: for tests."""
        self._make, self._tls, self._note = make, tls, note
        self.limit = limit or _fitting_limit()
        self._held: dict[_Held, None] = {}  # oldest first
        self._shaking: set[asyncio.Task[None]] = set()

    async def accept(self, listener: socket.socket) -> None:
        """For as long as the task lives."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        with listener:
            while True:
                while len(self._held) >= self.limit:
                    await self._make_room()
                try:
                    sock, _ = await loop.sock_accept(listener)
                except OSError:  # out of descriptors, or the caller is gone
                    await self._make_room()
                    continue
                sock.setblocking(False)
                held = _Held(loop.time(), sock, self._make())
                self._held[held] = None
                task = asyncio.create_task(self._shake(held))
                self._shaking.add(task)
                task.add_done_callback(self._shaking.discard)

    async def _make_room(self) -> None:
        """Forgets those who are gone, else hangs up on the slowest that have had their time: those
        without a handshake, then without a request, then the oldest.
        """
        gone = [held for held in self._held if held.is_over]
        for held in gone:
            del self._held[held]
        if not gone:
            before_s = asyncio.get_running_loop().time() - STAY_S
            had_time = takewhile(lambda held: held.came_s <= before_s, self._held)
            oldest = sorted(had_time, key=lambda held: held.progress)[:_TOGETHER]
            for held in oldest:
                held.hang_up()
                del self._held[held]
            if oldest:
                self._note(Counter({"evicted": len(oldest)}))
        await asyncio.sleep(0 if len(self._held) < self.limit else _PAUSE_S)

    async def _shake(self, held: _Held) -> None:
        """The handshake, in good time; afterwards the connection is its handler's."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: cast(asyncio.BaseProtocol, held.handler),
                held.sock,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_S if self._tls else None,
            )
        except OSError:  # no handshake, or hung up on
            held.sock.close()
        finally:
            held.is_shaking = False


def _fitting_limit() -> int:
    """As many as there are descriptors for, after asking for as many as may be had."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = LIMIT + _SPARE_FILES
    if soft < wanted:
        soft = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(16, min(LIMIT, soft - _SPARE_FILES))
