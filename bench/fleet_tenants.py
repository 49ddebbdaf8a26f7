# SPDX-License-Identifier: Apache-2.0
"""Alternatives for totals per tenant: other mechanisms and post-processing, and a bound on any
mechanism.

    python -m bench.fleet_tenants

Medians over the classes, means over fleets and draws of noise: over all 63 busy classes, and over
the largest 50. NumPy draws the noise here: only errors are compared, nothing is released.
"""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import combinations

import numpy as np

from sonde.fleet.evaluation.accuracy import DELTA, rank_in_tenant
from sonde.fleet.evaluation.population import Floats, Ints, Population, zipf
from sonde.fleet.tenant_cap import choose_cap

HOURS, CLASSES, FLEETS, DRAWS = 24, 64, 8, 6
GAUSSIAN = 4.22  # deviation a unit of sensitivity at epsilon 1 and delta 1e-6
MIXES = ((1000, 0.0), (1000, 0.3), (1000, 0.7), (2000, 0.3), (2000, 0.7), (5000, 0.7))


def main() -> None:
    rng = np.random.default_rng(5)
    for tenants, concentration in MIXES:
        print(f"\n== 100,000 nodes, {tenants} tenants, {concentration:.0%} concentration, ε = 1 ==")
        for name, (all_, top) in sorted(compare(tenants, concentration, rng).items()):
            print(f"{name:<48} {all_:>7.1%} {top:>7.1%}")


def compare(tenants: int, concentration: float, rng: np.random.Generator) -> dict[str, Floats]:
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(FLEETS):
        fleet = Population.draw(100_000, CLASSES, tenants, rng, concentration)
        sizes = np.bincount(fleet.tenant, minlength=tenants)
        cap = choose_cap(sizes, CLASSES, HOURS, 1.0, DELTA)
        counted, scale = rank_in_tenant(fleet, rng) < cap, float(HOURS * cap)
        exact = np.zeros(CLASSES)
        for hour in range(HOURS):
            exact += np.bincount(fleet.sample(hour, rng)[counted], minlength=CLASSES)
        truth = fleet.truth([float(hour) for hour in range(HOURS)])
        whole = truth.sum() / exact.sum()  # shares are released; the fleet's size is no secret
        found["0 the bias of the cap alone"].append(errors(exact * whole, truth))
        for _ in range(DRAWS):
            ours, theirs = (rng.laplace(0, scale, CLASSES) for _ in range(2))
            two = exact + ours + theirs
            gauss = rng.normal(0, math.sqrt(2) * GAUSSIAN * scale, CLASSES)
            for name, sums in {
                "1 in use: Laplace by each aggregator": two,
                "2 the same, onto the simplex of the known total": simplex(two, exact.sum()),
                "3 the same, shrunk to a log-normal prior": shrink(two, 2 * scale),
                "4 the same, half of it from its margins": margins(two),
                "5 staircase by each": exact + staircase(scale, rng) + staircase(scale, rng),
                "6 Gaussian by each": exact + gauss,
                "7 one Laplace, if both were known to be honest": exact + ours,
            }.items():
                found[name].append(errors(sums * whole, truth))
    found["8 all known but the largest 50's applications"] = [
        bound_by_subset_selection(tenants, concentration, rng) for _ in range(200)
    ]
    return {name: np.mean(each, axis=0) for name, each in found.items()}


def errors(released: Floats, truth: Floats) -> tuple[float, float]:
    """Median relative error of the busy classes, and of the largest 50 of them."""
    off = np.abs(released[1:] - truth[1:]) / truth[1:]
    return float(np.median(off)), float(np.median(off[np.argsort(truth[1:])[::-1][:50]]))


def simplex(sums: Floats, total: float) -> Floats:
    """The nearest counts that are not negative and add up to the total."""
    ordered = np.sort(sums)[::-1]
    over = (np.cumsum(ordered) - total) / np.arange(1, len(sums) + 1)
    return np.asarray(np.maximum(sums - over[np.nonzero(ordered > over)[0][-1]], 0))


def shrink(sums: Floats, deviation: float) -> Floats:
    """Posterior means under a log-normal prior that is fitted to the release itself."""
    seen = np.log(np.maximum(sums, deviation / 2))
    grid = np.exp(np.linspace(seen.mean() - 4 * seen.std(), seen.mean() + 4 * seen.std(), 400))
    prior = np.exp(-0.5 * ((np.log(grid) - seen.mean()) / seen.std()) ** 2)
    weight = prior * np.exp(-0.5 * ((sums[:, None] - grid) / deviation) ** 2)
    return np.asarray((weight * grid).sum(1) / np.maximum(weight.sum(1), 1e-300))


def margins(sums: Floats) -> Floats:
    """Half of each count, half of what its application's and its kernel's totals make of it."""
    square = sums.reshape(8, 8)
    product = np.outer(square.sum(1), square.sum(0)) / square.sum()
    return np.asarray((0.5 * square + 0.5 * product).reshape(-1))


def staircase(sensitivity: float, rng: np.random.Generator) -> Floats:
    """Noise of the least expected size at epsilon 1 (Geng and Viswanath 2014)."""
    step, decay = 1 / (1 + math.exp(0.5)), math.exp(-1)
    sign = rng.choice([-1, 1], CLASSES)
    stairs = rng.geometric(1 - decay, CLASSES) - 1
    within = rng.random(CLASSES)
    low = rng.random(CLASSES) < step / (step + (1 - step) * decay)
    size = np.where(low, stairs + step * within, stairs + step + (1 - step) * within)
    return np.asarray(sign * size * sensitivity)


def bound_by_subset_selection(
    tenants: int, concentration: float, rng: np.random.Generator, hidden: int = 50, draws: int = 200
) -> tuple[float, float]:
    """Error of the best estimate with full knowledge, except for the main applications of the
    largest tenants; each of these is communicated by the best channel of epsilon 1 (subset
    selection, Ye and Barg 2018). No release per tenant communicates more about one of them.
    """
    applications = 8
    size, popularity = zipf(tenants), zipf(applications)
    main = rng.choice(applications, tenants, p=popularity)
    subsets = list(combinations(range(applications), 2))
    member = np.array([[a in subset for subset in subsets] for a in range(applications)])
    weight = np.where(member, math.e, 1.0)
    weight /= weight.sum(1, keepdims=True)
    sent = [rng.choice(len(subsets), p=weight[a]) for a in main[:hidden]]
    belief = np.where(member[:, sent].T, math.e, 1.0) * popularity
    belief /= belief.sum(1, keepdims=True)
    known = np.bincount(main[hidden:], weights=size[hidden:], minlength=applications)

    def shares(guess: Ints) -> Floats:
        own = np.bincount(guess, weights=size[:hidden], minlength=applications)
        return np.asarray(concentration * (known + own) + (1 - concentration) * popularity)

    guesses = (rng.random((draws, hidden, 1)) > belief.cumsum(1)[None]).sum(2)
    best = np.median([shares(guess) for guess in guesses], axis=0)
    kernels = zipf(CLASSES // applications)
    return errors(
        np.outer(best, kernels).reshape(-1), np.outer(shares(main[:hidden]), kernels).reshape(-1)
    )


if __name__ == "__main__":
    main()
