# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is to be attached to, so that no party's processes keep another's waiting.

A process can make an attach to it fail, or take long. So the failure of an attach pauses attaches
to that process's party alone (a user or a container: procfs.parties), parties take turns, and none
fills the queue. A failure of Sonde's tracer (`TracerFailed`) pauses all.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final

Identity = tuple[int, int]
"""(pid, start in ns since boot)"""

MAX_WAITING: Final = 256
"""Processes in the queue."""
MAX_WAITING_OF_PARTY: Final = 64
"""Of these, processes of one party."""
FIRST_PAUSE_S: Final = 60.0
"""After a first failure; doubled at each one after it."""
MAX_PAUSE_S: Final = 3600.0
_MAX_PARTIES: Final = 1024
"""Parties whose failures, or whose turns, are remembered."""


class Backoff:
    """Ever longer pauses of one party, or of all (`party` None). Times: CLOCK_MONOTONIC, s."""

    def __init__(self) -> None:
        self._of: dict[int | None, tuple[int, float]] = {}
        """By party, None for all: failures in a row, and when the pause ends."""

    def failed(self, party: int | None, now_s: float) -> float:
        """Note a failure and begin a pause. Returns its length in seconds."""
        failures = self._of.get(party, (0, 0.0))[0]
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures, 16))
        if party not in self._of and len(self._of) >= _MAX_PARTIES:
            soonest = min((it for it in self._of if it is not None), key=lambda it: self._of[it][1])
            del self._of[soonest]
        self._of[party] = (failures + 1, now_s + pause_s)
        return pause_s

    def worked(self, party: int) -> None:
        """Note a success: the next failure counts as the first, and a pause of all ends."""
        self._of.pop(party, None)
        self._of.pop(None, None)

    def is_paused(self, party: int, now_s: float) -> bool:
        """Whether no process of the party may be attached to now."""
        return any(now_s < self._of.get(key, (0, 0.0))[1] for key in (party, None))


class AttachQueue:
    """Processes that wait for an attach. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Identity, tuple[int, float]] = {}
        """Party, and from when on it may be taken (CLOCK_MONOTONIC, s)."""
        self._served: dict[int, int] = {}
        """By party: the number of its last turn."""
        self._turns = 0

    def put(self, identity: Identity, party: int, due_s: float) -> bool:
        """Add a process that may be taken from `due_s` on. False: there is no room, for this party
        or at all."""
        with self._lock:
            held = Counter(of for of, _ in self._waiting.values())
            if len(self._waiting) >= MAX_WAITING or held[party] >= MAX_WAITING_OF_PARTY:
                return False
            self._waiting[identity] = (party, due_s)
            return True

    def take(self, now_s: float, backoff: Backoff) -> tuple[Identity, int] | None:
        """Remove a process that is due, of the party whose last turn is longest ago. Returns it and
        its party; None where none is due, or all parties of those that are due pause."""
        with self._lock:
            due = [
                (self._served.get(party, 0), due_s, identity)
                for identity, (party, due_s) in self._waiting.items()
                if due_s <= now_s and not backoff.is_paused(party, now_s)
            ]
            if not due:
                return None
            *_, identity = min(due)
            party, _ = self._waiting.pop(identity)
            self._turns += 1
            self._served.pop(party, None)
            if len(self._served) >= _MAX_PARTIES:
                del self._served[next(iter(self._served))]
            self._served[party] = self._turns
            return identity, party

    def __len__(self) -> int:
        return len(self._waiting)
