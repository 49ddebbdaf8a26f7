# SPDX-License-Identifier: Apache-2.0
"""The cap of a tenant's nodes, from sizes that are public anyway."""

import math

import numpy as np
import pytest

from sonde.errors import UsageError
from sonde.fleet.evaluation import accuracy
from sonde.fleet.evaluation.population import Population
from sonde.fleet.noise import plan
from sonde.fleet.tenant_cap import CAPS, choose_cap, expected_error

DELTA = 1e-6


def sizes(nodes, tenants):
    weights = 1 / np.arange(1, tenants + 1)
    return np.maximum(1, (nodes * weights / weights.sum()).astype(int))


def test_a_larger_cap_means_more_noise_for_many_small_tenants_and_less_bias():
    many = sizes(100_000, 20_000)
    noise, bias = zip(*(expected_error(many, c, 64, 24, 1.0, DELTA) for c in CAPS), strict=True)
    assert list(noise) == sorted(noise)
    assert list(bias) == sorted(bias, reverse=True)


def test_no_noise_is_bought_where_tenants_are_alike():
    assert expected_error([10] * 1000, 10, 64, 24, 1.0, DELTA)[1] == 0
    assert choose_cap([10] * 1000, 64, 24, 1.0, DELTA) == 10


def test_the_cap_never_exceeds_the_largest_tenant_and_needs_one():
    assert choose_cap([1, 1, 1], 64, 24, 1.0, DELTA) == 1
    with pytest.raises(UsageError):
        choose_cap([], 64, 24, 1.0, DELTA)


def test_the_chosen_cap_keeps_ten_percent_where_the_docs_say_so():
    rng = np.random.default_rng(1)
    mix = accuracy.error_by_mix(100_000, 5000, 0.0, 24, 1.0, rng, fleets=1)
    assert mix.total < 0.10
    fleet = Population.draw(100_000, 64, 5000, rng, 0.0)
    assert mix.cap in CAPS
    assert mix.cap <= np.bincount(fleet.tenant).max()


def test_noise_and_bias_of_three_tenants_are_those_reckoned_by_hand():
    # Kept of 4, 1, 1: 2, 1, 1. Their shares move by -1/6, 1/12, 1/12, whose squares add up to 1/24.
    noise, bias = expected_error([4, 1, 1], 2, 4, 3, 1.0, DELTA)
    assert noise == pytest.approx(plan(6, 1.0, DELTA).deviation() / (3 * 4) * 8)
    assert bias == pytest.approx(math.sqrt(0.3**2 / 24 + 1 / 4 - 1 / 6))
    _, bias = expected_error([4, 1, 1], 2, 9, 3, 1.0, DELTA, concentration=1.0)
    assert bias == pytest.approx(math.sqrt((1 / 24 + 1 / 12) * 2))
