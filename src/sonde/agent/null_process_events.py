# SPDX-License-Identifier: Apache-2.0
"""In place of the kernel's stream of process events, for a user who may not read it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sonde._native import ProcessEvent

SCAN_MS = 50
"""How often the listeners are woken, so that they scan for new processes instead."""


class NullProcessEvents:
    """As `_native.ProcessEvents`, but nothing ever comes."""

    lost = 0
    left_out = 0

    def wait(self, timeout_ms: int, also: Sequence[int] = (), kept_ms: int = 0) -> bool:
        """Sleep for `SCAN_MS` at most; True, as a process may have started meanwhile."""
        time.sleep(min(timeout_ms, SCAN_MS) / 1000)
        return True

    def drain(self) -> list[ProcessEvent]:
        """Nothing."""
        return []

    def ignore_mappings(self, file: tuple[int, int, int], path: str, seconds: float) -> None:
        """Nothing: there is no mapping to ignore."""

    def follow(self, pids: Sequence[int]) -> None:
        """Nothing: there is no event to report."""

    def charge(self, cpu_s: float) -> None:
        """Nothing: nobody has a share."""

    def unseen(self, most: int) -> list[int]:
        """Nothing: no event was left out."""
        return []

    def take_left_out(self) -> list[tuple[int, int, int]]:
        """Nothing."""
        return []
