# SPDX-License-Identifier: Apache-2.0
"""A machine that does nothing is looked at seldom, and as often as ever once it works again."""

from __future__ import annotations

import math
import select
import subprocess
import sys
import time

import pytest

from sonde.agent.adaptive_scheduler import FIRST_TICK_S, TICKS_TO_REST, AdaptiveScheduler
from sonde.collect.collector import Batch
from sonde.collect.kernel import Kernel
from sonde.collect.queues import QueueCollector
from sonde.config import Config

pytestmark = pytest.mark.bpf

SOON_MS = 20_000
"""Far more than it takes, also beside others' work."""


@pytest.fixture
def queues():
    collector = QueueCollector(Kernel(None), 100)
    collector.start()
    yield collector
    collector.stop()


@pytest.fixture
def worker():
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield process
    process.kill()
    process.wait()


def usage(cpu_ns):
    """A row of what one process used."""
    return Batch(rows={"usage": [(0, 1, 0, cpu_ns, *[0] * 12)]})


SHORT_TICKS = math.ceil(math.log2(1.0 / FIRST_TICK_S))


def quiet_ticks(scheduler, count):
    for _ in range(count):
        scheduler.on_tick([usage(1_000_000)], 1.0)


def readable(fds, timeout_ms):
    waiting = select.poll()
    for fd in fds:
        waiting.register(fd, select.POLLIN)
    return bool(waiting.poll(timeout_ms))


def stackless(**options):
    return Config(on_cpu=False, off_cpu=False, host_metrics=True, **options)


def test_work_ends_the_rest(queues, worker):
    scheduler = AdaptiveScheduler(stackless(), [queues])
    quiet_ticks(scheduler, TICKS_TO_REST)
    assert scheduler.tick_s == 5.0
    assert readable(scheduler.fds, SOON_MS)
    assert scheduler.is_woken()
    scheduler.on_tick([usage(1_000_000)], 0.3)
    assert scheduler.tick_s == 1.0
    assert not scheduler.fds
    assert not scheduler.is_woken()


def test_the_timer_wakes_nobody_who_does_not_ask(queues, worker):
    fd = queues.arm_wakeup()
    assert readable([fd], SOON_MS)
    queues.disarm_wakeup()
    assert not readable([fd], 500)


def test_where_a_timer_is_refused_the_sampling_clocks_look(worker, monkeypatch):
    def looks():
        queues.drain(0, False)
        began = time.monotonic()
        time.sleep(2)
        return queues.drain(0, False).seen / (time.monotonic() - began)

    monkeypatch.setattr(QueueCollector, "_begin", lambda self: None)
    queues = QueueCollector(Kernel(None), 100)
    queues.start()
    try:
        [notice] = queues.drain(0, False).rows["event"]
        assert "sampling clocks" in notice[-1]
        assert 75 < looks() < 110
        monkeypatch.undo()
        deadline = time.monotonic() + 20
        while queues.is_on_clocks():
            assert time.monotonic() < deadline
            assert "event" not in queues.drain(0, False).rows, "reported once"
            time.sleep(0.2)
        assert 75 < looks() < 110
    finally:
        queues.stop()


def test_ticks_in_which_something_was_used_bring_no_rest(queues):
    scheduler = AdaptiveScheduler(stackless(), [queues])
    for _ in range(TICKS_TO_REST):
        quiet_ticks(scheduler, TICKS_TO_REST - 1)
        scheduler.on_tick([usage(120_000_000)], 1.0)
    assert scheduler.tick_s == 1.0


@pytest.mark.parametrize("kind", ["device", "block"])
def test_calls_of_devices_bring_no_rest(queues, kind):
    row = (0, kind, "", "", "", "", *[0] * 10)
    scheduler = AdaptiveScheduler(stackless(), [queues])
    for _ in range(TICKS_TO_REST):
        scheduler.on_tick([Batch(rows={"activity": [row]})], 1.0)
    assert scheduler.tick_s == (1.0 if kind == "device" else 5.0)


@pytest.mark.parametrize(
    "config",
    [
        stackless(rest_s=0),
        stackless(pids=frozenset([1])),
        Config(off_cpu=False, host_metrics=True),
        Config(on_cpu=False, off_cpu=False),
    ],
)
def test_who_takes_stacks_or_cannot_be_woken_does_not_rest(queues, config):
    scheduler = AdaptiveScheduler(config, [queues])
    # Where processes are chosen, the first ticks are short ones.
    quiet_ticks(scheduler, TICKS_TO_REST + SHORT_TICKS)
    assert scheduler.tick_s == 1.0
