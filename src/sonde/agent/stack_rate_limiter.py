# SPDX-License-Identifier: Apache-2.0
"""How many stacks of waits are taken, so that naming new ones stays within a budget of CPU time.

A constant load soon has no new stacks. Where programs come and go (a compiler farm) nearly every
stack is new, and naming one costs more than taking it. Then the kernel takes only one in `divisor`
of the stacks that it would take, and each counts `divisor` times. Sums stay unbiased.
"""

from __future__ import annotations

from typing import Final

NAMED_PER_S: Final = 100.0
"""New stacks of waits a second that are named in the long run: under 1 % of a core."""
BURST: Final = 6_000.0
"""New stacks that are named at once, at the start and after times without (the size of the token
bucket)."""
MAX_DIVISOR: Final = 64


class StackRateLimiter:
    """A token bucket: new stacks use up tokens, and where there are none the divisor grows."""

    def __init__(self) -> None:
        self._tokens = BURST
        self.divisor = 1
        """The kernel is to take one stack in this many."""

    def after(self, named: int, seconds: float) -> bool:
        """Note that `named` new stacks were named in `seconds`. True where `divisor` changed."""
        before = self.divisor
        earned = NAMED_PER_S * seconds
        self._tokens = min(BURST, self._tokens + earned - named)
        if self._tokens < 0:
            self._tokens = 0.0
            self.divisor = min(MAX_DIVISOR, -(-before * named // max(1, int(earned))))
        elif before > 1 and 2 * named < earned:
            self.divisor = max(1, before // 2)
        return self.divisor != before
