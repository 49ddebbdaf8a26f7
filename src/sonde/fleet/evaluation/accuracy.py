# SPDX-License-Identifier: Apache-2.0
"""The error of a release by epsilon, beside local differential privacy and no privacy.

Sums are drawn from the synthetic fleet and noised by the real mechanisms; the cryptography in
between is exact and left out. Two errors are distinguished:

noise   released against the exact sums: the cost of privacy
total   released against the true shares of time: noise and sampling together
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sonde.fleet.evaluation.population import Floats, Ints, Population
from sonde.fleet.noise import Mechanism, plan
from sonde.fleet.tenant_cap import CAPS, choose_cap

DELTA = 1e-6
DRAWS = 12
"""Of noise, over which errors are averaged."""


@dataclass(frozen=True)
class ErrorSummary:
    """Relative errors of the largest buckets: median and 90th percentile; means over draws of noise
    if there are several.
    """

    name: str
    noise_median: float
    noise_p90: float
    total_median: float
    total_p90: float


def errors(name: str, released: Floats, exact: Floats, truth: Floats, count: int) -> ErrorSummary:
    """Errors over the buckets that are the `count` largest by `truth`; all vectors have counts."""
    top = np.argsort(truth)[::-1][:count]
    noise = np.abs(released[top] - exact[top]) / np.maximum(exact[top], 1)
    total = np.abs(released[top] - truth[top]) / truth[top]
    return ErrorSummary(
        name,
        float(np.median(noise)),
        float(np.quantile(noise, 0.9)),
        float(np.median(total)),
        float(np.quantile(total, 0.9)),
    )


def mean_over_draws(
    name: str, exact: Ints, mechanism: Mechanism, truth: Floats, count: int, draws: int = DRAWS
) -> ErrorSummary:
    """The expected errors of a release: the median of a single draw varies by a fifth."""
    found = [
        errors(name, noised(exact, mechanism), floats(exact), truth, count) for _ in range(draws)
    ]
    return ErrorSummary(
        name,
        float(np.mean([one.noise_median for one in found])),
        float(np.mean([one.noise_p90 for one in found])),
        float(np.mean([one.total_median for one in found])),
        float(np.mean([one.total_p90 for one in found])),
    )


def exact_sums(population: Population, hours: int, rng: np.random.Generator) -> Ints:
    """Exact counts if each node sends one sample per hour."""
    total = np.zeros(population.buckets, dtype=np.int64)
    for hour in range(hours):
        sampled = population.sample(hour % 24, rng)
        total += np.bincount(sampled, minlength=population.buckets)
    return total


def floats(counts: Ints) -> Floats:
    return counts.astype(np.float64)


def noised(exact: Ints, mechanism: Mechanism) -> Floats:
    """Counts with the noise of both aggregators."""
    noise = np.array(mechanism.sample(len(exact))) + np.array(mechanism.sample(len(exact)))
    return np.asarray(exact + noise, dtype=np.float64)


def local_dp_estimate(exact: Ints, hours: int, epsilon: float, rng: np.random.Generator) -> Floats:
    """The estimate under local differential privacy: each node reports one of its samples by
    optimised unary encoding (Wang et al., USENIX Security 2017) and spends its whole epsilon on it.
    """
    nodes = int(exact.sum()) // hours
    reporting = rng.multinomial(nodes, exact / exact.sum())
    q = 1 / (math.exp(epsilon) + 1)  # probability of reporting a bucket wrongly; rightly: 1/2
    received = rng.binomial(reporting, 0.5) + rng.binomial(nodes - reporting, q)
    return np.asarray((received - nodes * q) / (0.5 - q) * hours)


def by_epsilon(
    population: Population,
    hours: int,
    epsilons: list[float],
    rng: np.random.Generator,
    count: int = 50,
) -> list[ErrorSummary]:
    """One release of this many hours at each epsilon, under central and local differential privacy;
    then without privacy.
    """
    exact = exact_sums(population, hours, rng)
    truth = population.truth([hour % 24 for hour in range(hours)])
    lines = []
    for epsilon in epsilons:
        mechanism = plan(hours, epsilon, DELTA)
        lines.append(mean_over_draws(f"ε = {epsilon:g}", exact, mechanism, truth, count))
        reporting = local_dp_estimate(exact, hours, epsilon, rng)
        lines.append(errors(f"ε = {epsilon:g}, local DP", reporting, floats(exact), truth, count))
    lines.append(errors("no privacy", floats(exact), floats(exact), truth, count))
    return lines


def yearly(
    population: Population, hours: int, releases: int, epsilon: float, rng: np.random.Generator
) -> ErrorSummary:
    """One of `releases` equal releases per year that together cost epsilon per GPU."""
    exact = exact_sums(population, hours, rng)
    truth = population.truth([hour % 24 for hour in range(hours)])
    mechanism = plan(hours, epsilon, DELTA, releases)
    name = f"{releases} releases a year at ε = {epsilon:g}"
    return mean_over_draws(name, exact, mechanism, truth, 50)


def per_tenant(
    population: Population,
    hours: int,
    epsilon: float,
    caps: Sequence[int],
    rng: np.random.Generator,
) -> list[ErrorSummary]:
    """Errors of the classes' shares if a whole tenant is the unit of privacy; one line per cap.

    At most `cap` randomly chosen nodes of a tenant count. Large tenants are therefore
    underweighted; that bias is in the total error, which compares with the true shares of all
    nodes.
    """
    rank = rank_in_tenant(population, rng)
    kept = [np.flatnonzero(rank < cap) for cap in caps]
    exact = np.zeros((len(caps), population.buckets), dtype=np.int64)
    for hour in range(hours):
        sampled = population.sample(hour % 24, rng)
        for row, nodes in zip(exact, kept, strict=True):
            row += np.bincount(sampled[nodes], minlength=population.buckets)
    truth = population.truth([hour % 24 for hour in range(hours)])
    busy = slice(1, None)  # bucket 0 is idle
    lines = []
    for cap, counts in zip(caps, exact, strict=True):
        released = noised(counts, plan(hours * cap, epsilon, DELTA))
        scale = truth.sum() / counts.sum()  # shares are released; the fleet's size is no secret
        lines.append(
            errors(
                f"per tenant, ε = {epsilon:g}, cap {cap}",
                released[busy] * scale,
                counts[busy] * scale,
                truth[busy],
                population.buckets,
            )
        )
    return lines


@dataclass(frozen=True)
class TenantMixError:
    """Errors per tenant for one fleet composition: at the chosen cap, and at the best of CAPS.

    `total`, `noise` (at the chosen cap) and `best` (the total at `best_cap`) are relative errors:
    medians over the classes, means over the fleets; the rest of the total is bias. `cap` is that
    chosen for the first fleet.
    """

    nodes: int
    tenants: int
    concentration: float
    cap: int
    total: float
    noise: float
    best_cap: int
    best: float


def error_by_mix(
    nodes: int,
    tenants: int,
    concentration: float,
    hours: int,
    epsilon: float,
    rng: np.random.Generator,
    fleets: int = 3,
    classes: int = 64,
) -> TenantMixError:
    """Errors of a release whose unit of privacy is a tenant, over several fleets, each at the cap
    that `tenant_cap.choose_cap` derives from its tenants' sizes.
    """
    chosen, totals = [], []
    for _ in range(fleets):
        fleet = Population.draw(nodes, classes, tenants, rng, concentration)
        sizes = np.bincount(fleet.tenant, minlength=tenants)
        cap = choose_cap(sizes, classes, hours, epsilon, DELTA)
        caps = sorted({cap, *(c for c in CAPS if c <= 50)})
        lines = per_tenant(fleet, hours, epsilon, caps, rng)
        chosen.append((cap, lines[caps.index(cap)]))
        totals.append({c: line.total_median for c, line in zip(caps, lines, strict=True)})
    mean = {c: float(np.mean([t[c] for t in totals if c in t])) for c in totals[0]}
    best = min(mean, key=lambda c: mean[c])
    return TenantMixError(
        nodes,
        tenants,
        concentration,
        chosen[0][0],
        float(np.mean([line.total_median for _, line in chosen])),
        float(np.mean([line.noise_median for _, line in chosen])),
        best,
        mean[best],
    )


def rank_in_tenant(population: Population, rng: np.random.Generator) -> Ints:
    """A random order of each tenant's nodes: 0, 1, … within the tenant."""
    order = rng.permutation(population.nodes)
    tenant = population.tenant[order]
    by_tenant = np.argsort(tenant, kind="stable")
    starts = np.concatenate(([0], np.cumsum(np.bincount(tenant))))[:-1]
    rank = np.empty(population.nodes, dtype=np.int64)
    rank[order[by_tenant]] = np.arange(population.nodes) - starts[tenant[by_tenant]]
    return rank
