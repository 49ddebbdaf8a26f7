# SPDX-License-Identifier: Apache-2.0
"""The expected error of a release per tenant, before any release is made or paid for.

It depends on the tenants' sizes, which are public to the aggregators: a forecast costs no privacy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sonde.errors import UsageError
from sonde.fleet.budget import entry_for, epsilon
from sonde.fleet.evaluation.accuracy import DELTA, DRAWS, errors, noised, rank_in_tenant
from sonde.fleet.evaluation.population import Population
from sonde.fleet.noise import Mechanism, format_rounded_up, plan
from sonde.fleet.task import Task
from sonde.fleet.tenant_cap import choose_cap

CONCENTRATIONS = (0.0, 0.3, 0.7)
"""Shares of a tenant's nodes on one application that a forecast is made for."""
TARGET_ERROR = 0.10  # a relative error above it is marked


@dataclass(frozen=True)
class Forecast:
    """A forecast: synthetic load on tenants of the given sizes, with the real noise.

    largest   the largest tenant's share of the nodes
    cap       nodes of a tenant that count; `classes`: buckets; `hours`: length of the release
    epsilon   of a release, per tenant; None: unbounded
    errors    median relative error of the largest classes against the true shares of all nodes, per
              concentration (share of a tenant's nodes on one application); bias of the cap included
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
        """The forecast as text."""
        by_concentration = ", ".join(
            f"{_rough(error)} if {concentration:.0%} is one application"
            if concentration
            else f"{_rough(error)} if a tenant's work is mixed"
            for concentration, error in self.errors.items()
        )
        good = [
            concentration for concentration, error in self.errors.items() if error <= TARGET_ERROR
        ]
        if len(good) == len(self.errors):
            verdict = f"within {TARGET_ERROR:.0%}"
        elif good:
            when = f"up to {max(good):.0%} on one application" if max(good) else "if it is mixed"
            verdict = f"within {TARGET_ERROR:.0%} only {when}"
        else:
            verdict = f"NOT within {TARGET_ERROR:.0%}"
        privacy_guarantee = (
            "no ε" if self.epsilon is None else f"ε = {format_rounded_up(self.epsilon)}"
        )
        return (
            f"per tenant, {privacy_guarantee} for a release of {self.hours:g} h: "
            f"{self.nodes:,} nodes of {self.tenants:,} tenants (the largest has "
            f"{self.largest:.0%}), at most {self.cap} of each; {self.classes:,} classes\n"
            f"  expected error of a class: {by_concentration}: {verdict}"
        )


def _rough(error: float) -> str:
    """A relative error as text."""
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
    """The forecast of one release to which each node contributes a sample per period: over `fleets`
    random fleets, of the `count` largest classes. Its epsilon is the mechanism's pure one. Raises
    UsageError.
    """
    if not sizes or min(sizes) < 1:
        raise UsageError("a forecast needs tenants with nodes")
    tenant = np.repeat(np.arange(len(sizes)), sizes)
    hours = [number * period_s / 3600 % 24 for number in range(periods)]
    errors_by_concentration: dict[float, float] = {}
    for concentration in CONCENTRATIONS:
        totals = []
        for _ in range(fleets):
            fleet = Population.of_tenants(tenant, len(sizes), classes, rng, concentration)
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
        errors_by_concentration[concentration] = float(np.mean(totals))
    nodes, hours_long = sum(sizes), periods * period_s / 3600
    pure_epsilon = mechanism.cost(periods * cap).epsilon
    return Forecast(
        nodes,
        len(sizes),
        max(sizes) / nodes,
        cap,
        classes,
        hours_long,
        pure_epsilon,
        errors_by_concentration,
    )


def forecast_of(task: Task, sizes: Sequence[int], rng: np.random.Generator) -> Forecast:
    """The forecast of a task's release, with the task's epsilon per tenant. Raises UsageError."""
    periods = task.release_s // task.period_s
    cap = task.privacy.tenant_cap or max([1, *sizes])
    made = forecast(sizes, task.buckets, periods, task.period_s, task.mechanism, cap, rng)
    return replace(made, epsilon=epsilon([entry_for(task, 0)], "tenant", task.privacy.delta))


def forecast_of_a_day(
    sizes: Sequence[int], release_epsilon: float, rng: np.random.Generator
) -> Forecast:
    """The forecast of one day of hourly samples in 64 classes at `release_epsilon`, with the best
    cap.
    """
    cap = choose_cap(sizes, 64, 24, release_epsilon, DELTA)
    return forecast(sizes, 64, 24, 3600, plan(24 * cap, release_epsilon, DELTA), cap, rng)
