# SPDX-License-Identifier: Apache-2.0
"""How many stacks of waits are taken, so that naming those never seen before stays cheap.

A steady load soon has no new stacks. Where programs come and go (a compiler farm) nearly every one
is new, and naming one costs more than taking it: there the kernel is asked to take one in so many
of those that are due, each of which then counts for so many more. Sums stay unbiased.
"""

from __future__ import annotations

from typing import Final

NAMED_PER_S: Final = 100.0
"""New stacks of waits a second that are named in the long run: under 1 % of a core."""
BURST: Final = 6_000.0
"""As many at once, at the start and after quiet times."""
MOST: Final = 64


class Thinning:
    """Tokens that new stacks use up."""

    def __init__(self) -> None:
        self._tokens = BURST
        self.odds = 1
        """One stack in so many is taken of those that are due."""

    def after(self, named: int, seconds: float) -> bool:
        """Take in that so many were named in so long. True where `odds` changed."""
        before = self.odds
        earned = NAMED_PER_S * seconds
        self._tokens = min(BURST, self._tokens + earned - named)
        if self._tokens < 0:
            self._tokens = 0.0
            self.odds = min(MOST, -(-before * named // max(1, int(earned))))
        elif before > 1 and 2 * named < earned:
            self.odds = max(1, before // 2)
        return self.odds != before
