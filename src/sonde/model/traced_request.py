# SPDX-License-Identifier: Apache-2.0
"""A traced request: what the thread that answered it spent its time on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestWait:
    """Waits of a request for one reason in one place of the program."""

    reason: str
    location: str
    """'function file:line'; '' not known."""
    ns: int

    @property
    def text(self) -> str:
        """'socket in query shop.py:25'."""
        return f"{self.reason} in {self.location}" if self.location else self.reason


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request by the ids of its header `traceparent`. Lengths in ns, from samples and waits."""

    trace_id: str
    span_id: str
    process: str
    """The label of the process that answered it."""
    ns: int
    """On a CPU, ready and blocked together."""
    cpu_ns: int
    runqueue_ns: int
    waits: Sequence[RequestWait]
    """The longest ones, the first one most."""
