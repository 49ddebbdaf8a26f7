# SPDX-License-Identifier: Apache-2.0
"""An agent whose rows nobody keeps reads them as often as somebody asks."""

from __future__ import annotations

import math
import select
import threading

import pytest

from sonde.agent.scrape_scheduler import CROWDED_ROWS, ScrapeScheduler
from sonde.collect.collector import Batch
from sonde.collect.metrics import Metrics
from sonde.collect.queues import TRY_S, QueueCollector
from sonde.config import Config

TICK_S, REST_S = 0.2, 2.0
SOON_MS = 20_000


class Clock:
    """Stands still unless the test moves it."""

    now_s = 1000.0

    def __call__(self):
        return self.now_s

    def passes(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def scheduler(clock):
    config = Config(on_cpu=False, off_cpu=False, tick_s=TICK_S, rest_s=REST_S)
    made = ScrapeScheduler(config, [], clock)
    yield made
    made.close()


def asks(scheduler):
    """Somebody who asks, in a thread of his own."""
    caller = threading.Thread(target=scheduler.request_tick)
    caller.start()
    return caller


def is_woken(scheduler):
    waiting = select.poll()
    waiting.register(scheduler.fds[0], select.POLLIN)
    return bool(waiting.poll(SOON_MS))


def test_where_nobody_asks_it_reads_seldom(scheduler):
    scheduler.on_tick([], 1.0)
    assert scheduler.tick_s == REST_S
    assert not scheduler.is_woken()


def test_a_question_is_answered_by_the_tick_that_it_asks_for(scheduler):
    caller = asks(scheduler)
    assert is_woken(scheduler)
    assert scheduler.is_woken()
    assert caller.is_alive()  # it waits
    scheduler.on_tick([], 1.0)
    caller.join(SOON_MS / 1000)
    assert not caller.is_alive()
    assert not scheduler.is_woken()


def test_what_was_just_read_is_not_read_again(scheduler):
    scheduler.on_tick([], 1.0)
    scheduler.request_tick()
    assert not scheduler.is_woken()


def test_it_keeps_the_pace_of_who_asks(scheduler, clock):
    for _ in range(4):
        scheduler.on_tick([], 1.0)
        scheduler.request_tick()
        clock.passes(TICK_S / 2)
    assert scheduler.tick_s == TICK_S
    clock.passes(4 * TICK_S)  # the caller is gone
    assert scheduler.tick_s == REST_S


def test_two_who_ask_at_once_and_seldom_are_no_hurry(scheduler, clock):
    for _ in range(4):
        for pause_s in (0.01, 3 * TICK_S):
            scheduler.on_tick([], 1.0)
            scheduler.request_tick()
            clock.passes(pause_s)
    assert scheduler.tick_s == pytest.approx(3 * TICK_S, abs=0.001)


class Trying(QueueCollector):
    """Follows switches to see whether they are still too many, and nothing else."""

    drain_within_s = TRY_S

    def __init__(self):
        pass


def test_a_trial_is_short(clock):
    queues = Trying()
    scheduler = ScrapeScheduler(Config(on_cpu=False, off_cpu=False), [queues], clock)
    scheduler.on_tick([], 1.0)
    assert scheduler.tick_s == TRY_S
    queues.drain_within_s = math.inf
    assert scheduler.tick_s > 1.0
    scheduler.close()


class NotedIntervals(Metrics):
    """Notes how often what it reports is wanted."""

    def __init__(self):
        self.seconds = []

    def set_interval(self, seconds, *, keep_last_only=False):
        assert keep_last_only
        self.seconds.append(seconds)


def test_sources_learn_that_nobody_keeps_what_they_report(clock):
    metrics = NotedIntervals()
    config = Config(on_cpu=False, off_cpu=False, rest_s=REST_S)
    scheduler = ScrapeScheduler(config, [metrics], clock)
    for _ in range(3):
        scheduler.on_tick([], 1.0)
    assert metrics.seconds == [REST_S]
    for _ in range(4):  # somebody asks every second
        scheduler.request_tick()
        clock.passes(1.0)
        scheduler.on_tick([], 1.0)
    assert metrics.seconds == [REST_S, 0.0]
    scheduler.close()


def test_many_rows_are_read_sooner(scheduler):
    rows = [(0,)] * (CROWDED_ROWS // 4)
    scheduler.on_tick([Batch(rows={"usage": rows})], TICK_S)
    assert scheduler.tick_s == TICK_S
    scheduler.on_tick([Batch(rows={"usage": rows})], REST_S)
    assert scheduler.tick_s == REST_S


def test_nobody_waits_for_an_agent_that_ended(scheduler):
    caller = asks(scheduler)
    scheduler.close()
    caller.join(SOON_MS / 1000)
    assert not caller.is_alive()
    scheduler.request_tick()  # nor from then on


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
    assert ScrapeScheduler.suits(Config(**{**plain, **options})) is suits
