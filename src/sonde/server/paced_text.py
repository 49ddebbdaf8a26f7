# SPDX-License-Identifier: Apache-2.0
"""A text that anybody may ask for: to make it takes a bounded part of the server's time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

PART: Final = 10
"""The text is made for one in this many parts of the time."""


class PacedText:
    """The text as it was made last; made again once that is PART times as long ago as it took."""

    def __init__(self, make: Callable[[], Awaitable[str]]) -> None:
        self._make = make
        self._text = ""
        self._until_s = 0.0
        self._lock = asyncio.Lock()

    async def text(self) -> str:
        """The text. Raises what making it raises."""
        async with self._lock:
            began_s = time.monotonic()
            if began_s >= self._until_s:
                self._text = await self._make()
                ended_s = time.monotonic()
                self._until_s = ended_s + (PART - 1) * (ended_s - began_s)
        return self._text
