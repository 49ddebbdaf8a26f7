# SPDX-License-Identifier: Apache-2.0
"""Places for bodies of uploads that an aggregator reads at a time: bounded, and who is slow goes.

While there are places for all, everybody sends at their own pace. Where others wait for one, the
slowest of those that have had theirs for a moment lose it, unless they send fast enough: so sockets
that send slowly, however steadily, keep nobody out for longer than a moment a turn. A request that
is known to hold a node's report goes before those that may be anybody's.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

HOLD_S = 0.25
"""No place is lost sooner."""
FAIR_BYTES_S = 1 << 20
"""A sender that is as fast keeps its place, also while others wait."""
MOST_WAITING = 256
"""Each with what its connection buffers: up to 1.5 MB."""


class NoPlace(Exception):
    """Too many wait already."""


@dataclass(eq=False, slots=True)
class Place:
    """One body that is being read."""

    is_known: bool
    began_s: float
    size: int = 0
    """Bytes that have come since."""
    is_lost: bool = False
    _deadline: asyncio.Timeout | None = None

    def until(self, deadline: asyncio.Timeout) -> None:
        """The body is being read, under this deadline, which comes at once if the place is lost."""
        self._deadline = deadline

    def whole(self) -> None:
        """The body is there: the place cannot be lost any more."""
        self._deadline = None

    @property
    def is_reading(self) -> bool:
        return self._deadline is not None and not self.is_lost

    def pace(self, now_s: float) -> float:
        """Bytes a second."""
        return self.size / max(now_s - self.began_s, 1e-3)

    def lose(self, now_s: float) -> None:
        self.is_lost = True
        if self._deadline is not None:
            self._deadline.reschedule(now_s)


@dataclass(order=True, slots=True)
class _Waiting:
    is_unknown: bool
    number: int
    granted: asyncio.Future[None] = field(compare=False)


class Places:
    """For one event loop."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._held: dict[Place, None] = {}
        self._waiting: list[_Waiting] = []
        self._number = 0
        self._looking: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def take(self, is_known: bool = False) -> AsyncIterator[Place]:
        """A place for as long as the block lasts. Raises NoPlace where too many wait for one."""
        if self._free and not self._waiting:
            self._free -= 1
        else:
            await self._wait(is_known)
        place = Place(is_known, asyncio.get_running_loop().time())
        self._held[place] = None
        try:
            yield place
        finally:
            del self._held[place]
            self._free += 1
            self._grant()

    async def _wait(self, is_known: bool) -> None:
        """Until one of the free places is ours, and taken."""
        if len(self._waiting) >= MOST_WAITING and not (is_known and self._drop_unknown()):
            raise NoPlace
        self._number += 1
        granted = asyncio.get_running_loop().create_future()
        waiting = _Waiting(not is_known, self._number, granted)
        heapq.heappush(self._waiting, waiting)
        self._look()
        try:
            await granted
        except BaseException:
            with suppress(ValueError):
                self._waiting.remove(waiting)
                heapq.heapify(self._waiting)
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self._free += 1  # it was granted just when its request was given up
                self._grant()
            raise

    def _drop_unknown(self) -> bool:
        """Turns away the last that came of those that may be anybody's; False if there is none."""
        last = max(self._waiting)
        if not last.is_unknown:
            return False
        self._waiting.remove(last)
        heapq.heapify(self._waiting)
        if not last.granted.done():
            last.granted.set_exception(NoPlace())
        return True

    def _grant(self) -> None:
        while self._free and self._waiting:
            waiting = heapq.heappop(self._waiting)
            if not waiting.granted.done():
                self._free -= 1
                waiting.granted.set_result(None)

    def _look(self) -> None:
        """Looks, now and then while anybody waits, who is too slow for it."""
        if self._looking is None and self._waiting:
            loop = asyncio.get_running_loop()
            self._make_room(loop.time())
            self._looking = loop.call_later(HOLD_S / 2, self._look_again)

    def _look_again(self) -> None:
        self._looking = None
        self._look()

    def _make_room(self, now_s: float) -> None:
        """As many lose their place as wait: the slowest, and those that may be anybody's first.

        What may be anybody's takes no place from what is known.
        """
        known = sum(not waiting.is_unknown for waiting in self._waiting)
        slow = [
            (place.is_known, place.pace(now_s), id(place), place)
            for place in self._held
            if place.is_reading
            and now_s - place.began_s >= HOLD_S
            and place.pace(now_s) < FAIR_BYTES_S
        ]
        for number, (is_known, _, _, place) in enumerate(sorted(slow)[: len(self._waiting)]):
            if is_known and number >= known:
                break
            place.lose(now_s)
