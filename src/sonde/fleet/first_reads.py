# SPDX-License-Identifier: Apache-2.0
"""A bound on the requests whose first bytes are read while nothing is known of their senders yet.

Such a request has no upload slot, and its connection may hold a megabyte meanwhile. At the bound
the slowest sender that has had `MIN_HOLD_S` is refused, so a sender without delay does not wait for
slow ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sonde.fleet.upload_slots import MIN_HOLD_S, NoFreeSlot

MAX_READ = 128
"""Requests that are read like that at the same time: some 128 MB."""


@dataclass(eq=False, slots=True)
class FirstRead:
    """One request whose first bytes are being read. `deadline`: that of the reading, once it runs;
    times are the event loop's.
    """

    began_s: float
    received_bytes: int = 0
    deadline: asyncio.Timeout | None = None


class FirstReads:
    """The first reads of one event loop."""

    def __init__(self, limit: int = MAX_READ) -> None:
        self._limit = limit
        self._held: dict[FirstRead, None] = {}

    @contextmanager
    def place(self) -> Iterator[FirstRead]:
        """Counts one more first read for the duration of the block. Raises NoFreeSlot at the bound,
        if no sender has had `MIN_HOLD_S` yet.
        """
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
        """Ends the slowest read, as if its deadline had passed. Raises NoFreeSlot."""
        had_time = [one for one in self._held if now_s - one.began_s >= MIN_HOLD_S]
        if not had_time:
            raise NoFreeSlot
        slowest = min(had_time, key=lambda one: one.received_bytes / (now_s - one.began_s))
        del self._held[slowest]
        if slowest.deadline is not None:
            slowest.deadline.reschedule(now_s)
