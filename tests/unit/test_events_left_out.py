# SPDX-License-Identifier: Apache-2.0
"""What the event loop does with process events beyond the share of a party."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace

import pytest

from sonde.agent import event_loop
from sonde.agent.event_loop import LEFT_OUT, MAX_UNSEEN, REPORT_S, EventLoop
from sonde.agent.null_process_events import NullProcessEvents
from sonde.config import Config
from sonde.resolve.processes import ProcessTable


class Events(NullProcessEvents):
    """A stream of which things were left out."""

    def __init__(self):
        self.waiting = []
        self.charged_s = []
        self.parties = []

    def charge(self, cpu_s):
        self.charged_s.append(cpu_s)

    def unseen(self, most):
        found, self.waiting = self.waiting[:most], self.waiting[most:]
        return found

    def take_left_out(self):
        found, self.parties = self.parties, []
        return found


class Listener:
    """Notes what it is called with."""

    needs_events_first = False
    is_charged = False

    def __init__(self):
        self.calls = []

    def on_process_events(self, events):
        self.calls.append(("events", list(events)))

    def on_events_lost(self):
        self.calls.append(("lost",))

    def on_processes_unseen(self, pids):
        self.calls.append(("unseen", list(pids)))


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests put forward."""
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(event_loop.time, "monotonic", lambda: clock.now_s)
    return clock


@pytest.fixture
def table():
    return ProcessTable()


def made(table, **config):
    resolver = Listener()
    resolver.processes = table
    parts = (resolver, Listener(), [], SimpleNamespace(fds=[]))
    return EventLoop(Config(**config), Events(), *parts, names_code=True)


@pytest.fixture
def loop(table, clock):
    return made(table)


def test_processes_of_which_events_were_left_out_are_read_again_few_at_a_time(loop):
    loop._events.waiting = list(range(1, MAX_UNSEEN + 3))
    other = Listener()
    loop.listen([], [other])
    loop.dispatch()
    loop.dispatch()
    assert [it[1] for it in other.calls if it[0] == "unseen"] == [
        list(range(1, MAX_UNSEEN + 1)),
        [MAX_UNSEEN + 1, MAX_UNSEEN + 2],
    ]
    assert ("lost",) not in other.calls, "the others are not read again for it"
    assert len(loop._events.charged_s) == 2


def test_whose_events_were_left_out_is_reported_once_in_a_while(loop, clock):
    assert loop.left_out(5) == []
    loop._events.left_out = 1000
    loop._events.parties = [(65_534, os.getpid(), 900), (-2, 0, 100)]
    loop._resolver.processes.reread([os.getpid()])
    most, other = loop.left_out(5)
    assert loop.lost == 1000
    assert (most.kind, most.name, most.pid, most.value) == ("notice", LEFT_OUT, os.getpid(), 900.0)
    assert "user 65534" in most.text
    assert f"process {os.getpid()} (" in most.text
    assert "not known whose" in other.text
    loop._events.left_out = 2000
    assert loop.left_out(6) == []
    clock.now_s += REPORT_S
    loop._events.parties = [(65_534, 0, 1000)]
    assert [it.value for it in loop.left_out(7)] == [1000.0]


def test_a_recording_of_given_processes_names_no_other(table, clock):
    loop = made(table, pids=(os.getpid(),))
    table.reread([os.getpid(), os.getppid()])
    loop._events.left_out = 1000
    loop._events.parties = [(65_534, os.getppid(), 900), (1, os.getpid(), 100)]
    other, own = loop.left_out(5)
    assert (other.pid, other.start_ns, other.text) == (0, 0, "events of processes of user 65534")
    assert own.pid == os.getpid()
    assert f"process {os.getpid()} (" in own.text


def test_a_process_is_read_again_as_it_is_now(table):
    child = subprocess.Popen(["/bin/sleep", "60"])
    try:
        table.reread([child.pid])
        process = table.last_of(child.pid)
        assert process is not None
        process.comm = "before"
        image = process.image
        table.reread([child.pid])
        assert table.last_of(child.pid) is process
        assert process.comm == "sleep"
        assert process.image is not image
        assert not process.image.is_complete, "its mappings are read from /proc"
    finally:
        child.kill()
        child.wait()
    table.reread([child.pid])
    assert not process.is_alive
    table.reread([child.pid, 2**22 + 5])
    assert table.live == 0
