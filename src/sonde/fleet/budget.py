# SPDX-License-Identifier: Apache-2.0
"""Composition of privacy losses, and when to refuse a release. Pure functions.

A GPU (or tenant) may take part in every release, so losses compose. They are summed as zCDP (in
rho) and, if every release has a pure epsilon (Laplace noise), as pure epsilon too; the smaller
result holds. The budget must hold in *every* window of 365 days, not only in calendar years. A
release belongs to the windows that contain the start of its batch. Sums are exact, and every figure
is rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sonde.errors import SondeError
from sonde.fleet.noise import composed_epsilon, exact_loss, format_rounded_up
from sonde.fleet.task import Task, Unit

YEAR_S = 365 * 86_400


def releases_a_year(release_s: int) -> int:
    """The largest number of batches of this length that begin within any 365 days: 53 for a week,
    not 52.
    """
    return -(-YEAR_S // release_s)


class BudgetSpent(SondeError):
    """The release would exceed the yearly budget."""


@dataclass(frozen=True)
class LedgerEntry:
    """One release in the ledger. A rho of None: that unit's loss is unbounded. An epsilon of None:
    so it is, or the noise has no pure epsilon.
    """

    start_s: int
    gpu_rho: float | None
    gpu_epsilon: float | None
    tenant_rho: float | None
    tenant_epsilon: float | None

    def loss(self, unit: Unit) -> tuple[float | None, float | None]:
        """(rho, pure epsilon) of one unit."""
        if unit == "gpu":
            return self.gpu_rho, self.gpu_epsilon
        return self.tenant_rho, self.tenant_epsilon


@dataclass(frozen=True)
class UnitCost:
    """Epsilon for one unit of privacy; None: unbounded.

    one_release   of a single release
    worst_year    of the costliest 365 days of the releases given
    full_year     of a year in which every scheduled batch is released
    """

    one_release: float | None
    worst_year: float | None
    full_year: float | None


@dataclass(frozen=True)
class Ledger:
    """The cost of releases, per unit of privacy.

    `unit`, `delta` and `budget` (epsilon a year) are the task's. `releases` is the number given,
    `yearly` the number that a year of the schedule holds.
    """

    unit: Unit
    delta: float
    budget: float
    releases: int
    yearly: int
    units: dict[Unit, UnitCost]


def ledger_of(task: Task, starts_s: Sequence[int]) -> Ledger:
    """The ledger of the releases whose batches begin at these times."""
    privacy = task.privacy
    yearly = releases_a_year(task.release_s)
    entries = [entry_for(task, start_s) for start_s in sorted(set(starts_s))]
    single = entry_for(task, 0)
    units: tuple[Unit, Unit] = ("gpu", "tenant")
    costs = {
        unit: UnitCost(
            worst_year([single], unit, privacy.delta),
            worst_year(entries, unit, privacy.delta),
            epsilon([single], unit, privacy.delta, yearly),
        )
        for unit in units
    }
    return Ledger(privacy.unit, privacy.delta, privacy.budget, len(entries), yearly, costs)


def entry_for(task: Task, start_s: int) -> LedgerEntry:
    """The cost of releasing the batch at `start_s`, for both units."""
    losses: list[float | None] = []
    for unit in ("gpu", "tenant"):
        sensitivity = task.sensitivity(unit)
        if sensitivity is None:
            losses += [None, None]
        else:
            cost = task.mechanism.cost(sensitivity)
            losses += [cost.rho, cost.epsilon]
    return LedgerEntry(start_s, *losses)


def epsilon(
    entries: Sequence[LedgerEntry], unit: Unit, delta: float, times: int = 1
) -> float | None:
    """The composed epsilon at delta, of each release `times` times; None if some release leaves the
    unit unbounded."""
    losses = [entry.loss(unit) for entry in entries]
    rhos = [exact_loss(rho) for rho, _ in losses if rho is not None]
    if len(rhos) < len(losses):
        return None
    pure = [exact_loss(e) for _, e in losses if e is not None]
    all_pure = times * sum(pure) if len(pure) == len(losses) else None
    return composed_epsilon(times * sum(rhos), all_pure, delta)


def worst_year(entries: Sequence[LedgerEntry], unit: Unit, delta: float) -> float | None:
    """The composed epsilon of the costliest 365 days: None if unbounded, 0 without releases."""
    ordered = sorted(entries, key=lambda entry: entry.start_s)
    most_rho = most_pure = 0  # of all windows
    rho = pure = first = 0  # of the window that ends with `entry`; `first` is its first entry
    all_pure = True
    for entry in ordered:
        more_rho, more_pure = entry.loss(unit)
        if more_rho is None:
            return None
        all_pure = all_pure and more_pure is not None
        rho, pure = rho + exact_loss(more_rho), pure + exact_loss(more_pure or 0.0)
        while ordered[first].start_s <= entry.start_s - YEAR_S:
            old_rho, old_pure = ordered[first].loss(unit)
            rho, pure = rho - exact_loss(old_rho or 0.0), pure - exact_loss(old_pure or 0.0)
            first += 1
        most_rho, most_pure = max(most_rho, rho), max(most_pure, pure)
    return composed_epsilon(most_rho, most_pure if all_pure else None, delta)


def authorize_release(task: Task, ledger: Sequence[LedgerEntry], start_s: int) -> LedgerEntry:
    """The ledger entry for a new release. Raises BudgetSpent if the budget of its year does not
    allow it.
    """
    entry = entry_for(task, start_s)
    privacy = task.privacy
    cost = worst_year([*ledger, entry], privacy.unit, privacy.delta)
    if cost is None:
        raise BudgetSpent(
            f"the contribution of one {privacy.unit} to this task is unbounded",
            "use a task with proofs" if task.kind == "plain" else "set a tenant cap",
        )
    if cost > privacy.budget:
        raise BudgetSpent(
            f"the release would bring the year to epsilon {format_rounded_up(cost, 4)} "
            f"per {privacy.unit}, above the budget of {privacy.budget:g}",
            "wait until older releases are a year old",
        )
    return entry
