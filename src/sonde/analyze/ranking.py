# SPDX-License-Identifier: Apache-2.0
"""Which bounds are told of, from what is known of the parts of the time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from sonde.model.verdict import Bound

STALLED = 0.15
"""A device that computed for all but this share of its time is bound by its kernels."""
MIX = 0.6
"""A second bound with this share of the first one's makes it a mix."""
UNDERFILLED_BOUND = 0.5
"""Share of the kernels' time that is one small kernel's alone, from which on that is the bound."""
LEAST_SHARE = 0.05
"""Causes below this share of the time are not told of."""


def mixed(ranked: Sequence[Bound]) -> list[Bound]:
    """The first, and those of a mix with it; three at most."""
    return [one for one in ranked if one.share >= MIX * ranked[0].share][:3]


def ranked_bounds(parts: Iterable[tuple[str, float]]) -> list[Bound]:
    """The largest bound, and those of a mix with it, from parts of the time by their bounds."""
    shares: dict[str, float] = defaultdict(float)
    for key, share in parts:
        shares[key] += share
    return mixed(sorted((Bound(*one) for one in shares.items()), key=lambda one: -one.share))
