# SPDX-License-Identifier: Apache-2.0
"""How many stacks of waits are taken, so that naming new ones stays within a budget.

A constant load soon has no new stacks. Where programs come and go (a compiler farm) nearly every
one is new, and naming one costs more than taking it: there the kernel is asked to take one in
`divisor` of those that are due, each of which then counts `divisor` times. Sums stay unbiased.
"""

from __future__ import annotations

from typing import Final

NAMED_PER_S: Final = 100.0
"""New stacks of waits a second that are named in the long run: under 1 % of a core."""
BURST: Final = 6_000.0
"""As many at once, at the start and after quiet times."""
MOST: Final = 64


class StackRateLimiter:
    """Tokens that new stacks use up."""

    def __init__(self) -> None:
        self._tokens = BURST
        self.divisor = 1
        """One in this many of the stacks that are due is taken."""

    def after(self, named: int, seconds: float) -> bool:
        """`named` stacks were named in `seconds`. True where `divisor` changed."""
        before = self.divisor
        earned = NAMED_PER_S * seconds
        self._tokens = min(BURST, self._tokens + earned - named)
        if self._tokens < 0:
            self._tokens = 0.0
            self.divisor = min(MOST, -(-before * named // max(1, int(earned))))
        elif before > 1 and 2 * named < earned:
            self.divisor = max(1, before // 2)
        return self.divisor != before
