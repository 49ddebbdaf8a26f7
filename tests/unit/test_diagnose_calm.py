# SPDX-License-Identifier: Apache-2.0
"""Ticks are further apart while little happens, until something rises."""

from __future__ import annotations

import os

from test_diagnose import PLACES, TICK_NS, TICKS, moment, process, usual

from sonde.agent import signals
from sonde.agent.diagnosis_agent import CALM_S, DiagnosisScheduler
from sonde.agent.slowdown_watcher import CALM_CPUS, Watcher
from sonde.collect.collector import Batch
from sonde.collect.metrics import ThreadRunner
from sonde.config import Config
from sonde.diagnose.detector import Detector
from sonde.model.owner import Owner
from sonde.model.process import Process
from sonde.model.rows import Rows

SERVER = os.getppid()
S = 10**9


def test_one_odd_tick_is_no_suspicion_but_a_reason_to_look_again_soon():
    detector = Detector()
    for number in range(TICKS):
        assert detector.add(usual(number), PLACES, set()) == []
        assert not detector.is_alert
    assert detector.add(moment(TICKS, p100=process(0.7, 0.2)), PLACES, set()) == []
    assert detector.is_alert
    assert detector.add(usual(TICKS + 1), PLACES, set()) == []
    assert not detector.is_alert


def test_a_process_that_uses_a_cpu_is_one_after_a_second():
    detector = Detector()
    detector.add(usual(0), PLACES, set())
    assert not detector.may_be_victim(100)
    for number in range(1, 6):
        detector.add(usual(number), PLACES, set())
    assert detector.may_be_victim(100)
    assert not detector.may_be_victim(300)


def watcher() -> Watcher:
    def running(pid: int) -> Process:
        return Process(pid, 1, 1, "serve", "serve", Owner())

    return Watcher(lambda *_: None, lambda _: (), lambda pid, _: running(pid), running, 49)


def used(share: float, calls: int = 0) -> list[Batch]:
    """The rows of a tick in which the server used so much of a CPU, and called a device."""
    usage = (0, SERVER, 1, int(share * TICK_NS), 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    call = (0, "device", "cuLaunchKernel", "", "launch", "", 0, SERVER, 0, SERVER, calls, 9, 0, 9)
    rows = Rows(usage=[usage], activity=[(*call, 0, 0)] if calls else [])
    return [Batch(rows=rows)]


def calm_after(share: float, calls: int = 0) -> bool:
    one = watcher()
    begin = 1_000 * S
    for number in range(TICKS):
        since = begin + number * TICK_NS
        one.on_tick(since, since + TICK_NS, used(share, calls))
    assert SERVER in one.chosen()
    return one.is_calm()


def test_a_server_with_little_to_do_lets_ticks_be_further_apart():
    assert calm_after(CALM_CPUS / 4)


def test_one_that_works_or_calls_a_device_does_not():
    assert not calm_after(CALM_CPUS * 2)
    assert not calm_after(CALM_CPUS / 4, calls=3)


def test_how_far_apart_ticks_are():
    scheduler = DiagnosisScheduler(0.25)
    assert scheduler.tick_s == 0.25
    scheduler.is_calm = True
    assert scheduler.tick_s == CALM_S
    scheduler.is_idle = True
    assert scheduler.tick_s > CALM_S
    slow = DiagnosisScheduler(1.0)
    slow.is_calm = True
    assert slow.tick_s == 1.0


def test_metrics_of_the_machine_that_nobody_reads_are_not_polled():
    config = Config(host_metrics=True)
    read = signals.runners(config)
    unread = signals.runners(config, polls_host=False)
    assert any(isinstance(it, ThreadRunner) for it in read)
    assert not any(isinstance(it, ThreadRunner) for it in unread)
    assert len(unread) == len(read) - 1
