# SPDX-License-Identifier: Apache-2.0
"""In place of the kernel's stream of process events, for a user who may not have it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sonde._native import ProcessEvent

LOOK_MS = 50
"""How often to look for new processes instead."""


class NoEvents:
    """As `_native.ProcessEvents`, but nothing ever comes."""

    lost = 0

    def wait(self, timeout_ms: int, also: Sequence[int] = (), kept_ms: int = 0) -> bool:
        """Sleep a little; then somebody may have come."""
        time.sleep(min(timeout_ms, LOOK_MS) / 1000)
        return True

    def drain(self) -> list[ProcessEvent]:
        """Nothing."""
        return []

    def pass_over(self, file: tuple[int, int, int], path: str, seconds: float) -> None:
        """There is nothing to pass over."""

    def follow(self, pids: Sequence[int]) -> None:
        """There is nothing to tell of."""
