# SPDX-License-Identifier: Apache-2.0
"""The outcome of an attack, and its statistical confidence.

Each outcome is a one-sided test: a guarantee counts as broken only if the observation has a
probability below `1 - confidence` while the guarantee holds. Such a test passes silently what it
cannot detect, so each kind of test also runs against a deliberately broken mechanism: a control.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.999
"""Of each test: where an attack just reaches its limit, the guarantee counts as held."""


@dataclass(frozen=True)
class AttackResult:
    """One attack: what it achieved, what the guarantee allows, and whether the guarantee held.

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
    """Two lines an attack: what it reached and what the guarantee allows; then its note."""
    lines = [f"{'attack':<42} {'reached':<24} {'limit':<22} verdict"]
    for attack in attacks:
        lines.append(f"{attack.name:<42} {attack.reached:<24} {attack.limit:<22} {attack.verdict}")
        lines.append(f"    {attack.note}")
    return "\n".join(lines)
