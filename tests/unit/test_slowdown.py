# SPDX-License-Identifier: Apache-2.0
"""What timing costs a process is measured by trials, and the rate follows."""

from __future__ import annotations

import random

import pytest

from sonde.collect.slowdown import LEAST_SCALE, PART, Trials, estimate


def play(trials: Trials, slower: float, hours: float, rng: random.Random, noise: float) -> float:
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
        trials = Trials(0.5, rng)
        play(trials, 0.004, 2, rng, 0.02)
        now = estimate(trials.found)
        assert now is not None and now.trials > 60
        held.append(now.low <= 0.004 <= now.high)
        assert now.high - now.low < 0.03
    assert sum(held) >= 0.9 * len(held)


def test_hardly_any_launch_less_is_timed():
    rng = random.Random(4)
    assert play(Trials(0.01, rng), 0.001, 4, rng, 0.02) > 0.9


def test_a_program_that_is_slowed_too_much_has_fewer_timed():
    rng = random.Random(5)
    trials = Trials(0.01, rng)
    assert play(trials, 0.06, 12, rng, 0.02) < 0.5
    assert trials.share * 0.06 < 0.02


def test_where_it_was_chance_the_rate_rises_again():
    rng = random.Random(6)
    trials = Trials(0.01, rng)
    play(trials, 0.2, 3, rng, 0.01)
    lowered = trials.share
    assert LEAST_SCALE <= lowered < 0.2
    play(trials, 0.0, 20, rng, 0.01)
    assert trials.share in (1.0, PART)


def test_a_program_that_seldom_launches_takes_part_in_no_trial():
    trials = Trials(0.01, random.Random(7))
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
