# SPDX-License-Identifier: Apache-2.0
"""Noise and its price: what is stated is what is spent, and what is spent is refused."""

import math
import statistics

import numpy as np
import pytest

from sonde.errors import UsageError
from sonde.fleet.aggregator import Aggregator
from sonde.fleet.budget import (
    YEAR_S,
    BudgetSpent,
    LedgerEntry,
    authorize_release,
    entry_for,
    epsilon,
    releases_a_year,
    worst_year,
)
from sonde.fleet.evaluation import attack_results, attacks, privacy_audit
from sonde.fleet.evaluation.attack_results import AttackResult
from sonde.fleet.evaluation.local_deployment import small_task
from sonde.fleet.noise import (
    Mechanism,
    chance_of_sum,
    discovery_threshold,
    epsilon_of_rho,
    plan,
    rho_of_epsilon,
)

SURE = 1 - 1e-6  # noise cannot be seeded: a test may not fail one time in twenty


def test_a_single_release_is_cheapest_with_laplace_and_a_year_of_them_with_gauss():
    assert plan(1, 1.0, 1e-6) == Mechanism("laplace", 1.0)
    assert plan(1, 8.0, 1e-6, releases=52).kind == "gaussian"


def test_the_plan_spends_its_budget_and_no_more():
    mechanism = plan(168, 8.0, 1e-6, releases=52)
    spent = epsilon_of_rho(52 * mechanism.cost(168).rho, 1e-6)
    assert 7.9 < spent <= 8.0


def test_conversion_is_no_looser_than_the_textbook_bound():
    rho = 0.5
    textbook = rho + 2 * math.sqrt(rho * math.log(1e6))  # Bun and Steinke 2016, proposition 1.3
    assert 0 < epsilon_of_rho(rho, 1e-6) <= textbook
    assert math.isclose(rho_of_epsilon(epsilon_of_rho(rho, 1e-6), 1e-6), rho, rel_tol=1e-4)


def test_a_loss_beyond_all_measure_is_a_number_and_not_an_error():
    assert epsilon_of_rho(999.0, 1e-6) < epsilon_of_rho(1001.0, 1e-6) < epsilon_of_rho(1e8, 1e-6)


@pytest.mark.parametrize("kind", ["laplace", "gaussian"])
def test_error_bars_hold_the_noise_of_both_parties_in_95_percent(kind):
    mechanism = Mechanism(kind, 20.0)
    pairs = zip(mechanism.sample(20_000), mechanism.sample(20_000), strict=True)
    inside = statistics.mean(abs(a + b) <= mechanism.half_width() for a, b in pairs)
    assert 0.935 < inside < 0.965


def test_beyond_all_measure_the_textbook_bound_is_stated_and_up_to_there_the_tighter_one():
    def textbook(rho):
        return rho + 2 * math.sqrt(rho * math.log(1e6))

    assert textbook(1e4) <= epsilon_of_rho(1e4, 1e-6) <= textbook(1e4) * (1 + 1e-9)
    assert epsilon_of_rho(1000.0, 1e-6) < textbook(1000.0) - 1


def test_an_interval_of_gaussian_noise_has_the_width_of_the_normal_distribution():
    one = Mechanism("gaussian", 20.0)
    assert one.half_width(0.95, parties=1) == pytest.approx(20 * 1.959964)
    assert one.half_width(0.95) == pytest.approx(20 * 1.959964 * math.sqrt(2))


def test_the_mechanism_of_least_variance_is_chosen():
    chosen = set()
    for releases in (1, 2, 3, 4, 5, 6, 8, 12, 24, 52):
        both = [plan(40, 8.0, 1e-6, releases, kind) for kind in ("laplace", "gaussian")]
        least = min(both, key=Mechanism.deviation)
        assert plan(40, 8.0, 1e-6, releases) == least
        chosen.add(least.kind)
    assert chosen == {"laplace", "gaussian"}


