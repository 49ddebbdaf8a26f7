# SPDX-License-Identifier: Apache-2.0
"""A sink that keeps the last chunks in memory: what a recording of the last minute would hold."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Final

SPAN_S: Final = 60.0
MOST_BYTES: Final = 32 << 20


class Recent:
    """The newest chunks: of the last `SPAN_S`, as many as `MOST_BYTES` hold."""

    def __init__(self) -> None:
        self.written_bytes = 0
        self._kept: deque[tuple[float, bytes]] = deque()
        self._bytes = 0

    def write(self, chunk: bytes) -> None:
        """Take a chunk, and let go of the oldest."""
        now_s = time.monotonic()
        self._kept.append((now_s, chunk))
        self._bytes += len(chunk)
        self.written_bytes += len(chunk)
        while self._bytes > MOST_BYTES or now_s - self._kept[0][0] > SPAN_S:
            self._bytes -= len(self._kept.popleft()[1])

    def chunks(self) -> list[bytes]:
        """Oldest first."""
        return [chunk for _, chunk in self._kept]

    @property
    def span_s(self) -> float:
        """How far back it reaches."""
        return time.monotonic() - self._kept[0][0] if self._kept else 0.0

    def losses(self) -> Mapping[str, int]:
        """None: what is let go of is meant to be."""
        return {}

    def metrics(self) -> Mapping[str, float]:
        """None."""
        return {}

    def close(self) -> None:
        """Nothing comes any more."""
