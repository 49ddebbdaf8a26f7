# SPDX-License-Identifier: Apache-2.0
"""Waits against threads that time their own: reason, thread, waker, blocked and run-queue time."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sonde.model.profile import ProfileKind
from sonde.query import queries

pytestmark = pytest.mark.bpf

EXACT = 0.02
"""What the totals may differ from the truth."""
MAIN_S = 6


def run(*command):
    return subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)


def seconds_of(recorder, tid, kind):
    """Exact seconds of a thread by reason."""
    return dict(
        recorder.rows(
            "SELECT name, sum(ns) / 1e9 FROM activity WHERE tid = ? AND kind = ? GROUP BY name",
            tid,
            kind,
        )
    )


def process_seconds(recorder, pid, kind="blocked"):
    return dict(
        recorder.rows(
            "SELECT name, sum(ns) / 1e9 FROM activity WHERE pid = ? AND kind = ? GROUP BY name",
            pid,
            kind,
        )
    )


class Waiters:
    """A recording of tests/programs/truth/waits.c with what the program reports of itself."""

    def __init__(self, recorder, pid, truth):
        self.recorder = recorder
        self.pid = pid
        self.tid = {name: tid for name, (tid, _, _) in truth.items()}
        self.seconds = {name: seconds for name, (_, seconds, _) in truth.items()}
        self.calls = {name: calls for name, (_, _, calls) in truth.items()}


@pytest.fixture(scope="module")
def waiters(program, record):
    with record() as recorder:
        process = run(program("truth/waits"), MAIN_S)
        truth = json.loads(process.communicate()[0])
    return Waiters(recorder, process.pid, truth)


@pytest.mark.parametrize(
    ("thread", "reason"),
    [("sleeper", "sleep"), ("futex_waiter", "futex"), ("pipe_reader", "read")],
)
def test_a_blocked_thread_is_named_with_its_reason_and_time(waiters, thread, reason):
    tid = waiters.tid[thread]
    blocked = seconds_of(waiters.recorder, tid, "blocked")
    ready = seconds_of(waiters.recorder, tid, "runqueue")
    assert max(blocked, key=blocked.__getitem__) == reason
    # The thread's own clock runs until it has a CPU again.
    assert blocked[reason] + ready[reason] == pytest.approx(waiters.seconds[thread], rel=EXACT)


def test_a_starved_thread_waits_for_its_cpu(waiters):
    ready = seconds_of(waiters.recorder, waiters.tid["starved"], "runqueue")
    assert ready["preempted"] == pytest.approx(waiters.seconds["starved"], rel=EXACT)
    blocked = seconds_of(waiters.recorder, waiters.tid["starved"], "blocked")
    assert sum(blocked.values()) < 0.02 * waiters.seconds["starved"]


def test_threads_have_their_names(waiters):
    named = {
        thread.tid: thread.comm
        for thread in waiters.recorder.session.threads
        if thread.process.pid == waiters.pid
    }
    for name, tid in waiters.tid.items():
        assert named[tid] == name


@pytest.mark.parametrize(
    ("thread", "waker"), [("pipe_reader", "pipe_writer"), ("futex_waiter", "holder")]
)
def test_the_waker_is_named(waiters, thread, waker):
    wait = next(
        wait
        for wait in queries.waits(waiters.recorder.session)
        if wait.thread.tid == waiters.tid[thread] and wait.kind == ProfileKind.OFF_CPU
    )
    assert wait.waker == f"{waker} ({waiters.tid[waker]})"


def test_nobody_wakes_a_thread_that_is_ready(waiters):
    wakers = waiters.recorder.rows(
        "SELECT DISTINCT waker_tid FROM activity WHERE tid = ? AND name = 'preempted'",
        waiters.tid["starved"],
    )
    assert wakers == [(0,)]


@pytest.mark.parametrize(("thread", "kind"), [("sleeper", "blocked"), ("starved", "runqueue")])
def test_waits_of_seldom_switching_threads_all_have_stacks(waiters, thread, kind):
    tid = waiters.tid[thread]
    ((exact,),) = waiters.recorder.rows(
        "SELECT sum(ns) FROM activity WHERE tid = ? AND kind = ?", tid, kind
    )
    ((weighted,),) = waiters.recorder.rows(
        "SELECT sum(weight_ns) FROM sample WHERE tid = ? AND kind = ?", tid, kind
    )
    assert weighted == pytest.approx(exact, rel=0.1)


def test_long_waits_are_kept_one_by_one(waiters):
    spans = [
        row
        for row in waiters.recorder.capture.tables["span"].to_pylist()
        if row["tid"] == waiters.tid["sleeper"] and row["kind"] == "blocked"
    ]
    # Before its work it waits, once, for all threads to be there.
    barrier = [row for row in spans if row["name"] == "futex"]
    assert len(barrier) <= 1
    spans = [row for row in spans if row not in barrier]
    whole = sum(row["end_time_ns"] - row["start_time_ns"] for row in spans) / 1e9
    blocked = seconds_of(waiters.recorder, waiters.tid["sleeper"], "blocked")
    assert whole == pytest.approx(blocked["sleep"], rel=EXACT)
    assert {row["name"] for row in spans} == {"sleep"}
    assert {row["op"] for row in spans} == {"clock_nanosleep"}


@pytest.fixture(scope="module")
def pingpong(program, record):
    """(recorder, tid to how often it waited in a call and how often it was pushed aside)"""
    with record() as recorder:
        process = run(program("truth/pingpong"), 400_000)
        truth = json.loads(process.communicate()[0])
    return recorder, {tid: (waited, aside) for tid, waited, aside in truth.values()}


IN_CALL = "(name = 'read' OR name = 'write')"


def drawn(waits, seconds):
    """How many of that many short waits of a thread are counted: in each window of 1.07 s the
    first 64, then 32 of each octave (bpf/short_waits.h)."""
    windows = seconds / 1.07
    return windows * (64 + 32 * math.log2(max(1, waits / windows / 64)))


def test_of_many_short_waits_some_stand_for_all(pingpong):
    recorder, truth = pingpong
    for tid, (waited, aside) in truth.items():
        counts = [
            recorder.rows(
                f'SELECT sum("count") FROM activity WHERE tid = ? AND kind = ? AND {name}',
                tid,
                kind,
            )[0][0]
            for kind, name in (("blocked", IN_CALL), ("runqueue", "name = 'preempted'"))
        ]
        # Half of them are of the last octave, of which 32 are drawn: five standard errors.
        error = 5 * (waited + aside) / drawn(waited, recorder.info.duration_ns / 1e9) ** 0.5
        assert counts[0] == pytest.approx(waited, abs=error)
        assert counts[1] == pytest.approx(aside, abs=error)


def test_waits_of_threads_that_make_few_are_all_counted(waiters):
    recorder = waiters.recorder
    ((count,),) = recorder.rows(
        "SELECT sum(\"count\") FROM activity WHERE tid = ? AND kind = 'blocked' AND name = 'sleep'",
        waiters.tid["sleeper"],
    )
    # A thread that has no CPU between its call and its sleep may sleep no more, or for less than a
    # span: so seldom that the totals' tolerance holds it.
    assert count == pytest.approx(waiters.calls["sleeper"], rel=EXACT)


def test_weighted_sums_of_many_waits_agree_with_exact_ones(pingpong):
    recorder, truth = pingpong
    for tid in truth:
        for kind in ("blocked", "runqueue"):
            exact, exact_ns, max_ns = recorder.rows(
                'SELECT sum("count"), sum(ns), max(max_ns) FROM activity'
                " WHERE tid = ? AND kind = ?",
                tid,
                kind,
            )[0]
            weighted, weighted_ns, stacks = recorder.rows(
                "SELECT sum(weight_count), sum(weight_ns), count(DISTINCT stack) FROM sample"
                " WHERE tid = ? AND kind = ?",
                tid,
                kind,
            )[0]
            assert stacks > 0
            # About thirty stacks a second of a CPU, each for `weight` waits; five standard
            # errors. The variance of the sum of times is at most weight * sum of their squares.
            taken = 30 * recorder.info.duration_ns / 1e9
            weight = exact / taken
            assert weighted == pytest.approx(exact, rel=5 / taken**0.5)
            error_ns = (weight * max_ns * exact_ns) ** 0.5
            assert weighted_ns == pytest.approx(exact_ns, abs=5 * error_ns)


def test_many_threads_with_few_waits_each_have_fewer_stacks_with_more_weight(program, record):
    threads = 600
    with record() as recorder:
        process = run(program("truth/few_waits"), threads, 5)
        waits = json.loads(process.communicate()[0])["waits"]
    where = "WHERE pid = ? AND kind = 'blocked' AND name = 'sleep'"
    exact = dict(
        recorder.rows(f'SELECT tid, sum("count") FROM activity {where} GROUP BY tid', process.pid)
    )
    weighted = dict(
        recorder.rows(
            f"SELECT tid, sum(weight_count) FROM sample {where} GROUP BY tid", process.pid
        )
    )
    assert sum(exact.values()) == pytest.approx(waits, rel=EXACT)
    # All are counted one by one; a CPU takes 2,048 stacks in a window of 1.07 s, then one in 4, in
    # 16 and so on (bpf/short_waits.h).
    changed = [tid for tid, count in exact.items() if weighted.get(tid, 0) != count]
    assert len(changed) > threads / 2
    # At most one in 16 is taken: five standard errors of a sum of such draws.
    assert sum(weighted.values()) == pytest.approx(waits, abs=5 * (16 * waits) ** 0.5)


def test_a_wait_in_progress_from_start_to_end_is_there_in_full(record):
    process = run("sleep", "60")
    try:
        time.sleep(0.3)
        with record(tick_s=0.5, chunk_s=1) as recorder:
            time.sleep(4)
    finally:
        process.kill()
        process.wait()
    blocked = process_seconds(recorder, process.pid)
    assert set(blocked) == {"sleep"}
    assert blocked["sleep"] == pytest.approx(recorder.info.duration_ns / 1e9, rel=EXACT)


def test_a_wait_across_the_start_ends_when_it_ends(record):
    began = time.monotonic()
    process = run("sleep", "4")
    with record() as recorder:
        process.wait()
        ended = time.monotonic()
    assert ended - began > 4
    blocked = process_seconds(recorder, process.pid)
    seen = ended - recorder.info.start_ns / 1e9
    assert blocked["sleep"] == pytest.approx(seen, rel=EXACT)
    ((count,),) = recorder.rows(
        "SELECT sum(\"count\") FROM activity WHERE pid = ? AND kind = 'blocked' AND name = 'sleep'",
        process.pid,
    )
    assert count == 1


def test_a_late_page_is_a_page_fault(record, program):
    with record() as recorder:
        process = run(program("truth/faults"), 60)
        output, _ = process.communicate()
        if process.returncode == 77:
            pytest.skip("needs userfaultfd")
    truth = json.loads(output)
    tid, seconds = truth["faulter"]
    blocked = seconds_of(recorder, tid, "blocked")
    ready = seconds_of(recorder, tid, "runqueue")
    assert blocked["page fault"] + ready["page fault"] == pytest.approx(seconds, rel=EXACT)
    wait = next(
        wait
        for wait in queries.waits(recorder.session)
        if (wait.thread.tid, wait.reason, wait.kind) == (tid, "page fault", ProfileKind.OFF_CPU)
    )
    assert wait.waker == f"pager ({truth['pager'][0]})"


def test_a_stopped_process_is_stopped(record):
    process = run("sh", "-c", "while :; do :; done")
    try:
        with record() as recorder:
            time.sleep(0.2)
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            stopped = time.monotonic()
            time.sleep(2)
            process.send_signal(signal.SIGCONT)
            seconds = time.monotonic() - stopped
            time.sleep(0.2)
    finally:
        process.kill()
        process.wait()
    blocked = process_seconds(recorder, process.pid)
    assert blocked["stopped"] == pytest.approx(seconds, rel=EXACT)


def test_kernel_threads_are_kept_apart(record):
    with record() as recorder:
        time.sleep(1)
    rows = recorder.rows("SELECT DISTINCT pid, name = 'kernel thread' FROM activity")
    kernel_thread = 0x00200000
    checked = 0
    for pid, is_named in rows:
        try:
            with Path(f"/proc/{pid}/stat").open() as stat:
                flags = int(stat.read().rpartition(")")[2].split()[6])
        except OSError:
            continue
        if is_named:
            assert flags & kernel_thread
            checked += 1
    assert checked


def test_a_child_is_waited_for_and_a_socket_polled(record):
    source = (
        "import select, socket, subprocess, time\n"
        "subprocess.run(['sleep', '0.5'])\n"
        "a, b = socket.socketpair()\n"
        "select.select([a], [], [], 0.5)\n"
        "a.settimeout(None)\n"
        "import threading\n"
        "threading.Timer(0.5, b.send, [b'x']).start()\n"
        "a.recv(1)\n"
    )
    with record() as recorder:
        process = run(sys.executable, "-c", source)
        process.wait()
    blocked = seconds_of(recorder, process.pid, "blocked")
    assert blocked["child"] == pytest.approx(0.5, abs=0.05)
    assert blocked["poll"] == pytest.approx(0.5, abs=0.05)
    assert blocked["socket"] == pytest.approx(0.5, abs=0.05)
