# SPDX-License-Identifier: Apache-2.0
"""Sources that answer, fail, vanish and hang: the rest goes on, the gap is marked and ends."""

from __future__ import annotations

import json
import threading
import time

import pytest

from sonde._native import ExitEvent, ForkEvent, MmapEvent
from sonde.collect import metrics
from sonde.collect.metrics import Metrics, ThreadRunner, cut_to_shares
from sonde.collect.polling import Points, Poll, Schedule, SourceUnavailable

SECOND = 1_000_000_000


class Scripted:
    """A source that answers as it is set to."""

    name = "scripted"

    def __init__(self):
        self.fails: dict[str, SourceUnavailable] = {}
        self.asked: list[str] = []
        self.hang = threading.Event()
        self.hang.set()

    def open(self):
        self._answer("open")

    def polls(self):
        return [
            Poll("quick", 0.1, lambda points: self._say("quick", points)),
            Poll("slow", 1.0, lambda points: self._say("slow", points)),
        ]

    def close(self):
        self.asked.append("close")

    def _say(self, name, points):
        self._answer(name)
        points.add(f"sonde.{name}", 1.0)

    def _answer(self, name):
        self.asked.append(name)
        self.hang.wait(20)
        if name in self.fails:
            raise self.fails[name]


class Run:
    """A schedule with a clock that the test moves."""

    def __init__(self, source):
        self.now_ns = SECOND
        self.schedule = Schedule(source, clock=lambda: self.now_ns)
        self.points = Points()

    def until(self, seconds):
        end_ns = self.now_ns + int(seconds * SECOND)
        while True:
            due_ns = self.schedule.run_due(self.points)
            assert due_ns > self.now_ns
            if due_ns > end_ns:
                self.now_ns = end_ns
                return
            self.now_ns = due_ns

    def up(self, name):
        return [
            value
            for _, series, labels, value in self.points.metrics
            if series == "sonde.source.up" and json.loads(labels)["sonde.source"] == name
        ]

    def notes(self):
        return [(row[2], row[6]) for row in self.points.events]


def test_each_poll_keeps_its_own_beat():
    source = Scripted()
    Run(source).until(9.95)
    assert source.asked.count("quick") == 100
    assert source.asked.count("slow") == 10


def test_beats_missed_are_skipped_not_made_up_for():
    source = Scripted()
    run = Run(source)
    run.until(0.5)
    run.now_ns += 60 * SECOND
    before = len(source.asked)
    run.until(0.05)
    assert source.asked[before:].count("quick") <= 2


class Resting(Scripted):
    """Its device does nothing until the test sets it to work; the quick question sees that."""

    at_rest = True

    def polls(self):
        def rests():
            return self.at_rest

        quick, slow = super().polls()
        return [
            Poll(quick.name, quick.period_s, quick.read, rests),
            Poll(slow.name, slow.period_s, slow.read, rests, rest_s=5.0),
        ]


def asked(run, source, seconds):
    before = len(source.asked)
    run.until(seconds)
    new = source.asked[before:]
    return new.count("quick"), new.count("slow")


def test_what_a_device_at_rest_is_asked_is_asked_less_often():
    source = Resting()
    run = Run(source)
    run.until(1)
    assert asked(run, source, 10) == (10, 2)


def test_a_device_that_begins_to_work_is_asked_everything_at_once():
    source = Resting()
    run = Run(source)
    run.until(1.5)
    source.at_rest = False
    assert asked(run, source, 0.5) == (1, 1)  # the quick question comes first, and sees it
    assert asked(run, source, 2) == (20, 2)


def test_a_device_that_is_about_to_be_used_is_not_taken_for_at_rest():
    source = Resting()
    run = Run(source)
    run.until(1.5)
    run.schedule.mark_active()
    quick, slow = asked(run, source, 2)
    assert quick in (20, 21)
    assert slow >= 2
    run.until(10)
    assert asked(run, source, 10) == (10, 2)


def test_nothing_is_asked_more_often_than_a_machine_at_rest_allows():
    source = Scripted()
    run = Run(source)
    run.until(1)
    run.schedule.set_min_interval(5.0)
    run.until(5)
    assert asked(run, source, 10) == (2, 2)
    run.schedule.set_min_interval(0.0)
    quick, slow = asked(run, source, 2)
    assert quick in (19, 20)
    assert slow == 2


