# SPDX-License-Identifier: Apache-2.0
"""A share with its interval."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_Z = 1.96


@dataclass(frozen=True, slots=True)
class Share:
    """How many stacks are as they should be (reach the entry, or are right), of all."""

    hits: int = 0
    total: int = 0

    @property
    def value(self) -> float:
        """From 0 to 1; 0 of none."""
        return self.hits / self.total if self.total else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's score interval, 95 %."""
        if not self.total:
            return 0.0, 1.0
        square = _Z * _Z / self.total
        middle = self.value + square / 2
        reach = _Z * math.sqrt(self.value * (1 - self.value) / self.total + square / self.total / 4)
        low, high = (middle - reach) / (1 + square), (middle + reach) / (1 + square)
        return max(0.0, low), min(1.0, high)

    def __add__(self, other: Share) -> Share:
        return Share(self.hits + other.hits, self.total + other.total)

    def __str__(self) -> str:
        if not self.total:
            return "–"
        low, high = self.interval
        return f"{100 * self.value:.2f} % ({100 * low:.2f}–{100 * high:.2f}) of {self.total:,}"


def pooled(shares: Iterable[Share]) -> Share:
    """All stacks taken together."""
    return sum(shares, Share())
