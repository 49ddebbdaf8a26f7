# SPDX-License-Identifier: Apache-2.0
"""The outcome of an attack, and its statistical confidence.

Each outcome is a one-sided test: a guarantee counts as broken only if the observation has a
probability below `1 - confidence` while the guarantee holds. Such a test passes silently what it
cannot detect, so each kind of test also runs against a deliberately broken mechanism: a control.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sonde.fleet.evaluation.population import Floats

CONFIDENCE = 0.999  # of each test: an attack that just reaches its limit counts as held


@dataclass(frozen=True)
class AttackResult:
    """One attack: what it achieved, its limit, and whether the guarantee held.

    held      None: nothing is guaranteed
    control   the target was deliberately broken, and the test must detect it
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
        return {True: "held", False: "BROKEN", None: "not guaranteed"}[self.held]


def unexpected_results(attacks: Sequence[AttackResult]) -> list[AttackResult]:
    """Guarantees that did not hold, and controls that were not detected."""
    return [attack for attack in attacks if attack.verdict in ("BROKEN", "MISSED")]


def to_table(attacks: Sequence[AttackResult]) -> str:
    lines = [f"{'attack':<42} {'reached':<24} {'limit':<22} verdict"]
    for attack in attacks:
        lines.append(f"{attack.name:<42} {attack.reached:<24} {attack.limit:<22} {attack.verdict}")
        lines.append(f"    {attack.note}")
    return "\n".join(lines)


def clopper_pearson(hits: int, trials: int, confidence: float) -> tuple[float, float]:
    """One-sided (lower, upper) bounds of a probability, each with this confidence (Clopper and
    Pearson 1934).
    """
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
