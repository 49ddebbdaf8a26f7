# SPDX-License-Identifier: Apache-2.0
"""What requests share, however they come: the memory of their bodies, and the audit log."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

from sonde.server.service import AUDIT, LOG, Bucket, Counters, RefusedRequestError, ServerLimits
from sonde.server.tokens import Caller
from sonde.server.turns import Places

REFUSALS_A_SECOND = 2.0
"""Refusals of one tenant that are written to the audit log; others are only counted."""
FAILURES_A_SECOND = 0.1
"""Requests that failed by a defect of the server and whose traceback is logged."""


class Bodies(Places):
    """Places for requests whose bodies arrive, and the bytes of bodies whose requests are not
    answered yet."""

    def __init__(self, limits: ServerLimits, counters: Counters) -> None:
        super().__init__(3 * limits.connections // 4, limits.connections // 2)
        self._most_bytes, self._refuse = limits.bodies_bytes, counters.refuse
        self._bytes: Counter[str] = Counter()
        """In memory, by tenant."""

    def charge(self, tenant: str, size: int) -> None:
        """Count bytes that are in memory, or are about to be. The caller must give them back, also
        where this raises RefusedRequestError: too much is in memory."""
        self._bytes[tenant] += size
        if self._bytes[tenant] > self._most_bytes // 4 or self._bytes.total() > self._most_bytes:
            self._refuse("busy")
            raise RefusedRequestError(503, "too much is sent at once", "try later")

    def give_back(self, tenant: str, size: int) -> None:
        """Bytes of a body are no longer in memory."""
        self._bytes[tenant] -= size
        if not self._bytes[tenant]:
            del self._bytes[tenant]


class RequestLog:
    """The audit log of requests, and the log of those that the server could not serve."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._refusals: dict[str, Bucket] = {}
        """By tenant, '' without a token: how many refusals may be logged."""
        self._failures = Bucket(FAILURES_A_SECOND)
        """How many tracebacks may be logged."""

    def may_note_refusal(self, caller: Caller | None) -> bool:
        """Whether one more refusal is written to the audit log; otherwise it is counted."""
        tenant = caller.tenant if caller else ""
        if self._refusals.setdefault(tenant, Bucket(REFUSALS_A_SECOND)).take(1):
            return True
        self._counters.refuse("unlogged")
        return False

    def note(self, caller: Caller | None, request: Mapping[str, object]) -> None:
        """Write a request to the audit log."""
        who = {"token": caller.id if caller else "", "tenant": caller.tenant if caller else ""}
        AUDIT.info("%s", json.dumps(who | dict(request)))

    def failed(self, what: str) -> None:
        """Log the exception that is handled, by a defect of the server, unless many were."""
        if self._failures.take(1):
            LOG.exception("%s", what)
