# SPDX-License-Identifier: Apache-2.0
"""An agent whose rows nobody keeps reads them as often as somebody asks."""

from __future__ import annotations

import select
import threading

import pytest

from sonde.agent.demand import CROWDED, TRY_S, Demand
from sonde.collect.collector import Batch
from sonde.collect.metrics import Metrics
from sonde.collect.queues import QueueCollector
from sonde.config import Config

TICK_S, REST_S = 0.2, 2.0
SOON_MS = 20_000


class Clock:
    """Stands still unless told."""

    now_s = 1000.0

    def __call__(self):
        return self.now_s

    def passes(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def demand(clock):
    config = Config(on_cpu=False, off_cpu=False, tick_s=TICK_S, rest_s=REST_S)
    made = Demand(config, [], clock)
    yield made
    made.close()


def asks(demand):
    """Somebody who asks, in a thread of his own."""
    asker = threading.Thread(target=demand.ask)
    asker.start()
    return asker


def is_woken(demand):
    waiting = select.poll()
    waiting.register(demand.fds[0], select.POLLIN)
    return bool(waiting.poll(SOON_MS))


def test_where_nobody_asks_it_reads_seldom(demand):
    demand.judge([], 1.0)
    assert demand.tick_s == REST_S
    assert not demand.is_stirred()


def test_a_question_is_answered_by_the_tick_that_it_asks_for(demand):
    asker = asks(demand)
    assert is_woken(demand)
    assert demand.is_stirred()
    assert asker.is_alive()  # it waits
    demand.judge([], 1.0)
    asker.join(SOON_MS / 1000)
    assert not asker.is_alive()
    assert not demand.is_stirred()


def test_what_was_just_read_is_not_read_again(demand):
    demand.judge([], 1.0)
    demand.ask()
    assert not demand.is_stirred()


def test_it_keeps_the_pace_of_who_asks(demand, clock):
    for _ in range(4):
        demand.judge([], 1.0)
        demand.ask()
        clock.passes(TICK_S / 2)
    assert demand.tick_s == TICK_S
    clock.passes(4 * TICK_S)  # whoever it was is gone
    assert demand.tick_s == REST_S


def test_two_who_ask_at_once_and_seldom_are_no_hurry(demand, clock):
    for _ in range(4):
        for pause_s in (0.01, 3 * TICK_S):
            demand.judge([], 1.0)
            demand.ask()
            clock.passes(pause_s)
    assert demand.tick_s == pytest.approx(3 * TICK_S, abs=0.001)


class Trying(QueueCollector):
    """Follows switches to see whether they are still too many, and nothing else."""

    is_trying = True

    def __init__(self):
        pass


def test_a_trial_is_short(clock):
    queues = Trying()
    demand = Demand(Config(on_cpu=False, off_cpu=False), [queues], clock)
    demand.judge([], 1.0)
    assert demand.tick_s == TRY_S
    queues.is_trying = False
    assert demand.tick_s > 1.0
    demand.close()


class Told(Metrics):
    """Notes how often what is said is wanted."""

    def __init__(self):
        self.seconds = []

    def unkept(self, seconds):
        self.seconds.append(seconds)


def test_sources_are_told_that_nobody_keeps_what_they_say(clock):
    metrics = Told()
    demand = Demand(Config(on_cpu=False, off_cpu=False, rest_s=REST_S), [metrics], clock)
    for _ in range(3):
        demand.judge([], 1.0)
    assert metrics.seconds == [REST_S]
    for _ in range(4):  # somebody asks every second
        demand.ask()
        clock.passes(1.0)
        demand.judge([], 1.0)
    assert metrics.seconds == [REST_S, 0.0]
    demand.close()


def test_many_rows_are_read_sooner(demand):
    rows = [(0,)] * (CROWDED // 4)
    demand.judge([Batch(rows={"usage": rows})], TICK_S)
    assert demand.tick_s == TICK_S
    demand.judge([Batch(rows={"usage": rows})], REST_S)
    assert demand.tick_s == REST_S


def test_nobody_waits_for_an_agent_that_ended(demand):
    asker = asks(demand)
    demand.close()
    asker.join(SOON_MS / 1000)
    assert not asker.is_alive()
    demand.ask()  # nor from then on


@pytest.mark.parametrize(
    ("options", "suits"),
    [
        ({}, True),
        ({"rest_s": 0}, False),
        ({"on_cpu": True}, False),
        ({"device_time": "all"}, False),
        ({"syscalls": True}, False),
    ],
)
def test_what_fills_rings_is_read_all_the_time(options, suits):
    plain = {"on_cpu": False, "off_cpu": False}
    assert Demand.suits(Config(**{**plain, **options})) is suits
