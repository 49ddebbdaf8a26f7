# SPDX-License-Identifier: Apache-2.0
"""What timing costs a process is measured by trials, and the rate follows."""

from __future__ import annotations

import math
import random

import pytest

from sonde.collect.overhead_controller import OverheadController, samples_a_second
from sonde.collect.slowdown import LEAST_SCALE, PART, SETTLE_S, OverheadExperiment, _outer, estimate


def play(
    trials: OverheadExperiment, slower: float, hours: float, rng: random.Random, noise: float
) -> float:
    """A program that launches 5,000 a second, wanders, and is `slower` where all is timed.

    Returns the share of the rate that was asked for, over the time.
    """
    launches, asked, ticks = 0.0, 0.0, int(hours * 3600)
    wander = 1.0
    for second in range(ticks):
        if second % 7 == 0:
            wander = rng.lognormvariate(0, noise) * (3 if rng.random() < 0.02 else 1)
        launches += 5000 * wander / (1 + slower * trials.share)
        asked += trials.share
        trials.look(1000.0 + second, int(launches))
    return asked / ticks


def test_intervals_hold_the_truth():
    rng = random.Random(3)
    held = []
    for _ in range(120):
        trials = OverheadExperiment(0.5, rng)
        play(trials, 0.004, 2, rng, 0.02)
        now = estimate(trials.found)
        assert now is not None and now.trials > 60
        held.append(now.low <= 0.004 <= now.high)
        assert now.high - now.low < 0.03
    assert sum(held) >= 0.9 * len(held)


def test_hardly_any_launch_less_is_timed():
    rng = random.Random(4)
    assert play(OverheadExperiment(0.01, rng), 0.001, 4, rng, 0.02) > 0.9


def test_a_program_that_is_slowed_too_much_has_fewer_timed():
    rng = random.Random(5)
    trials = OverheadExperiment(0.01, rng)
    assert play(trials, 0.06, 12, rng, 0.02) < 0.5
    assert trials.share * 0.06 < 0.02


def test_where_it_was_chance_the_rate_rises_again():
    rng = random.Random(6)
    trials = OverheadExperiment(0.01, rng)
    play(trials, 0.2, 3, rng, 0.01)
    lowered = trials.share
    assert LEAST_SCALE <= lowered < 0.2
    play(trials, 0.0, 20, rng, 0.01)
    assert trials.share in (1.0, PART)


def test_a_program_that_seldom_launches_takes_part_in_no_trial():
    trials = OverheadExperiment(0.01, random.Random(7))
    for second in range(2000):
        trials.look(1000.0 + second, second)
    assert not trials.found


@pytest.mark.parametrize("count", [6, 20, 61, 1440])
def test_the_interval_of_a_median_covers_in_95_of_100(count):
    rng = random.Random(count)
    found = [estimate([rng.gauss(0, 1) for _ in range(count)]) for _ in range(400)]
    covers = sum(now is not None and now.low <= 0 <= now.high for now in found)
    assert covers / 400 >= 0.92


def test_too_few_trials_say_nothing():
    assert estimate([0.1] * 5) is None


@pytest.mark.parametrize(
    ("count", "below"),
    [(5, 0), (6, 0), (9, 1), (12, 2), (15, 3), (20, 5), (25, 7), (50, 17), (100, 39)],
)
def test_the_ranks_of_the_interval_are_the_published_ones(count, below):
    assert _outer(count) == below


def trial(
    trials: OverheadExperiment,
    full: int,
    thin: int,
    stretch_s: float = 5.0,
    settle_s: float = SETTLE_S,
):
    """One trial: how many launches the program makes in each stretch, with all and few timed."""
    now_s, launches = 1000.0, 0
    trials.look(now_s, launches)
    now_s = trials._due_s
    assert trials.look(now_s, launches), "the trial begins"
    for _ in range(2):
        launches += 1_000_000  # while the library settles: do not count
        assert not trials.look(now_s + 0.99 * settle_s, launches)
        assert trials._began is None
        now_s += settle_s
        assert not trials.look(now_s, launches)
        launches += thin if trials.share < trials._scale else full
        assert not trials.look(now_s + 0.99 * stretch_s, launches)
        now_s += stretch_s
        assert trials.look(now_s, launches), "the stretch is over"


