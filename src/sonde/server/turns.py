# SPDX-License-Identifier: Apache-2.0
"""Turns at what few may do at once: no tenant waits behind more than a share of another one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager

from sonde.server.service import RefusedRequestError


class Places:
    """Places of requests that wait or are served, of one event loop."""

    def __init__(self, places: int, places_of_tenant: int) -> None:
        """`places`: requests of all tenants."""
        self._places = places
        self._places_of_tenant = max(1, places_of_tenant)
        self._held: Counter[str] = Counter()

    @contextmanager
    def place(self, tenant: str) -> Iterator[None]:
        """Hold a place. Raises RefusedRequestError where there is none."""
        if self._held.total() >= self._places or self._held[tenant] >= self._places_of_tenant:
            raise RefusedRequestError(503, "too much is asked at once", "try again later")
        self._held[tenant] += 1
        try:
            yield
        finally:
            self._held[tenant] -= 1
            if not self._held[tenant]:
                del self._held[tenant]
                self._emptied(tenant)

    def _emptied(self, tenant: str) -> None:
        """The tenant holds no place any more."""


class Turns(Places):
    """Places, and the turns of those requests that are served.

    That few are served at once in all is up to who serves them; turns keep those of a tenant from
    all being there.
    """

    def __init__(self, at_once: int, places: int, places_of_tenant: int) -> None:
        """`at_once`: turns of one tenant. `places`: requests of all tenants."""
        super().__init__(places, places_of_tenant)
        self._at_once = max(1, at_once)
        self._turns: dict[str, asyncio.Semaphore] = {}

    def _emptied(self, tenant: str) -> None:
        self._turns.pop(tenant, None)

    def turn(self, tenant: str) -> AbstractAsyncContextManager[None]:
        """Wait for a turn, while a place is held."""
        return self._turns.setdefault(tenant, asyncio.Semaphore(self._at_once))
