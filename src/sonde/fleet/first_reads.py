# SPDX-License-Identifier: Apache-2.0
"""A bound on the requests whose beginning is read before anything is known of their senders.

A connection may hold a megabyte meanwhile. At the bound the slowest sender that has had some time
gives way, so nobody who sends at once waits for those who do not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sonde.fleet.upload_slots import MIN_HOLD_S, NoFreeSlot

MAX_READ = 128


@dataclass(eq=False, slots=True)
class FirstRead:
    """A beginning that is being read."""

    began_s: float
    received_bytes: int = 0
    deadline: asyncio.Timeout | None = None


class FirstReads:
    """Those of one event loop."""

    def __init__(self, limit: int = MAX_READ) -> None:
        self._limit = limit
        self._held: dict[FirstRead, None] = {}

    @contextmanager
    def place(self) -> Iterator[FirstRead]:
        """A place for the duration of the block. Raises NoFreeSlot where all are held by senders
        that have had no time yet."""
        now_s = asyncio.get_running_loop().time()
        if len(self._held) >= self._limit:
            self._evict(now_s)
        one = FirstRead(now_s)
        self._held[one] = None
        try:
            yield one
        finally:
            self._held.pop(one, None)

    def _evict(self, now_s: float) -> None:
        had_time = [one for one in self._held if now_s - one.began_s >= MIN_HOLD_S]
        if not had_time:
            raise NoFreeSlot
        slowest = min(had_time, key=lambda one: one.received_bytes / (now_s - one.began_s))
        del self._held[slowest]
        if slowest.deadline is not None:
            slowest.deadline.reschedule(now_s)