def test_a_trial_finds_the_ratio_of_the_rates():
    trials = OverheadExperiment(0.01, random.Random(8))
    trial(trials, 1001, 1023)
    assert list(trials.found) == [pytest.approx(math.log(1023 / 1001) / (1 - PART))]


def test_short_stretches_settle_for_half_their_length():
    trials = OverheadExperiment(0.01, random.Random(9), stretch_s=0.5)
    trial(trials, 1000, 1000, 0.5, 0.25)
    assert list(trials.found) == [0.0]


@pytest.mark.parametrize(("slower", "scale"), [(0.02, 0.5), (0.04, 0.25), (1.0, 0.25)])
def test_the_rate_falls_to_what_the_budget_pays_for_and_to_a_quarter_at_once_at_the_most(
    slower, scale
):
    trials = OverheadExperiment(0.01, random.Random(10))
    trials.found.extend([slower] * 20)
    trial(trials, 1_000_000, round(1_000_000 * math.exp(slower * (1 - PART))))
    assert trials._scale == pytest.approx(scale)
    assert not trials.found, "they were of another rate"


@pytest.mark.parametrize(("before", "scale"), [(28, 0.25), (29, 0.5)])
def test_a_rate_that_was_lowered_rises_after_30_trials_that_find_little(before, scale):
    trials = OverheadExperiment(0.01, random.Random(11))
    trials._scale = 0.25
    trials.found.extend([0.001] * before)
    trial(trials, 100_000, 100_000)
    assert trials._scale == scale
    assert len(trials.found) == (0 if scale == 0.5 else before + 1)


def test_a_rate_stays_low_while_trials_find_more_than_the_budget_allows_or_nothing():
    trials = OverheadExperiment(0.01, random.Random(12))
    trials._scale = 0.25
    trials.found.extend([-0.1, 0.1] * 20)
    trial(trials, 100_000, 100_000)
    assert trials._scale == 0.25


# ---- how many launches the budget pays for ----


def counts(launches: int, sampled: int, host_ns: int) -> dict[str, int]:
    return {"launches": launches, "sampled": sampled, "host_ns": host_ns}


def test_until_a_process_shows_its_own_cost_a_timed_launch_costs_11_us_four_times_over():
    assert OverheadController(0.2199).per_second == int(0.2199e9 / 44_000) == 4997
    assert [samples_a_second(share, 11_000) for share in (1e-9, 0.044, 0.9)] == [1, 1000, 5000]
    assert samples_a_second(0.001, 1) == 250, "none costs less than 1 us"


def test_the_cost_of_a_launch_follows_what_is_measured_by_quarters():
    overhead_controller = OverheadController(0.0022)
    before = counts(0, 1000, 5_000)
    assert overhead_controller.look(1.0, counts(100, 1020, 5_000 + 20 * 19_000), before)
    assert overhead_controller._cost_ns == 13_000.0
    assert overhead_controller.per_second == int(0.0022e9 / (4 * 13_000)) == 42


@pytest.mark.parametrize(
    ("sampled", "host_ns", "taken"),
    [
        (19, 19 * 15_000, False),
        (20, 20 * 15_000, True),
        (20, 0, False),
        (-5, 10_000, False),
        ((1 << 32) - 1, 1 << 39, True),
        (1 << 32, 1 << 39, False),
        (1 << 30, (1 << 40) - 1, True),
        (1 << 30, 1 << 40, False),
    ],
)
def test_counts_that_make_no_sense_or_are_few_change_nothing(sampled, host_ns, taken):
    overhead_controller = OverheadController(0.01)
    assert (
        overhead_controller.look(1.0, counts(0, 50 + sampled, 7 + host_ns), counts(0, 50, 7))
        is taken
    )
    assert (overhead_controller._cost_ns != 11_000.0) is taken
