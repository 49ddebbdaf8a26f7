# SPDX-License-Identifier: Apache-2.0
"""What releases cost together, and when to refuse the next one. Pure.

A GPU (or tenant) takes part in every release, so losses compose. They are added up as zCDP and,
where every release was pure, as pure epsilon too; the smaller of the two holds. The yearly budget
must hold in *every* window of 365 days, not only in calendar years. A release lies in the window
that holds the start of its batch. Sums are exact, and every figure is rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sonde.errors import SondeError
from sonde.fleet.noise import composed_epsilon, exact_loss, stated
from sonde.fleet.task import Task, Unit

YEAR_S = 365 * 86_400


def releases_a_year(release_s: int) -> int:
    """The most batches of this length that begin within any 365 days: 53 weeks, not 52."""
    return -(-YEAR_S // release_s)


class BudgetSpent(SondeError):
    """The release would cost more than the year allows."""


@dataclass(frozen=True)
class Entry:
    """One release in the ledger. None: nothing bounds that unit's loss."""

    start_s: int
    gpu_rho: float | None
    gpu_epsilon: float | None
    tenant_rho: float | None
    tenant_epsilon: float | None

    def loss(self, unit: Unit) -> tuple[float | None, float | None]:
        if unit == "gpu":
            return self.gpu_rho, self.gpu_epsilon
        return self.tenant_rho, self.tenant_epsilon


@dataclass(frozen=True)
class Ledger:
    """What releases cost: by unit, (one release, the worst year of those given, a full year).

    None: nothing bounds that unit's loss. `yearly`: releases that a year of the schedule holds.
    """

    unit: Unit
    delta: float
    budget: float
    releases: int
    yearly: int
    units: dict[Unit, tuple[float | None, float | None, float | None]]


def ledger_of(task: Task, starts_s: Sequence[int]) -> Ledger:
    """The ledger of the releases whose batches begin at these times."""
    privacy = task.privacy
    yearly = releases_a_year(task.release_s)
    taken = [entry_for(task, start_s) for start_s in sorted(set(starts_s))]
    one = entry_for(task, 0)
    year = [replace(one, start_s=number * task.release_s) for number in range(yearly)]
    units: tuple[Unit, Unit] = ("gpu", "tenant")
    costs = {
        unit: (
            worst_year([one], unit, privacy.delta),
            worst_year(taken, unit, privacy.delta),
            worst_year(year, unit, privacy.delta),
        )
        for unit in units
    }
    return Ledger(privacy.unit, privacy.delta, privacy.budget, len(taken), yearly, costs)


def entry_for(task: Task, start_s: int) -> Entry:
    """What releasing the batch at start_s costs, for both units."""
    losses: list[float | None] = []
    for unit in ("gpu", "tenant"):
        sensitivity = task.sensitivity(unit)
        if sensitivity is None:
            losses += [None, None]
        else:
            cost = task.mechanism.cost(sensitivity)
            losses += [cost.rho, cost.epsilon]
    return Entry(start_s, *losses)


def epsilon(entries: Sequence[Entry], unit: Unit, delta: float) -> float | None:
    """The composed epsilon at delta; None if some release left the unit unbounded."""
    losses = [entry.loss(unit) for entry in entries]
    rhos = [exact_loss(rho) for rho, _ in losses if rho is not None]
    if len(rhos) < len(losses):
        return None
    pure = [exact_loss(e) for _, e in losses if e is not None]
    return composed_epsilon(sum(rhos), sum(pure) if len(pure) == len(losses) else None, delta)


def worst_year(entries: Sequence[Entry], unit: Unit, delta: float) -> float | None:
    """The composed epsilon of the costliest 365 days; None if unbounded, 0 without releases."""
    ordered = sorted(entries, key=lambda entry: entry.start_s)
    most_rho = most_pure = rho = pure = first = 0
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


def permit(task: Task, ledger: Sequence[Entry], start_s: int) -> Entry:
    """The entry for a new release; raises BudgetSpent where the year does not hold it."""
    entry = entry_for(task, start_s)
    privacy = task.privacy
    cost = worst_year([*ledger, entry], privacy.unit, privacy.delta)
    if cost is None:
        raise BudgetSpent(
            f"nothing bounds what one {privacy.unit} adds to this task",
            "use a task with proofs" if task.kind == "plain" else "set a tenant cap",
        )
    if cost > privacy.budget:
        raise BudgetSpent(
            f"the release would bring the year to epsilon {stated(cost, 4)} per {privacy.unit}, "
            f"above the budget of {privacy.budget:g}",
            "wait until older releases are a year old",
        )
    return entry
