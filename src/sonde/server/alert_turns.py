# SPDX-License-Identifier: Apache-2.0
"""In which order rules of alerts are evaluated, and for how long those of one tenant.

One thread evaluates the rules of all tenants. How long a rule takes, its tenant's rows decide.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

Key = tuple[str, str]
"""(tenant, name) of a rule."""
LEAST_S = 5.0
"""What a tenant may have saved up, at least: rules take some time on a busy machine."""


class RuleTurns:
    """Rules of the tenants in turn, one of each, then a second one of each, ….

    Of the time that passes, each tenant has the same part, of which it saves up that of one
    interval at most. Where it has used up its part, its other rules wait for a later round, in
    which they come first. A tenant that has the server for itself has all of the time.
    """

    def __init__(
        self,
        rules: Iterable[Key],
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`interval_s`: from round to round."""
        self._rules: dict[str, deque[Key]] = {}
        for key in rules:
            self._rules.setdefault(key[0], deque()).append(key)
        self._clock = clock
        self._most_s = max(LEAST_S, interval_s / max(1, len(self._rules)))
        self._left_s = dict.fromkeys(self._rules, self._most_s)
        self._since_s = clock()
        self.put_off = 0
        """Rules that had to wait for a later round."""

    def round(self) -> Iterator[Key]:
        """The rules to be evaluated now; the time until the next one is asked for is that of the
        rule before."""
        now = self._clock()
        share_s = (now - self._since_s) / max(1, len(self._rules))
        self._since_s = now
        for tenant, left_s in self._left_s.items():
            self._left_s[tenant] = min(self._most_s, left_s + share_s)
        due = {tenant: len(rules) for tenant, rules in self._rules.items()}
        while due:
            for tenant in sorted(due, key=lambda one: -self._left_s[one]):
                if len(self._rules) > 1 and self._left_s[tenant] <= 0:
                    self.put_off += due.pop(tenant)
                    continue
                key = self._rules[tenant][0]
                self._rules[tenant].rotate(-1)
                begun_s = self._clock()
                yield key
                self._left_s[tenant] -= self._clock() - begun_s
                due[tenant] -= 1
                if not due[tenant]:
                    del due[tenant]
