# SPDX-License-Identifier: Apache-2.0
"""Limits of how many requests of a tenant wait and are served: others need not wait for all of
them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Final

from sonde.server.service import RefusedRequestError

FIRST_PLACES: Final = 64
"""Beyond all others, for tenants that hold none."""


class Places:
    """Room for requests that wait or are served. For use in one event loop.

    Where several tenants ask, each has an equal share, of which one is left for who comes next; and
    who holds none gets one also where the others hold all.
    """

    def __init__(self, places: int, places_of_tenant: int) -> None:
        """Limits of requests: of all tenants together, and of one."""
        self._places = places
        self._places_of_tenant = max(1, places_of_tenant)
        self._held: Counter[str] = Counter()

    @contextmanager
    def place(self, tenant: str) -> Iterator[None]:
        """Hold a place. Raises RefusedRequestError where none is free."""
        held = self._held.get(tenant, 0)
        room = self._places if held else self._places + FIRST_PLACES
        if self._held.total() >= room or held >= self._share(tenant):
            raise RefusedRequestError(503, "too much is asked at once", "try again later")
        self._held[tenant] += 1
        try:
            yield
        finally:
            self._held[tenant] -= 1
            if not self._held[tenant]:
                del self._held[tenant]
                self._emptied(tenant)

    def _share(self, tenant: str) -> int:
        """How many places the tenant may hold now."""
        tenants = len(self._held.keys() | {tenant})
        if tenants == 1:
            return self._places_of_tenant
        return max(1, min(self._places_of_tenant, self._places // (tenants + 1)))

    def _emptied(self, tenant: str) -> None:
        """The tenant holds no place any more."""


class Turns(Places):
    """Places, and turns: permissions of requests to be served now.

    Turns only limit how many requests of one tenant are served at a time. How many are served in
    all is limited by the threads that serve them.
    """

    def __init__(self, at_once: int, places: int, places_of_tenant: int) -> None:
        """`at_once`: turns of one tenant; `places`, `places_of_tenant`: as of `Places`."""
        super().__init__(places, places_of_tenant)
        self._at_once = max(1, at_once)
        self._turns: dict[str, asyncio.Semaphore] = {}

    def _emptied(self, tenant: str) -> None:
        self._turns.pop(tenant, None)

    def turn(self, tenant: str) -> AbstractAsyncContextManager[None]:
        """Within this context a request has a turn; entering waits for one. The caller holds a
        place."""
        return self._turns.setdefault(tenant, asyncio.Semaphore(self._at_once))
