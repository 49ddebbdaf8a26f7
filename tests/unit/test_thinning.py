# SPDX-License-Identifier: Apache-2.0
"""How many stacks of waits are taken."""

from __future__ import annotations

from sonde.agent.thinning import BURST, MOST, NAMED_PER_S, Thinning


def test_a_steady_load_keeps_all():
    thinning = Thinning()
    assert not any(thinning.after(int(NAMED_PER_S), 1.0) for _ in range(600))
    assert thinning.odds == 1


def test_a_burst_is_named_in_full():
    thinning = Thinning()
    assert not thinning.after(int(BURST), 1.0)


def test_where_all_is_new_about_so_many_are_named_in_the_long_run():
    thinning, named = Thinning(), []
    for _ in range(300):
        named.append(900 // thinning.odds)
        thinning.after(named[-1], 1.0)
    assert sum(named[100:]) / 200 < 1.5 * NAMED_PER_S
    assert min(named) > NAMED_PER_S / 4


def test_it_ends_with_its_cause():
    thinning = Thinning()
    while thinning.odds < MOST:
        thinning.after(10_000, 1.0)
    seconds = 0
    while thinning.odds > 1:
        thinning.after(0, 1.0)
        seconds += 1
    assert seconds < 10


def test_what_is_named_in_no_time_at_all_is_thinned_and_no_error():
    thinning = Thinning()
    assert thinning.after(int(BURST) + 1, 0.0)
    assert thinning.odds == MOST


def test_what_may_be_named_grows_with_the_time():
    for seconds in (0.5, 2.0, 10.0):
        thinning = Thinning()
        thinning.after(int(BURST + NAMED_PER_S), 1.0)  # none is left
        assert not thinning.after(int(NAMED_PER_S * seconds), seconds)
        assert thinning.after(int(3 * NAMED_PER_S * seconds), seconds)
        assert thinning.odds == 3


def test_odds_fall_by_halves_while_less_than_half_of_what_may_be_is_named():
    thinning = Thinning()
    thinning.odds = 12
    assert not thinning.after(int(NAMED_PER_S / 2), 1.0)
    found = [thinning.odds for _ in range(5) if thinning.after(int(NAMED_PER_S / 2) - 1, 1.0)]
    assert found == [6, 3, 1]