class Wrapping(Scripted):
    """Its quick counter wraps: it has to be asked in time."""

    def polls(self):
        quick, slow = super().polls()
        return [Poll(quick.name, quick.period_s, quick.read, may_wait=False), slow]


def test_what_wraps_is_asked_in_time_all_the_same():
    source = Wrapping()
    run = Run(source)
    run.until(1)
    run.schedule.set_min_interval(5.0)
    run.until(5)
    assert asked(run, source, 10) == (100, 2)


def test_one_signal_lost_leaves_the_others():
    source = Scripted()
    source.fails["slow"] = SourceUnavailable("no permission")
    run = Run(source)
    run.until(20)
    assert source.asked.count("quick") >= 199
    assert 4 <= source.asked.count("slow") <= 6  # 0, 1, 3, 7, 15 s: tried again ever more rarely
    assert run.notes() == [("signal_lost", "scripted.slow: no permission")]
    assert run.up("scripted.slow") == [0.0]
    assert set(run.up("scripted")) == {1.0}
    del source.fails["slow"]
    run.until(20)
    assert run.notes()[1][0] == "signal_back"
    assert run.up("scripted.slow") == [0.0, 1.0]


def test_a_defect_of_one_signal_leaves_the_others():
    source = Scripted()
    source.fails["slow"] = KeyError("unforeseen")
    run = Run(source)
    run.until(10)
    assert source.asked.count("quick") >= 99
    reason = "scripted.slow: a defect of Sonde: KeyError: 'unforeseen'"
    assert run.notes() == [("signal_lost", reason)]


def test_a_source_that_vanishes_is_closed_and_opened_again():
    source = Scripted()
    run = Run(source)
    run.until(3)
    source.fails["quick"] = SourceUnavailable("device lost", whole=True)
    source.fails["open"] = SourceUnavailable("driver not loaded")
    run.until(10)
    assert source.asked.count("close") == 1
    assert run.notes() == [("signal_lost", "scripted: device lost")]
    source.fails.clear()
    run.until(20)
    _, back = run.notes()
    assert back[0] == "signal_back"
    assert run.up("scripted")[-1] == 1.0
    assert 0.0 in run.up("scripted")


def test_a_source_that_hangs_is_a_gap_of_its_own(monkeypatch):
    monkeypatch.setattr(metrics, "SILENT_S", 0.3)
    hanging, lively = Scripted(), Scripted()
    collector = Metrics([ThreadRunner("one", [hanging]), ThreadRunner("two", [lively])])
    collector.start()
    try:
        time.sleep(0.3)
        collector.drain(0, False)
        hanging.hang.clear()
        time.sleep(0.7)
        batch = collector.drain(0, False)
        assert [row[6] for row in batch.rows["event"]] == ["scripted.quick: does not answer"]
        assert sum(row[1] == "sonde.quick" for row in batch.metrics) >= 5  # of the other
        hanging.hang.set()
        time.sleep(0.3)
        batch = collector.drain(0, False)
        assert [row[2] for row in batch.rows["event"]] == ["signal_back"]
    finally:
        collector.stop()


class Runs:
    """A runner that notes the calls it gets."""

    name, lost = "runs", 0

    def __init__(self):
        self.calls = []

    def set_min_interval(self, seconds):
        self.calls.append(seconds)

    def mark_active(self):
        self.calls.append("active")

    def mark_idle(self):
        self.calls.append("idle")


def mapped(path, pid=7, time_ns=1):
    return MmapEvent(time_ns, pid, pid, 0, 4096, 0, (8, 1, 99), path)


def ended(pid, tid, time_ns=1):
    return ExitEvent(time_ns, pid, 1, tid, 1)


def test_a_process_that_maps_a_driver_s_library_is_about_to_use_a_device():
    runs = Runs()
    collector = Metrics([runs])
    others = mapped("/usr/lib/libc.so.6"), mapped("/opt/libcudart.so.12")
    collector.on_process_events([*others, ForkEvent(1, 7, 1, 7, 1)])
    assert not runs.calls
    collector.on_process_events([mapped("/usr/lib/x86_64-linux-gnu/libcuda.so.580.159")])
    assert runs.calls == ["active"]


CUDA = "/usr/lib/x86_64-linux-gnu/libcuda.so.580.159"


