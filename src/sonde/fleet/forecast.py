# SPDX-License-Identifier: Apache-2.0
"""What a release per tenant is worth, told before any is made or paid for.

Tenants' sizes decide it, and they are public to the aggregators: a forecast costs no privacy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sonde.errors import UsageError
from sonde.fleet.accuracy import DELTA, DRAWS, errors, noised, rank_in_tenant
from sonde.fleet.budget import entry_for, epsilon
from sonde.fleet.noise import Mechanism, plan, stated
from sonde.fleet.population import Population
from sonde.fleet.task import Task
from sonde.fleet.tenants import choose_cap

LOYALTIES = (0.0, 0.3, 0.7)
WORTH = 0.10  # a relative error above it is told as such


@dataclass(frozen=True)
class Forecast:
    """Made-up work on tenants of the sizes given, with the real noise.

    errors    relative error of the median of the largest classes against the true shares of all
              nodes, by how much of a tenant's work is one application; bias of the cap included
    """

    nodes: int
    tenants: int
    largest: float
    cap: int
    classes: int
    hours: float
    epsilon: float | None
    errors: dict[float, float]

    def summary(self) -> str:
        """For people."""
        told = ", ".join(
            f"{_rough(error)} if {loyalty:.0%} is one application"
            if loyalty
            else f"{_rough(error)} if a tenant's work is mixed"
            for loyalty, error in self.errors.items()
        )
        good = [loyalty for loyalty, error in self.errors.items() if error <= WORTH]
        if len(good) == len(self.errors):
            verdict = f"within {WORTH:.0%}"
        elif good:
            most = f"up to {max(good):.0%} on one application" if max(good) else "if it is mixed"
            verdict = f"within {WORTH:.0%} only {most}"
        else:
            verdict = f"NOT within {WORTH:.0%}"
        promise = "no ε" if self.epsilon is None else f"ε = {stated(self.epsilon)}"
        return (
            f"per tenant, {promise} for a release of {self.hours:g} h: "
            f"{self.nodes:,} nodes of {self.tenants:,} tenants (the largest has "
            f"{self.largest:.0%}), at most {self.cap} of each; {self.classes:,} classes\n"
            f"  expected error of a class: {told}: {verdict}"
        )


def _rough(error: float) -> str:
    return f"{error:.1%}" if error < 1 else "over 100%"


def forecast(
    sizes: Sequence[int],
    classes: int,
    periods: int,
    period_s: int,
    mechanism: Mechanism,
    cap: int,
    rng: np.random.Generator,
    fleets: int = 3,
    count: int = 64,
) -> Forecast:
    """The forecast of one release to which each node adds a sample a period."""
    if not sizes or min(sizes) < 1:
        raise UsageError("a forecast needs tenants with nodes")
    tenant = np.repeat(np.arange(len(sizes)), sizes)
    hours = [number * period_s / 3600 % 24 for number in range(periods)]
    found: dict[float, float] = {}
    for loyalty in LOYALTIES:
        totals = []
        for _ in range(fleets):
            fleet = Population.of_tenants(tenant, len(sizes), classes, rng, loyalty)
            kept = np.flatnonzero(rank_in_tenant(fleet, rng) < cap)
            counted = replace(fleet, tenant=fleet.tenant[kept], application=fleet.application[kept])
            exact = np.zeros(classes, dtype=np.int64)
            for hour in hours:
                exact += np.bincount(counted.sample(hour, rng), minlength=classes)
            truth = fleet.truth(hours)
            scale = truth.sum() / exact.sum()
            largest = 1 + np.argsort(truth[1:])[::-1][:count]  # 0 is idle
            largest = largest[truth[largest] > 0]
            for _ in range(DRAWS // fleets):
                released = noised(exact[largest], mechanism) * scale
                line = errors("", released, exact[largest] * scale, truth[largest], count)
                totals.append(line.total_median)
        found[loyalty] = float(np.mean(totals))
    whole, hours_long = sum(sizes), periods * period_s / 3600
    stated = mechanism.cost(periods * cap).epsilon
    return Forecast(whole, len(sizes), max(sizes) / whole, cap, classes, hours_long, stated, found)


def forecast_of(task: Task, sizes: Sequence[int], rng: np.random.Generator) -> Forecast:
    """The forecast of a task's release."""
    periods = task.release_s // task.period_s
    cap = task.privacy.tenant_cap or max(sizes)
    made = forecast(sizes, task.buckets, periods, task.period_s, task.mechanism, cap, rng)
    return replace(made, epsilon=epsilon([entry_for(task, 0)], "tenant", task.privacy.delta))


def forecast_of_a_day(sizes: Sequence[int], promise: float, rng: np.random.Generator) -> Forecast:
    """The forecast of one day of hourly samples in 64 classes at epsilon = `promise`, with the cap
    that suits it best.
    """
    cap = choose_cap(sizes, 64, 24, promise, DELTA)
    return forecast(sizes, 64, 24, 3600, plan(24 * cap, promise, DELTA), cap, rng)
