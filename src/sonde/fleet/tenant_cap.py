# SPDX-License-Identifier: Apache-2.0
"""Chooses the tenant cap: how many nodes of a tenant count if a whole tenant is the unit of
privacy.

A low cap makes the noise small, because noise grows with the cap. A high cap makes the bias small,
because tenants above the cap are underweighted. The choice uses only public data (the tenants'
sizes and the privacy parameters) and no report: it costs no privacy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from sonde.errors import UsageError
from sonde.fleet.noise import plan

CAPS = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)
"""The caps that are compared."""
CONCENTRATION = 0.3
"""The assumed share of a tenant's nodes that run its main application."""


def expected_error(
    sizes: Iterable[int],
    cap: int,
    classes: int,
    periods: int,
    epsilon: float,
    delta: float,
    releases: int = 1,
    concentration: float = CONCENTRATION,
) -> tuple[float, float]:
    """The expected relative error of a typical class's share of all samples: (noise, bias).

    `sizes`: nodes of each tenant; `periods`: samples of a node in a release; `releases`: of those
    that together stay within (epsilon, delta). A class is assumed to have half of an even share, `1
    / 2·classes`, and to belong to an application with `1 / √classes` of the fleet. Noise: the
    deviation of both aggregators' noise. Bias: a tenant runs its main application on a share
    `concentration` of its nodes, so the cap distorts shares by the weight that it moves from large
    tenants to others; and the counted nodes represent all, with the sampling error of their number.
    Raises UsageError.
    """
    nodes = np.array(list(sizes), dtype=np.float64)
    counted = np.minimum(nodes, cap)
    if not counted.sum():
        raise UsageError("a cap needs tenants with nodes")
    mechanism = plan(periods * cap, epsilon, delta, releases)
    noise = mechanism.deviation() / (periods * counted.sum()) * 2 * classes
    moved_share = counted / counted.sum() - nodes / nodes.sum()
    variance = (
        concentration**2 * float((moved_share**2).sum()) + 1 / counted.sum() - 1 / nodes.sum()
    )
    return noise, math.sqrt(variance * (math.sqrt(classes) - 1))


def choose_cap(
    sizes: Iterable[int],
    classes: int,
    periods: int,
    epsilon: float,
    delta: float,
    releases: int = 1,
) -> int:
    """The cap with the least expected error, out of `CAPS`; parameters as `expected_error` has
    them. Raises UsageError.
    """
    nodes = list(sizes)

    def error(cap: int) -> float:
        return math.hypot(*expected_error(nodes, cap, classes, periods, epsilon, delta, releases))

    return min((cap for cap in CAPS if cap <= max([1, *nodes])), key=error)