def test_who_maps_it_and_ends_was_not_about_to():
    runs = Runs()
    collector = Metrics([runs])
    collector.on_process_events(
        [mapped(CUDA), mapped(CUDA, pid=8), ended(7, 99), ended(7, 7), ended(9, 9)]
    )
    assert runs.calls == ["active"], "another one is there"
    collector.on_process_events([ended(8, 8)])
    assert runs.calls == ["active", "idle"]
    collector.on_process_events([mapped(CUDA), ended(7, 7)])  # nvidia-smi, known when it is gone
    assert runs.calls[2:] == ["idle"]
    later_ns = 60_000_000_000  # a process that came long ago and does nothing is none of them
    collector.on_process_events(
        [mapped(CUDA, pid=9), mapped(CUDA, time_ns=later_ns), ended(7, 7, later_ns)]
    )
    assert runs.calls[3:] == ["idle"]
    collector.on_process_events([mapped(CUDA, pid=n) for n in range(10, 5_000)])
    assert len(collector._newcomers) <= 1_024


def test_a_device_that_is_not_used_after_all_is_at_rest_again():
    source = Resting()
    run = Run(source)
    run.until(1.5)
    run.schedule.mark_active()
    run.until(2.0)
    run.schedule.mark_idle()
    run.until(3.5)
    assert asked(run, source, 10) == (10, 2)


def test_a_thread_that_asks_goes_on_at_once_when_a_machine_works_again():
    source = Scripted()
    beside = ThreadRunner("beside", [source])
    beside.set_min_interval(60.0)
    beside.start()
    deadline_s = time.monotonic() + 20
    while "slow" not in source.asked and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert source.asked == ["open", "quick", "slow"]
    beside.set_min_interval(0.0)
    while source.asked.count("quick") < 4 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    beside.stop()
    assert source.asked.count("quick") >= 4


def test_events_beyond_the_room_of_a_thread_are_counted(monkeypatch):
    monkeypatch.setattr(metrics, "POINTS_KEPT", 2)
    source = Scripted()

    def report(points):
        for number in range(5):
            points.note("xid", number, "an event")

    source.polls = lambda: [Poll("events", 60.0, report)]
    runner = ThreadRunner("one", [source])
    runner.start()
    deadline_s = time.monotonic() + 20
    while not source.asked and time.monotonic() < deadline_s:
        time.sleep(0.01)
    runner.stop()
    assert len(runner.take().events) == 2
    assert runner.lost >= 3


def test_one_source_takes_no_room_of_the_others(monkeypatch):
    monkeypatch.setattr(metrics, "POINTS_KEPT", 100)
    flood, machine = Scripted(), Scripted()

    def report(count):
        def read(points):
            for number in range(count):
                points.add("sonde.quick", number)
                points.note("xid", number, "an event")

        return read

    flood.polls = lambda: [Poll("flood", 0.02, report(5_000))]
    machine.polls = lambda: [Poll("cpu", 0.02, report(1))]
    machine.name = "machine"
    runner = ThreadRunner("one", [flood, machine])
    beyond = 0
    runner._ended.set()  # its turns are taken here
    for _ in range(20):
        time.sleep(0.02)
        for number in (0, 1):
            runner._run_due(number)
    own = runner._points[1]
    assert len(own.events) == 20
    assert sum(row[1] == "sonde.quick" for row in own.metrics) == 20
    assert len(runner._points[0].metrics) + len(own.metrics) == 100
    taken = runner.take()
    assert len(taken.metrics) == len(taken.events) == 100
    beyond = 20 * 2 * 5_000 - 200
    assert runner.lost > beyond


@pytest.mark.parametrize(
    ("lengths", "kept"),
    [([5, 5], [5, 5]), ([100, 5, 3], [12, 5, 3]), ([0, 30], [0, 20]), ([30, 30], [10, 10])],
)
def test_rows_are_cut_to_equal_shares_of_what_others_leave(lengths, kept):
    rows = [list(range(length)) for length in lengths]
    assert cut_to_shares(rows, 20) == sum(lengths) - sum(kept)
    assert [len(it) for it in rows] == kept
    assert all(it == list(range(len(it))) for it in rows)  # those that came first


def test_too_many_processes_that_map_a_drivers_library_end_one_mark_at_a_time(monkeypatch):
    monkeypatch.setattr(metrics, "MAX_NEWCOMERS", 3)
    collector = Metrics([Runs()])
    library = "/usr/lib/libcuda.so.1"
    collector.on_process_events([mapped(library, pid) for pid in (1, 2, 3, 1, 4)])
    assert list(collector._newcomers) == [3, 1, 4]
