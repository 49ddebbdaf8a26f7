# SPDX-License-Identifier: Apache-2.0
"""How many stacks of waits are taken."""

from __future__ import annotations

from sonde.agent.stack_rate_limiter import BURST, MAX_DIVISOR, NAMED_PER_S, StackRateLimiter


def test_a_steady_load_keeps_all():
    limiter = StackRateLimiter()
    assert not any(limiter.after(int(NAMED_PER_S), 1.0) for _ in range(600))
    assert limiter.divisor == 1


def test_a_burst_is_named_in_full():
    limiter = StackRateLimiter()
    assert not limiter.after(int(BURST), 1.0)


def test_where_all_is_new_about_so_many_are_named_in_the_long_run():
    limiter, named = StackRateLimiter(), []
    for _ in range(300):
        named.append(900 // limiter.divisor)
        limiter.after(named[-1], 1.0)
    assert sum(named[100:]) / 200 < 1.5 * NAMED_PER_S
    assert min(named) > NAMED_PER_S / 4


def test_it_ends_with_its_cause():
    limiter = StackRateLimiter()
    while limiter.divisor < MAX_DIVISOR:
        limiter.after(10_000, 1.0)
    seconds = 0
    while limiter.divisor > 1:
        limiter.after(0, 1.0)
        seconds += 1
    assert seconds < 10


def test_what_is_named_in_no_time_at_all_is_thinned_and_no_error():
    limiter = StackRateLimiter()
    assert limiter.after(int(BURST) + 1, 0.0)
    assert limiter.divisor == MAX_DIVISOR


def test_what_may_be_named_grows_with_the_time():
    for seconds in (0.5, 2.0, 10.0):
        limiter = StackRateLimiter()
        limiter.after(int(BURST + NAMED_PER_S), 1.0)  # none is left
        assert not limiter.after(int(NAMED_PER_S * seconds), seconds)
        assert limiter.after(int(3 * NAMED_PER_S * seconds), seconds)
        assert limiter.divisor == 3


def test_the_divisor_falls_by_halves_while_less_than_half_of_what_may_be_is_named():
    limiter = StackRateLimiter()
    limiter.divisor = 12
    assert not limiter.after(int(NAMED_PER_S / 2), 1.0)
    found = [limiter.divisor for _ in range(5) if limiter.after(int(NAMED_PER_S / 2) - 1, 1.0)]
    assert found == [6, 3, 1]
