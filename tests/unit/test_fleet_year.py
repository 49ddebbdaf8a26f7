# SPDX-License-Identifier: Apache-2.0
"""Ten years of releases: none is refused, and no 365 days cost more than was promised."""

import math
import random
import re
import time
from bisect import bisect_left
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction

import pytest

from sonde.cli.main import main
from sonde.errors import UsageError
from sonde.fleet.budget import (
    YEAR_S,
    authorize_release,
    entry_for,
    ledger_of,
    releases_a_year,
    worst_year,
)
from sonde.fleet.evaluation.local_deployment import small_task
from sonde.fleet.noise import composed_epsilon, epsilon_of_rho, exact_loss, format_rounded_up, plan
from sonde.fleet.page import render
from sonde.fleet.result import make_result

DAY_S = 86_400
EPSILON, DELTA = 8.0, 1e-6
PERIODS = {"6 h": 6, "daily": 24, "weekly": 168, "four weeks": 672, "30 days": 720, "31 days": 744}
PERIODS |= {"a quarter": 2184, "a year": 8760, "a leap year": 8784, "longer": 10_000, "odd": 1009}


def planned(hours, kind=None, epsilon=EPSILON):
    """A task as `sonde fleet aggregate --new` makes it."""
    release_s = hours * 3600
    mechanism = plan(hours, epsilon, DELTA, releases_a_year(release_s), kind)
    task = replace(small_task(budget=epsilon), release_s=release_s)
    privacy = replace(task.privacy, mechanism=mechanism.kind, scale=mechanism.scale, delta=DELTA)
    return replace(task, privacy=privacy)


def starts_of(task, first_day, years=10):
    """Starts of the batches of real dates, on the task's grid."""
    first_s = task.batch_of(int(first_day.timestamp()))
    last_day = first_day.replace(year=first_day.year + years)
    return list(range(first_s, int(last_day.timestamp()), task.release_s))


def spent_in_any_year(task, starts_s):
    """The dearest 365 days, worked out apart from the ledger: starts in (end - 365 d, end]."""
    cost = entry_for(task, 0)
    most = max(
        at + 1 - bisect_left(starts_s, start_s - YEAR_S + 1) for at, start_s in enumerate(starts_s)
    )
    zcdp = epsilon_of_rho(float(Fraction(cost.gpu_rho) * most), task.privacy.delta)
    return zcdp if cost.gpu_epsilon is None else min(zcdp, cost.gpu_epsilon * most)


@pytest.mark.parametrize("kind", ["laplace", "gaussian"])
@pytest.mark.parametrize("hours", PERIODS.values(), ids=PERIODS)
def test_ten_years_refuse_no_release_and_never_cost_more_than_promised(hours, kind):
    task = planned(hours, kind)
    ledger = []
    for start_s in starts_of(task, datetime(2023, 12, 28, tzinfo=UTC)):  # three leap days
        if len(ledger) % max(1, 168 // hours):
            ledger.append(entry_for(task, start_s))  # judged with the next one that is asked for
        else:
            recent = [entry for entry in ledger[-2000:] if entry.start_s > start_s - YEAR_S]
            ledger.append(authorize_release(task, recent, start_s))
    spent = worst_year(ledger, "gpu", DELTA)
    assert spent_in_any_year(task, [e.start_s for e in ledger]) <= spent * (1 + 1e-12)
    assert spent <= EPSILON
    year = ledger_of(task, []).units["gpu"].full_year
    assert year >= spent  # the full year that is printed holds every year that comes


@pytest.mark.parametrize("weekday", range(7))
@pytest.mark.parametrize("year", [2023, 2024, 2025])
def test_a_weekly_fleet_loses_no_release_whatever_day_it_begins_on(weekday, year):
    task, ledger = planned(168), []
    for start_s in starts_of(task, datetime(year, 1, 1, tzinfo=UTC) + timedelta(days=weekday), 3):
        ledger.append(authorize_release(task, ledger, start_s))
    assert (
        max(
            sum(start_s <= e.start_s < start_s + YEAR_S for e in ledger)
            for start_s in (e.start_s for e in ledger)
        )
        == releases_a_year(7 * DAY_S)
        == 53
    )


@pytest.mark.parametrize("seed", range(40))
def test_no_window_of_365_days_holds_more_starts_than_planned(seed):
    rng = random.Random(seed)
    hours = rng.choice((rng.randint(1, 400), rng.randint(1, 12_000)))
    release_s, most = hours * 3600, releases_a_year(hours * 3600)
    for offset_s in (0, 1, release_s - 1, *(rng.randrange(4 * YEAR_S) for _ in range(200))):
        held = (offset_s + YEAR_S - 1) // release_s - (offset_s - 1) // release_s
        assert most - 1 <= held <= most
    epsilon = math.exp(rng.uniform(math.log(0.05), math.log(50)))
    for kind in ("laplace", "gaussian"):
        cost = entry_for(planned(hours, kind, epsilon), 0)
        pure = None if cost.gpu_epsilon is None else most * exact_loss(cost.gpu_epsilon)
        assert composed_epsilon(most * exact_loss(cost.gpu_rho), pure, DELTA) <= epsilon


def test_a_printed_loss_is_never_below_what_was_spent():
    rng = random.Random(7)
    for _ in range(3000):
        value, digits = math.exp(rng.uniform(-20, 20)), rng.randint(1, 6)
        printed = float(format_rounded_up(value, digits))
        assert value <= printed <= value * (1 + 10.0 ** (1 - digits)) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("value", "text"),
    [(8.0, "8"), (8.001, "8.01"), (0.1, "0.1"), (1e-6, "1e-06"), (1.0001e-6, "1.01e-06"),
     (0.0, "0"), (99.95, "100"), (float("inf"), "inf")],
)  # fmt: skip
def test_losses_are_printed_rounded_up(value, text):
    assert format_rounded_up(value) == text


