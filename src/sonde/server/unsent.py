# SPDX-License-Identifier: Apache-2.0
"""Answers that clients have not read yet: how much of the server's memory a tenant's may take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sonde.server.service import RefusedRequestError


class Unsent:
    """Bytes of answers that are not sent yet, by tenant."""

    def __init__(self, most_bytes: int, refuse: Callable[[str], None]) -> None:
        """`most_bytes`: of one tenant; `refuse`: counts a refusal (`Counters`)."""
        self._most_bytes, self._refuse = most_bytes, refuse
        self._bytes: Counter[str] = Counter()

    def room_bytes(self, tenant: str) -> int:
        """How much a further answer may have. May be called in any thread."""
        return max(0, self._most_bytes - self._bytes.get(tenant, 0))

    def check(self, tenant: str, size_bytes: int = 0) -> None:
        """Raises RefusedRequestError where an answer of this size has no room."""
        held_bytes = self._bytes.get(tenant, 0)
        if held_bytes + size_bytes <= self._most_bytes:
            return
        self._refuse("unread")
        if held_bytes:
            raise RefusedRequestError(503, "answers are not read", "read them first")
        raise RefusedRequestError(
            413, f"the answer has more than {self._most_bytes / 1e6:,.1f} MB", "ask for less"
        )

    @contextmanager
    def held(self, tenant: str, size_bytes: int) -> Iterator[None]:
        """Within this context an answer is being sent."""
        self._bytes[tenant] += size_bytes
        try:
            yield
        finally:
            self._bytes[tenant] -= size_bytes
            if not self._bytes[tenant]:
                del self._bytes[tenant]
