# SPDX-License-Identifier: Apache-2.0
"""Bounded slots for upload bodies that an aggregator reads at the same time.

While slots are free, each sender is as slow as it likes. While others wait for a slot, the slowest
senders that have had theirs for a minimum time lose it, unless they send fast enough. Slow senders
therefore delay others only briefly. A request that is known to contain an enrolled node's report
has priority over requests of unknown origin.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

MIN_HOLD_S = 0.25
"""No slot is revoked sooner."""
MIN_RATE_BYTES_S = 1 << 20
"""A sender at this rate keeps its slot, also while others wait."""
MAX_WAITING = 256
"""Each waiting request buffers up to 1.5 MB in its connection."""


class NoFreeSlot(Exception):
    """Too many requests wait for a slot, or too many are read first (`first_reads`)."""


@dataclass(eq=False, slots=True)
class Slot:
    """The slot of one body, from before it is read until its reports are admitted or refused.
    `is_from_node`: it is known to contain an enrolled node's report; `began_s`: a time of the event
    loop.
    """

    is_from_node: bool
    began_s: float
    received_bytes: int = 0
    """Bytes received since `began_s`."""
    is_revoked: bool = False
    _deadline: asyncio.Timeout | None = None

    def start_reading(self, deadline: asyncio.Timeout) -> None:
        """Marks the body as being read, under this deadline. Revoking the slot expires the deadline
        at once.
        """
        self._deadline = deadline

    def complete(self) -> None:
        """Marks the body as complete: the slot can no longer be revoked."""
        self._deadline = None

    @property
    def is_reading(self) -> bool:
        return self._deadline is not None and not self.is_revoked

    def rate_bytes_s(self, now_s: float) -> float:
        """Average rate of the sender, in bytes per second."""
        return self.received_bytes / max(now_s - self.began_s, 1e-3)

    def revoke(self, now_s: float) -> None:
        """Ends the reading of the body: its request is refused."""
        self.is_revoked = True
        if self._deadline is not None:
            self._deadline.reschedule(now_s)


@dataclass(order=True, slots=True)
class _Waiting:
    """A request that waits: those of unknown origin last, else in the order of `number`."""

    is_unknown: bool
    number: int
    granted: asyncio.Future[None] = field(compare=False)


class UploadSlots:
    """The slots of one event loop."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._held: dict[Slot, None] = {}
        self._waiting: list[_Waiting] = []
        self._number = 0
        self._check_timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def acquire(self, is_from_node: bool = False) -> AsyncIterator[Slot]:
        """A slot for the duration of the block. Raises NoFreeSlot if too many requests wait."""
        if self._free and not self._waiting:
            self._free -= 1
        else:
            await self._wait(is_from_node)
        slot = Slot(is_from_node, asyncio.get_running_loop().time())
        self._held[slot] = None
        try:
            yield slot
        finally:
            del self._held[slot]
            self._free += 1
            self._grant()

    async def _wait(self, is_from_node: bool) -> None:
        """Waits until a slot is granted to this request."""
        if len(self._waiting) >= MAX_WAITING and not (is_from_node and self._drop_unknown()):
            raise NoFreeSlot
        self._number += 1
        granted = asyncio.get_running_loop().create_future()
        waiting = _Waiting(not is_from_node, self._number, granted)
        heapq.heappush(self._waiting, waiting)
        self._check_slow()
        try:
            await granted
        except BaseException:
            with suppress(ValueError):
                self._waiting.remove(waiting)
                heapq.heapify(self._waiting)
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self._free += 1  # granted at the moment of cancellation
                self._grant()
            raise

    def _drop_unknown(self) -> bool:
        """Rejects the newest waiting request of unknown origin; False if there is none."""
        last = max(self._waiting)
        if not last.is_unknown:
            return False
        self._waiting.remove(last)
        heapq.heapify(self._waiting)
        if not last.granted.done():
            last.granted.set_exception(NoFreeSlot())
        return True

    def _grant(self) -> None:
        while self._free and self._waiting:
            waiting = heapq.heappop(self._waiting)
            if not waiting.granted.done():
                self._free -= 1
                waiting.granted.set_result(None)

    def _check_slow(self) -> None:
        """Revokes slots of slow senders, now and periodically while any request waits."""
        if self._check_timer is None and self._waiting:
            loop = asyncio.get_running_loop()
            self._revoke_slow(loop.time())
            self._check_timer = loop.call_later(MIN_HOLD_S / 2, self._check_slow_again)

    def _check_slow_again(self) -> None:
        self._check_timer = None
        self._check_slow()

    def _revoke_slow(self, now_s: float) -> None:
        """Revokes as many slots as requests wait: the slowest, and those of unknown origin first.

        A request of unknown origin takes no slot from a node's request.
        """
        from_nodes = sum(not waiting.is_unknown for waiting in self._waiting)
        slow = [
            (slot.is_from_node, slot.rate_bytes_s(now_s), id(slot), slot)
            for slot in self._held
            if slot.is_reading
            and now_s - slot.began_s >= MIN_HOLD_S
            and slot.rate_bytes_s(now_s) < MIN_RATE_BYTES_S
        ]
        for number, (is_from_node, _, _, slot) in enumerate(sorted(slow)[: len(self._waiting)]):
            if is_from_node and number >= from_nodes:
                break
            slot.revoke(now_s)