def test_no_more_noise_than_the_guarantee_needs():
    for sensitivity in (1, 3, 7, 168):
        for releases in (1, 2, 7, 53):
            laplace = plan(sensitivity, 1.0, 1e-6, releases, "laplace")
            rho = rho_of_epsilon(1.0, 1e-6) / releases
            pure = max(1.0 / releases, math.sqrt(2 * rho))
            assert laplace.scale == pytest.approx(sensitivity / pure, rel=1e-6)


def test_losses_compose_over_releases():
    task = small_task(scale=2.0)
    entries = [entry_for(task, day * 86_400) for day in range(10)]
    assert epsilon(entries[:1], "gpu", 1e-6) == pytest.approx(0.5)
    ten = epsilon(entries, "gpu", 1e-6)
    assert ten is not None
    assert 0.5 < ten <= 5.0


def test_a_tenant_without_a_cap_has_no_epsilon_and_with_one_a_larger_than_a_gpu():
    assert epsilon([entry_for(small_task(), 0)], "tenant", 1e-6) is None
    capped = entry_for(small_task(tenant_cap=10, scale=10.0), 0)
    assert epsilon([capped], "gpu", 1e-6) == pytest.approx(0.1)
    assert epsilon([capped], "tenant", 1e-6) == pytest.approx(1.0)


def test_the_year_slides():
    entries = [LedgerEntry(start, 1.0, None, None, None) for start in (0, YEAR_S - 1, YEAR_S)]
    assert worst_year(entries, "gpu", 1e-6) == epsilon_of_rho(2.0, 1e-6)


def test_a_year_is_365_days_of_86400_seconds():
    assert [releases_a_year(seconds) for seconds in (86_400, 86_399, 7 * 86_400)] == [365, 366, 53]
    year = [LedgerEntry(start, 1.0, None, None, None) for start in (0, 31_535_999)]
    assert worst_year(year, "gpu", 1e-6) == epsilon_of_rho(2.0, 1e-6)
    apart = [LedgerEntry(start, 1.0, None, None, None) for start in (0, 31_536_000)]
    assert worst_year(apart, "gpu", 1e-6) == epsilon_of_rho(1.0, 1e-6)


def test_a_release_beyond_the_budget_is_refused():
    task = small_task(scale=1.0, budget=2.5)
    ledger = [entry_for(task, 0), entry_for(task, 3600)]
    with pytest.raises(BudgetSpent, match="above the budget"):
        authorize_release(task, ledger, 7200)
    assert authorize_release(task, ledger, YEAR_S + 7200).gpu_epsilon == pytest.approx(1.0)


def test_reports_without_proofs_have_no_privacy_guarantee():
    with pytest.raises(BudgetSpent, match="unbounded") as caught:
        authorize_release(small_task(kind="plain"), [], 0)
    assert "proofs" in caught.value.remedy


def test_the_threshold_of_unknown_keys_hides_what_one_unit_holds():
    threshold = discovery_threshold(1.0, 1e-6)
    assert 10 < threshold < 30
    noise = np.random.default_rng(1).laplace(0.0, 1.0, (2, 100_000)).sum(axis=0)
    assert (1 + noise < threshold).all()
    assert discovery_threshold(1.0, 1e-9) > threshold


