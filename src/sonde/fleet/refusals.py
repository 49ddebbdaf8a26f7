# SPDX-License-Identifier: Apache-2.0
"""The reasons for which an aggregator refuses a request, and which of them are final.

A refusal of the *content* is final: the same request would be refused again. All else is not,
whatever its status: a request that arrives too slowly, a full server, a token or a task that an
operator has to correct, a reason that this version does not know. The sender then keeps what it
sent and repeats it. Otherwise anybody on the path could destroy reports by delaying a packet.
"""

from __future__ import annotations

TOO_SLOW, HUNG_UP, BUSY = "too slow", "hung up", "busy"
"""Refusals of a request whose body was not read to its end."""
UNAUTHORISED = "unauthorised"
STILL_OPEN = "still open"
STATUS_OF_REASON = {
    "malformed": 400,
    "misaligned": 400,
    "unknown task": 404,
    "unknown node": 403,
    "forged": 403,
    "tenant cap": 403,
    "early": 400,
    "late": 410,
    "expired": 410,
    "replayed": 409,
    "quota": 409,
    "oversized": 413,
    TOO_SLOW: 408,
    STILL_OPEN: 425,
    "too few": 409,
    "mismatch": 409,
    "budget spent": 429,
}
"""The HTTP status of each reason that an aggregator gives for a report or a release."""

FINAL_FOR_REPORT = frozenset(
    {
        *("malformed", "oversized", "forged", "replayed", "quota", "late", "early", "expired"),
        *("unknown node", "unknown task", "tenant cap"),
    }
)
"""A node does not send the report again."""
FINAL_FOR_JOB = frozenset({"malformed", "oversized", "mismatch"})
"""The leader ends the job: it counts none of its reports."""
FINAL_FOR_RELEASE = frozenset(
    {
        *("malformed", "oversized", "misaligned", "too few", "mismatch", "budget spent"),
        "expired",
    }
)
"""The collector asks for this batch no more."""
