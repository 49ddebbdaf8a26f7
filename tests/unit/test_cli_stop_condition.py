# SPDX-License-Identifier: Apache-2.0
"""When a recording ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from sonde.cli.child import Child
from sonde.cli.stop_condition import StopCondition
from sonde.errors import UsageError

pytestmark = pytest.mark.machine


def test_it_ends_when_its_time_is_up() -> None:
    with StopCondition(duration_s=0.05) as condition:
        condition.begin()
        assert not condition.is_met()
        time.sleep(0.06)
        assert condition.is_met()
    assert condition.reason == "0.05 s are over"


def test_it_ends_when_the_last_watched_process_has_ended() -> None:
    first, second = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    with StopCondition(pids=[first.pid, second.pid]) as condition:
        first.kill()
        first.wait()
        assert not condition.is_met()
        second.kill()
        second.wait()
        assert condition.is_met()
    assert condition.reason == "all watched processes have ended"


@pytest.mark.parametrize("pid", [0, -1, 2**22 + 1, 2**40])
def test_a_pid_that_is_no_process_is_wrong_use(pid: int) -> None:
    with pytest.raises(UsageError, match=f"no process {pid}"):
        StopCondition(pids=[pid])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_aborts(number: signal.Signals) -> None:
    former = signal.getsignal(number)
    with StopCondition() as condition:
        os.kill(os.getpid(), number)
        assert condition.is_met()
        assert condition.reason == "stopped by a signal"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
            time.sleep(1)
    assert signal.getsignal(number) is former


def test_a_hang_up_asks_once_and_never_aborts() -> None:
    with StopCondition() as condition:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
        assert condition.is_met()
        assert condition.reason == "stopped by a signal"


def test_a_hang_up_that_is_ignored_stays_ignored() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopCondition() as condition:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not condition.is_met()
    finally:
        signal.signal(signal.SIGHUP, former)


def test_with_a_command_the_end_is_the_commands_and_a_signal_is_passed_on() -> None:
    child = Child(["sh", "-c", "trap 'exit 7' TERM; echo ready; while :; do sleep 0.02; done"])
    with StopCondition(child=child) as condition:
        child.start()
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(100):
            if condition.is_met():
                break
            time.sleep(0.02)
    assert condition.reason.endswith("exited with 7")