def chances(scale, contribution):
    """By threshold: the exact chances that the count of one unit's key reaches it, with the noise
    of one and of both aggregators.
    """
    reach = math.ceil(60 * scale)  # beyond it is less than 1e-25
    at = np.arange(-reach, reach + 1)
    one = np.exp(-np.abs(at) / scale)
    one /= one.sum()
    both = np.convolve(one, one)
    tails = [np.cumsum(part[::-1])[::-1] for part in (one, both)]
    return lambda threshold: [
        float(tail[len(tail) // 2 + threshold - contribution]) for tail in tails
    ]


@pytest.mark.parametrize(
    ("scale", "delta", "contribution"),
    [(1.0, 1e-6, 1), (5.0, 1e-6, 1), (5.0, 1e-9, 3), (40.0, 1e-6, 24), (0.3, 1e-3, 2)],
)
def test_the_stated_delta_holds_for_the_noise_that_both_aggregators_add(scale, delta, contribution):
    threshold = discovery_threshold(scale, delta, contribution)
    exact = chances(scale, contribution)
    one, both = exact(threshold)
    assert one < both <= delta < exact(threshold - 1)[1]
    for least in (1, 2, math.ceil(7 * scale)):
        assert chance_of_sum(scale, least) == pytest.approx(
            exact(contribution + least)[1], rel=1e-9
        )


def test_the_noise_that_the_aggregators_draw_shows_a_lone_key_as_rarely_as_stated():
    scale, delta, draws = 2.0, 0.02, 20_000
    threshold = discovery_threshold(scale, delta)
    mechanism = Mechanism("laplace", scale)
    p = math.exp(-1 / scale)  # seeded: a Laplace noise is the difference of two geometric ones
    rng = np.random.default_rng(9)
    geometric = rng.geometric(1 - p, (4, draws))
    seeded = geometric[0] - geometric[1] + geometric[2] - geometric[3]
    drawn = np.add(mechanism.sample(draws), mechanism.sample(draws))
    margin = 7 * math.sqrt(draws * delta)  # the product's sampler has no seed
    expected = draws * chance_of_sum(scale, threshold - 1)
    for noise in (seeded, drawn):
        shown = int((1 + noise >= threshold).sum())
        assert abs(shown - expected) < margin
        assert shown < draws * delta + margin


@pytest.mark.parametrize(
    "senseless",
    [
        (1, -1.0, 1e-6),
        (1, 0.0, 1e-6),
        (1, 1.0, 0.0),
        (1, 1.0, 1.0),
        (1, 1.0, 1e-6, 0),
        (0, 1.0, 1e-6),
    ],
)
def test_senseless_privacy_is_refused(senseless):
    with pytest.raises(UsageError):
        plan(*senseless)


def test_half_the_noise_is_caught_by_every_audit_and_the_stated_one_holds():
    rng = np.random.default_rng(4)
    honest, weak = (
        privacy_audit.canary_counts("gaussian", 1.0, rng, weaken=w, releases=6) for w in (1.0, 0.5)
    )
    assert privacy_audit.audit_canaries(honest, SURE).held
    assert not privacy_audit.audit_canaries(weak, SURE).held
    honest, weak = (
        privacy_audit.canary_counts("laplace", 1.0, rng, weaken=w, releases=6) for w in (1.0, 0.5)
    )
    audit = privacy_audit.audit_canaries(honest, SURE)
    assert audit.held
    assert float(audit.reached.split()[-1]) > 0.5
    assert privacy_audit.membership_inference(honest, SURE).held
    assert not privacy_audit.audit_canaries(weak, SURE).held
    assert not privacy_audit.membership_inference(weak, SURE).held


def test_an_audit_sees_the_noise_of_the_services_and_not_of_the_library(monkeypatch):
    monkeypatch.setattr(Aggregator, "noise", lambda party: [0] * party.task.buckets)
    seen = privacy_audit.canary_counts("laplace", 1.0, np.random.default_rng(5), releases=2)
    assert not privacy_audit.audit_canaries(seen, SURE).held


def test_a_control_is_wrong_where_it_is_not_caught():
    good = AttackResult("a", "", "", True, "")
    table = [
        good,
        AttackResult("b", "", "", None, ""),
        AttackResult("c", "", "", False, "", control=True),
    ]
    assert attack_results.unexpected_results(table) == []
    bad = [AttackResult("d", "", "", False, ""), AttackResult("e", "", "", True, "", control=True)]
    assert attack_results.unexpected_results(table + bad) == bad
    assert [attack.verdict for attack in bad] == ["BROKEN", "MISSED"]


def test_every_attack_is_held_where_something_is_promised_and_every_control_is_caught():
    table = attacks.run_all(seed=3, confidence=SURE)
    assert attack_results.unexpected_results(table) == []
    assert sum(attack.control for attack in table) == 6
    assert sum(attack.held is True for attack in table) == 20
    names = " ".join(attack.name for attack in table)
    for kind in ("reconstruction", "canary", "membership", "poisoning", "intersection"):
        assert kind in names
