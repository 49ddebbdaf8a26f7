# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is to be attached to, so that no party's processes keep another's waiting.

A process can make an attach to it fail, or last. So a failure over a process pauses its party alone
(a user or a container: procfs.parties), parties take turns, and none fills the queue. A failure of
our own pauses everybody.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final

Identity = tuple[int, int]
"""(pid, start in ns since boot)"""

WAITING: Final = 256
WAITING_OF_A_PARTY: Final = 64
FIRST_PAUSE_S: Final = 60.0
LONGEST_PAUSE_S: Final = 3600.0
_PARTIES: Final = 1024


class Backoff:
    """Ever longer pauses, of parties or of everybody. Times: monotonic s."""

    def __init__(self) -> None:
        self._of: dict[int | None, tuple[int, float]] = {}
        """Of a party, or of everybody (None): failures in a row, and when the pause ends."""

    def failed(self, party: int | None, now_s: float) -> float:
        """Begin a pause of the party, or of everybody; how long it is."""
        failures = self._of.get(party, (0, 0.0))[0]
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures, 16))
        if party not in self._of and len(self._of) >= _PARTIES:
            soonest = min((it for it in self._of if it is not None), key=lambda it: self._of[it][1])
            del self._of[soonest]
        self._of[party] = (failures + 1, now_s + pause_s)
        return pause_s

    def worked(self, party: int) -> None:
        """The next failure is the first again."""
        self._of.pop(party, None)
        self._of.pop(None, None)

    def is_paused(self, party: int, now_s: float) -> bool:
        """Whether no process of the party may be attached to now."""
        return any(now_s < self._of.get(key, (0, 0.0))[1] for key in (party, None))


class AttachQueue:
    """Processes that wait for an attach. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Identity, tuple[int, float]] = {}
        """Party, and when it is due."""
        self._served: dict[int, int] = {}
        """When a party had a turn: number of that turn."""
        self._turns = 0

    def put(self, identity: Identity, party: int, due_s: float) -> bool:
        """False: there is no room, for this party or at all."""
        with self._lock:
            held = Counter(of for of, _ in self._waiting.values())
            if len(self._waiting) >= WAITING or held[party] >= WAITING_OF_A_PARTY:
                return False
            self._waiting[identity] = (party, due_s)
            return True

    def take(self, now_s: float, backoff: Backoff) -> tuple[Identity, int] | None:
        """The process that is due, of the party whose last turn is longest ago; and the party."""
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
            if len(self._served) >= _PARTIES:
                del self._served[next(iter(self._served))]
            self._served[party] = self._turns
            return identity, party

    def __len__(self) -> int:
        return len(self._waiting)