def test_sums_of_losses_are_exact_whatever_their_order():
    losses = [1e-9, 1.0, 0.1, 3e-17, 123.456] * 50
    assert sum(map(exact_loss, losses)) == sum(map(exact_loss, reversed(losses)))
    for loss in losses:
        assert 0 <= exact_loss(loss) - Fraction(loss) * (1 << 100) < 1


def test_the_conversion_is_never_below_the_least_epsilon_of_zcdp():
    def least(rho):
        """Canonne, Kamath, Steinke 2020, proposition 12, minimised over alpha."""

        def at(log_alpha):
            alpha = 1 + math.exp(log_alpha)
            return (
                rho * alpha + math.log(1 / (alpha * DELTA)) / (alpha - 1) + math.log1p(-1 / alpha)
            )

        low, high = math.log(1e-9), math.log(1e6)
        for _ in range(200):
            one, two = low + (high - low) / 3, high - (high - low) / 3
            low, high = (low, two) if at(one) < at(two) else (one, high)
        return at(low)

    for rho in (1e-4, 0.01, 0.1, 0.5, 2.0, 20.0, 300.0):
        assert epsilon_of_rho(rho, DELTA) >= least(rho) * (1 - 1e-13)


def test_page_table_and_trial_print_what_is_spent(tmp_path, capsys):
    task = replace(planned(168), privacy=replace(planned(168).privacy, budget=8.0004))
    losses = {"gpu": 8.0891, "tenant": None}
    result = make_result(task, 0, [1] * task.buckets, losses)
    assert "ε = 8.09 per gpu" in result.privacy_guarantee()
    assert "8.01 a year" in render(result, ledger_of(task, [0]))
    new = ["fleet", "aggregate", "--new", str(tmp_path / "t"), "--nodes", "2", "--tenants", "1"]
    assert main([*new, "--release-hours", "168"]) == 0
    assert re.search(r"^53 releases a year at ε = 8 per gpu", capsys.readouterr().out, re.M)


def test_a_schedule_of_seconds_has_its_ledger_at_once():
    """A task file comes from another party."""
    task = replace(small_task(budget=8.0), period_s=1, release_s=1)
    began = time.process_time()
    assert ledger_of(task, [0]).yearly == 365 * 86_400
    assert time.process_time() - began < 1


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_noise_beyond_all_reason_is_refused(scale):
    with pytest.raises(UsageError, match="scale"):
        replace(small_task(budget=8.0).privacy, scale=scale)
