# SPDX-License-Identifier: Apache-2.0
"""In place of the kernel's stream of process events, for a user who may not have it."""

from __future__ import annotations

import time
from typing import Any


class NoEvents:
    """As `_native.ProcessEvents`, but nothing ever comes."""

    lost = 0

    def wait(self, timeout_ms: int) -> bool:
        """Sleep as long as one would have waited."""
        time.sleep(timeout_ms / 1000)
        return False

    def drain(self) -> list[tuple[Any, ...]]:
        """Nothing."""
        return []
