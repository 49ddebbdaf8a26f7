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
