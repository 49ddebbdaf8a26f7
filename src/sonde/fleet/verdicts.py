# SPDX-License-Identifier: Apache-2.0
"""What an attack reached, and how sure one can be of it.

Verdicts are one-sided tests: a promise counts as broken only where what was seen would be seen, if
the promise held, less often than `1 - confidence`. What such a test cannot see it would pass in
silence, so each kind of test is also run against a mechanism that is broken on purpose: a control.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sonde.fleet.population import Floats

CONFIDENCE = 0.999  # of every verdict: an attack that reaches its limit exactly passes as held


@dataclass(frozen=True)
class Attack:
    """One attack: what it reached, what it may reach, and whether the promise held.

    held      None: nothing is promised
    control   the attack was on something that is broken, and must not find it held
    """

    name: str
    reached: str
    limit: str
    held: bool | None
    note: str
    control: bool = False

    @property
    def verdict(self) -> str:
        if self.control:
            return "MISSED" if self.held else "caught"
        return {True: "held", False: "BROKEN", None: "not promised"}[self.held]


def wrong(attacks: Sequence[Attack]) -> list[Attack]:
    """Promises that did not hold, and controls that were not caught."""
    return [attack for attack in attacks if attack.verdict in ("BROKEN", "MISSED")]


def to_table(attacks: Sequence[Attack]) -> str:
    lines = [f"{'attack':<42} {'reached':<24} {'limit':<22} verdict"]
    for attack in attacks:
        lines.append(f"{attack.name:<42} {attack.reached:<24} {attack.limit:<22} {attack.verdict}")
        lines.append(f"    {attack.note}")
    return "\n".join(lines)


def clopper_pearson(hits: int, trials: int, confidence: float) -> tuple[float, float]:
    """One-sided bounds, lower and upper, of a probability: each holds with that confidence."""
    counts = np.arange(trials + 1, dtype=np.float64)
    log_ways = math.lgamma(trials + 1) - _cumulative(trials) - _cumulative(trials)[::-1]

    def tail(p: float, upper: bool) -> float:
        if p <= 0 or p >= 1:
            return float((p >= 1) == upper)
        logs = log_ways + counts * math.log(p) + (trials - counts) * math.log1p(-p)
        part = logs[hits:] if upper else logs[: hits + 1]
        return float(np.exp(part).sum())

    def solve(upper_tail: bool) -> float:
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            # P(X >= hits) grows with p, P(X <= hits) falls
            rises = tail(middle, upper_tail) < 1 - confidence
            low, high = (middle, high) if rises == upper_tail else (low, middle)
        return (low + high) / 2

    return (0.0 if hits == 0 else solve(True)), (1.0 if hits == trials else solve(False))


def _cumulative(n: int) -> Floats:
    logs = np.log(np.arange(1, n + 1, dtype=np.float64))
    return np.concatenate(([0.0], np.cumsum(logs)))
