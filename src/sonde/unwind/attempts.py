# SPDX-License-Identifier: Apache-2.0
"""Processes whose runtime could not be read: how often that was tried, and when it is again."""

from __future__ import annotations

import time
from typing import Final

MAX_PROCESSES: Final = 4096
ATTEMPTS: Final = 8
"""Of one process: a program that has just started has not initialized its memory yet."""
RETRY_S: Final = 0.5
"""Between two attempts."""
OVER_S: Final = 5.0
"""To the next attempt, where its party has used up its time for names."""

_Key = tuple[int, int]
"""(pid, start_ns)"""


class Attempts:
    """The attempts at one kind of runtime."""

    def __init__(self) -> None:
        self._made: dict[_Key, tuple[int, float]] = {}
        """Attempts so far, and when the next one is due (CLOCK_MONOTONIC, s)."""

    def made(self, key: _Key) -> int:
        """How many were made for a process."""
        return self._made.get(key, (0, 0.0))[0]

    def is_due(self, key: _Key) -> bool:
        """Whether to try it now."""
        attempts, due_s = self._made.get(key, (0, 0.0))
        return attempts < ATTEMPTS and time.monotonic() >= due_s

    def put_off(self, key: _Key, attempts: int, wait_s: float) -> None:
        """`attempts` were made so far; the next is due in `wait_s` seconds, with ATTEMPTS none."""
        if len(self._made) > MAX_PROCESSES:
            self._made.clear()
        self._made[key] = attempts, time.monotonic() + wait_s

    def has_worked(self, key: _Key) -> None:
        """The runtime of a process was read."""
        self._made.pop(key, None)

    def forget(self, pid: int) -> None:
        """A process is no longer of interest."""
        for key in [key for key in self._made if key[0] == pid]:
            del self._made[key]

    def due(self, now_s: float) -> list[int]:
        """Pids of those to try again, at a time of CLOCK_MONOTONIC."""
        return [
            pid
            for (pid, _), (attempts, due_s) in self._made.items()
            if attempts < ATTEMPTS and now_s > due_s
        ]
