# SPDX-License-Identifier: Apache-2.0
"""How many nodes of a tenant should count when a whole tenant is the unit of privacy.

Few make the noise small, for it grows with the cap; many make the bias small, for tenants above the
cap weigh less than they are. The choice looks at what is public anyway, the tenants' sizes and the
promise, and at nothing that a node ever reports: it costs no privacy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from sonde.errors import UsageError
from sonde.fleet.noise import plan

CAPS = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)
LOYALTY = 0.3


def expected_error(
    sizes: Iterable[int],
    cap: int,
    classes: int,
    periods: int,
    epsilon: float,
    delta: float,
    releases: int = 1,
    loyalty: float = LOYALTY,
) -> tuple[float, float]:
    """(noise, bias), both relative, that a middling class's share is to be expected with.

    A class is taken to have half of its even part, `1 / 2·classes`, and to belong to an application
    with `1 / √classes` of the fleet. Noise: the deviation of both aggregators' noise. Bias: a
    tenant has `loyalty` of its nodes on one application, so the shares that the cap takes from
    large tenants and gives to the others are off by as much; and the nodes that count stand for
    all, with the error of so large a sample.
    """
    whole = np.array(list(sizes), dtype=np.float64)
    kept = np.minimum(whole, cap)
    if not kept.sum():
        raise UsageError("a cap needs tenants with nodes")
    mechanism = plan(periods * cap, epsilon, delta, releases)
    noise = mechanism.deviation() / (periods * kept.sum()) * 2 * classes
    moved = kept / kept.sum() - whole / whole.sum()
    spread = loyalty**2 * float((moved**2).sum()) + 1 / kept.sum() - 1 / whole.sum()
    return noise, math.sqrt(spread * (math.sqrt(classes) - 1))


def choose_cap(
    sizes: Iterable[int],
    classes: int,
    periods: int,
    epsilon: float,
    delta: float,
    releases: int = 1,
) -> int:
    """The cap of the least expected error, of a few round ones."""
    whole = list(sizes)

    def error(cap: int) -> float:
        return math.hypot(*expected_error(whole, cap, classes, periods, epsilon, delta, releases))

    return min((cap for cap in CAPS if cap <= max([1, *whole])), key=error)
