# SPDX-License-Identifier: Apache-2.0
"""When walks are expected to request pages (parts) of unwind tables."""

from __future__ import annotations

from typing import Final

PAGING_S: Final = 0.3
"""How long after a walk's request for a page more requests are expected."""
MAX_PAGING_S: Final = 3.0
"""With continuous requests, they are expected for this long at a time."""


class Paging:
    """Pages come in bursts: where one was requested, the next ones follow. Times: s, one clock."""

    def __init__(self) -> None:
        self._until_s = 0.0
        self._since_s = 0.0
        """When the burst began."""

    def expect(self, now_s: float) -> None:
        """Sampling starts, or a page was requested."""
        if now_s > self._until_s + MAX_PAGING_S:
            self._since_s = now_s
        self._until_s = min(now_s + PAGING_S, self._since_s + MAX_PAGING_S)

    def is_expected(self, now_s: float) -> bool:
        """Whether more requests are expected."""
        return now_s < self._until_s
