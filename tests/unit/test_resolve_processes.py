# SPDX-License-Identifier: Apache-2.0
"""Processes by (pid, start): born, renamed, running another program, dead, their pid used again.

Events speak of pids that no kernel gives out, so that /proc knows nothing of them.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count

import pytest

from sonde import procfs
from sonde._native import CommEvent, ExitEvent, ForkEvent, MmapEvent, ProcessEvent
from sonde.model.process import Process
from sonde.resolve.counters import Counters
from sonde.resolve.process_image import MAX_PENDING
from sonde.resolve.processes import GRACE_NS, ProcessTable
from sonde.resolve.tracked_process import MAX_THREADS, TrackedProcess

SHELL, CHILD, OTHER = 500_000_001, 500_000_002, 500_000_003
Event = Callable[[int], ProcessEvent]
"""An event for which only its time is missing."""


class Story:
    """Events one after the other, a millisecond apart, from a second ago on."""

    def __init__(self) -> None:
        self.table = ProcessTable(Counters())
        self.clock = count(time.monotonic_ns() - 1_000_000_000, 1_000_000)
        self.now_ns = 0

    def feed(self, *events: Event) -> None:
        stamped = []
        for event in events:
            self.now_ns = next(self.clock)
            stamped.append(event(self.now_ns))
        self.table.feed(stamped)

    def start_ns(self) -> int:
        """As the kernel would report the start of a process born at the last event."""
        boot = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
        start = self.now_ns + boot
        return start - start % procfs.START_UNIT_NS

    def live(self, pid: int) -> TrackedProcess:
        process = self.table._live[pid]
        return self.table.find(pid, process.start_ns)


def fork(pid: int, ppid: int) -> Event:
    return lambda time_ns: ForkEvent(time_ns, pid, ppid, pid, ppid)


def thread(pid: int, tid: int, by: int) -> Event:
    return lambda time_ns: ForkEvent(time_ns, pid, pid, tid, by)


def named(pid: int, tid: int, comm: str, is_exec: bool = False) -> Event:
    return lambda time_ns: CommEvent(time_ns, pid, tid, comm, is_exec)


def execute(pid: int, comm: str, program: str, at: int = 0x400000) -> tuple[Event, Event]:
    return named(pid, pid, comm, True), mmap(pid, at, program)


def mmap(pid: int, at: int, path: str, length: int = 0x1000) -> Event:
    inode = sum(os.fsencode(path)) if path.startswith("/") else 0
    return lambda time_ns: MmapEvent(time_ns, pid, pid, at, length, 0, (254, 1, inode), path)


def leave(pid: int, tid: int = 0) -> Event:
    return lambda time_ns: ExitEvent(time_ns, pid, 1, tid or pid, 1)


def paths(process: TrackedProcess) -> list[str]:
    return [mapping.path for mapping in process.space().mappings]


def test_a_process_is_known_from_its_events_alone() -> None:
    story = Story()
    story.feed(fork(SHELL, OTHER))
    start = story.start_ns()
    story.feed(*execute(SHELL, "sh", "/bin/dash"), mmap(SHELL, 0x7F0000, "/lib/libc.so.6"))
    process = story.table.find(SHELL, start)
    assert process.record() == Process(SHELL, start, OTHER, "sh", "dash")
    assert paths(process) == ["/bin/dash", "/lib/libc.so.6"]
    assert story.table.counters.processes_unknown == 0


def test_the_start_in_the_samples_decides_where_the_event_was_a_little_off() -> None:
    story = Story()
    story.feed(fork(SHELL, OTHER))
    start = story.start_ns()
    for exact in (start - procfs.START_UNIT_NS, start):
        process = story.table.find(SHELL, exact)
        assert process.start_ns == exact
    assert len(story.table) == 2  # it and the parent that nothing is known of


def test_a_child_has_its_parents_mappings_until_it_runs_a_program() -> None:
    story = Story()
    story.feed(fork(SHELL, OTHER), *execute(SHELL, "sh", "/bin/dash"), fork(CHILD, SHELL))
    child = story.live(CHILD)
    assert (child.comm, child.exe, paths(child)) == ("sh", "dash", ["/bin/dash"])
    story.feed(mmap(CHILD, 0x7F0000, "/lib/of_child.so"))
    assert paths(child) == ["/bin/dash", "/lib/of_child.so"]
    assert paths(story.live(SHELL)) == ["/bin/dash"]
    story.feed(*execute(CHILD, "ls", "/bin/ls"))
    assert (child.comm, child.exe, paths(child)) == ("ls", "ls", ["/bin/ls"])
    assert paths(story.live(SHELL)) == ["/bin/dash"]


def test_forks_in_a_long_row_still_lead_to_the_first_ones_mappings() -> None:
    story = Story()
    story.feed(fork(SHELL, OTHER), *execute(SHELL, "sh", "/bin/dash"))
    for n in range(3000):
        story.feed(fork(SHELL + n + 1, SHELL + n), leave(SHELL + n))
    assert paths(story.live(SHELL + 3000)) == ["/bin/dash"]


def test_what_a_process_ran_before_is_kept_for_the_samples_of_that_interval() -> None:
    story = Story()
    story.feed(fork(SHELL, OTHER), *execute(SHELL, "sh", "/bin/dash"))
    story.feed(*execute(SHELL, "ls", "/bin/ls", at=0x900000))
    process = story.live(SHELL)
    assert process.previous is not None
    assert [it.path for it in process.previous.space().mappings] == ["/bin/dash"]
    story.table.expire(story.now_ns + 2 * GRACE_NS)
    assert process.previous is None or process.dead_ns


def test_the_dead_are_kept_for_a_while_with_all_that_was_known() -> None:
    story = Story()
    story.feed(fork(SHELL, OTHER), *execute(SHELL, "job", "/opt/job"))
    start = story.live(SHELL).start_ns
    story.feed(leave(SHELL))
    process = story.table.find(SHELL, start)
    assert (process.is_alive, process.comm, process.exe) == (False, "job", "job")
    assert paths(process) == ["/opt/job"]
    story.table.expire(story.now_ns + 1)  # the samples up to now may not have been drained yet
    assert paths(process) == ["/opt/job"]
    story.table.expire(story.now_ns + GRACE_NS - 1)
    assert paths(process) == []
    assert story.table.find(SHELL, start).record() == Process(SHELL, start, OTHER, "job", "job")
    story.table.expire(story.now_ns + GRACE_NS)
    assert story.table.find(SHELL, start) is not process
    assert story.table.counters.processes_unknown == 1


def test_two_processes_with_one_pid_are_two() -> None:
    story = Story()
    story.feed(fork(SHELL, OTHER), *execute(SHELL, "first", "/opt/first"))
    first = story.live(SHELL)
    story.feed(leave(SHELL))
    for _ in range(50):
        next(story.clock)
    story.feed(fork(SHELL, OTHER), *execute(SHELL, "second", "/opt/second"))
    second = story.live(SHELL)
    assert second is not first
    assert story.table.find(SHELL, first.start_ns) is first
    assert story.table.find(SHELL, second.start_ns) is second
    assert (paths(first), paths(second)) == (["/opt/first"], ["/opt/second"])


def test_a_birth_without_a_death_before_it_ends_the_older_process() -> None:
    story = Story()
    story.feed(fork(SHELL, OTHER))
    first = story.live(SHELL)
    for _ in range(50):
        next(story.clock)
    story.feed(fork(SHELL, OTHER))
    assert not first.is_alive
    assert story.live(SHELL) is not first


def test_a_process_whose_birth_was_missed_is_known_by_what_it_does() -> None:
    story = Story()
    story.feed(mmap(SHELL, 0x400000, "/opt/missed"), named(SHELL, SHELL, "missed"))
    start = 77 * procfs.START_UNIT_NS
    process = story.table.find(SHELL, start)
    assert (process.start_ns, process.comm, paths(process)) == (start, "missed", ["/opt/missed"])


def test_of_a_process_without_events_only_the_pid_is_known() -> None:
    story = Story()
    process = story.table.find(SHELL, 123 * procfs.START_UNIT_NS)
    assert process.record() == Process(SHELL, 123 * procfs.START_UNIT_NS)
    assert (process.is_alive, paths(process)) == (False, [])
    assert story.table.thread_name(process, SHELL) == ""


def test_threads_have_names_of_their_own() -> None:
    story = Story()
    story.feed(fork(SHELL, OTHER), *execute(SHELL, "main", "/opt/job"))
    story.feed(thread(SHELL, SHELL + 10, SHELL), named(SHELL, SHELL + 10, "loader"))
    story.feed(thread(SHELL, SHELL + 11, SHELL + 10))
    process = story.live(SHELL)
    names = [story.table.thread_name(process, SHELL + n) for n in (0, 10, 11, 12)]
    assert names == ["main", "loader", "loader", ""]
    assert process.comm == "main"
    story.feed(leave(SHELL, SHELL + 10))
    assert process.is_alive


def test_a_thread_that_runs_a_program_takes_the_place_of_the_first_one() -> None:
    story = Story()
    story.feed(fork(SHELL, OTHER), *execute(SHELL, "old", "/opt/old"))
    process = story.live(SHELL)
    story.feed(leave(SHELL), *execute(SHELL, "new", "/opt/new"))
    assert story.live(SHELL) is process
    assert (process.is_alive, process.comm, paths(process)) == (True, "new", ["/opt/new"])


def test_an_older_events_death_does_not_hit_a_newer_process() -> None:
    table = ProcessTable()
    table.scan()
    me = table.find(os.getpid(), _own_start_ns())
    table.feed([leave(os.getpid())(1)])
    assert me.is_alive


def test_everything_that_runs_is_taken_in_at_the_start() -> None:
    table = ProcessTable()
    table.scan()
    me = table.find(os.getpid(), _own_start_ns())
    assert me.exe.startswith("python")
    assert me.ppid == os.getppid()
    assert table.thread_name(me, os.getpid()) == me.comm
    assert any(it.name.startswith("libc") for it in me.space().mappings)
    before = len(table)
    table.scan()
    assert table.find(os.getpid(), _own_start_ns()) is me
    assert abs(len(table) - before) < 20


def test_lost_events_are_made_good_from_proc() -> None:
    table = ProcessTable()
    table.scan()
    me = table.find(os.getpid(), _own_start_ns())
    me.on_exec(0)
    assert paths(me) == []
    table.resync()
    assert any(path.startswith("/") for path in paths(me))


def test_processes_that_vanished_without_a_word_are_noticed() -> None:
    story = Story()
    story.feed(fork(SHELL, OTHER))
    process = story.live(SHELL)
    story.table.expire(time.monotonic_ns())
    assert not process.is_alive


def test_names_show_no_control_characters() -> None:
    story = Story()
    story.feed(fork(SHELL, OTHER), *execute(SHELL, "a\x1b[2Jb", "/opt/a\nb\udcff"))
    record = story.live(SHELL).record()
    assert record.comm == r"a\x1b[2Jb"
    assert "\n" not in record.exe
    record.exe.encode()


def test_the_table_is_bounded() -> None:
    table = ProcessTable(max_processes=100)
    now = time.monotonic_ns()
    for n in range(1000):
        table.feed([fork(SHELL + n, OTHER)(now + n)])
        if n % 3 == 0:
            table.feed([leave(SHELL + n)(now + n)])
        table.find(SHELL + 1, 0)
        assert len(table) <= 101
    assert table.counters.processes_evicted >= 880


def test_what_one_process_reports_is_bounded() -> None:
    story = Story()
    story.feed(fork(SHELL, OTHER), named(SHELL, SHELL, "x", True))
    story.feed(*(mmap(SHELL, n << 16, "/x") for n in range(MAX_PENDING + 50)))
    for n in range(MAX_THREADS + 50):
        story.feed(named(SHELL, SHELL + n, f"t{n}"))
        story.feed(thread(SHELL, SHELL + 100_000 + n, SHELL + n))
    process = story.live(SHELL)
    assert len(process.space()) == MAX_PENDING
    assert story.table.counters.mappings_left_out == 50
    assert len(process.threads or ()) <= MAX_THREADS


def test_a_thousand_short_lives_cost_milliseconds() -> None:
    """What a machine that compiles all day makes the agent do in a second."""
    now = time.monotonic_ns()
    events: list[ProcessEvent] = []
    for n in range(1000):
        pid, at = SHELL + n, now + n * 100
        events.append(ForkEvent(at, pid, OTHER, pid, OTHER))
        events.append(CommEvent(at, pid, pid, "cc1", True))
        events += [
            MmapEvent(at, pid, pid, k << 16, 4096, 0, (254, 1, k), f"/lib/{k}") for k in range(1, 9)
        ]
        events.append(ExitEvent(at, pid, OTHER, pid, OTHER))
    table = ProcessTable()
    table.feed([CommEvent(now, OTHER, OTHER, "make", False)])
    gc.freeze()  # as the agent does: not the cost of what other tests left
    try:
        start = time.process_time()
        table.feed(events)
        assert time.process_time() - start < 0.1
    finally:
        gc.unfreeze()


def _own_start_ns() -> int:
    found = procfs.read_stat(os.getpid())
    assert found
    return found.start_ns


def test_a_process_ends_with_its_last_thread_not_with_its_first() -> None:
    """And is polled for, as no event is surely that of the last."""
    code = "import ctypes, threading, sys\n"
    code += "threading.Thread(target=sys.stdin.read).start(); print(flush=True)\n"
    code += "ctypes.CDLL(None).syscall(60, 0)"  # exit, of this thread alone
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()
        deadline_s = time.monotonic() + 5
        while procfs.memory_task(child.pid) == child.pid and time.monotonic() < deadline_s:
            time.sleep(0.01)
        table = ProcessTable()
        stat = procfs.read_stat(child.pid)
        assert stat is not None
        process = table.find(child.pid, stat.start_ns)
        now_ns = time.monotonic_ns()
        table.feed([ExitEvent(now_ns, child.pid, 1, child.pid, 1)])
        table.expire(now_ns)
        assert process.is_alive
        assert process.space().mappings
        child.kill()
        child.wait()
        table.expire(now_ns + 1)
        assert not process.is_alive


def test_a_process_that_soon_ends_is_of_the_party_of_who_started_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parties = {SHELL: 1000, OTHER: 0}
    monkeypatch.setattr(procfs, "party_of", lambda pid: parties.get(pid, procfs.NOBODY))
    story = Story()
    story.feed(fork(SHELL, OTHER))
    child, grandchild, of_root = 77_001, 77_002, 77_003
    story.feed(fork(child, SHELL))
    found = [story.live(child)]
    story.feed(fork(grandchild, child), fork(of_root, OTHER))
    found += [story.live(grandchild), story.live(of_root)]
    story.feed(leave(child), leave(grandchild), leave(of_root))
    assert [it.party for it in found] == [1000, 1000, procfs.NOBODY]


def test_threads_that_a_process_claims_are_not_looked_up_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A ring of device time may have another thread id in each of 16,384 records a second."""
    looked_up: list[int] = []
    read_comm = procfs.read_comm

    def counted(pid: int, tid: int) -> str | None:
        looked_up.append(tid)
        return read_comm(pid, tid)

    monkeypatch.setattr(procfs, "read_comm", counted)
    table = ProcessTable()
    table.scan()
    process = table.find(os.getpid(), table.start_of(os.getpid()))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        stranger = other.pid  # no thread of this process
        other.communicate(b"\n")
    process.threads = None
    claimed = [*range(1 << 24, (1 << 24) + 50_000), stranger]
    names = table.thread_names(process, [os.getpid(), *claimed])
    assert names[0] == procfs.read_comm(os.getpid(), os.getpid())
    assert set(names[1:]) == {""}
    assert len(set(looked_up)) <= 1
    few = [os.getpid(), *claimed[:3]]
    assert table.thread_names(process, few) == [names[0], "", "", ""]
