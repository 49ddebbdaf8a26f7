# SPDX-License-Identifier: Apache-2.0
"""The next step is about who was found: the holder of a lock and its code, who had the CPUs, or the
place; and threads that wait for work are idle, whatever the reason of the wait."""

from __future__ import annotations

import json

import pytest

from captures import START_NS, Writer
from sonde.analyze.bound import explain
from sonde.cli.main import main
from sonde.export.verdict import render
from sonde.model.causes import Bound, Cause
from sonde.model.verdict import Explanation, Verdict
from sonde.recording.timelines import open_timeline
from training_capture import on_cpu, process, shares

HANDLE = ("Handler.do_POST", "[python]", "orders.py", 57, "python")
APPEND = ("Journal.append", "[python]", "orders.py", 22, "python")
KEEP = ("housekeeping", "[python]", "orders.py", 70, "python")
COMPACT = ("Journal.compact", "[python]", "orders.py", 30, "python")
SERVE = ("BaseServer.serve_forever", "[python]", "socketserver.py", 233, "python")
ONE = ("BaseHTTPRequestHandler.handle_one_request", "[python]", "http/server.py", 408, "python")
READINTO = ("SocketIO.readinto", "[python]", "socket.py", 706, "python")
SELECT = ("_PollLikeSelector.select", "[python]", "selectors.py", 415, "python")
RUN_ONCE = ("BaseEventLoop._run_once", "[python]", "asyncio/base_events.py", 1898, "python")
COMMUNICATE = ("Popen._communicate", "[python]", "subprocess.py", 2021, "python")
WORKER = ("_worker", "[python]", "concurrent/futures/thread.py", 81, "python")
GET = ("Queue.get", "[python]", "queue.py", 171, "python")
EVAL = ("_PyEval_EvalFrameDefault", "python3.12")
TAKE_GIL = ("take_gil", "python3.12")
RECV = ("recv", "libc.so.6")
SEM_WAIT = ("sem_wait", "libc.so.6")
DEFLATE = ("deflate", "libz.so.1")
FIRST, HOLDER = 42, 44
ANSWERING = range(60, 66)


def render_of(verdict: Verdict) -> str:
    return render(Explanation([verdict], [], []))


def beside(writer: Writer, **cpu_s: float) -> None:
    """What the recorder found of processes that were not recorded."""
    for text, seconds in cpu_s.items():
        row = {"time_ns": START_NS + 4 * 10**9, "kind": "process", "name": "other_on_cpu"}
        writer.rows["event"].append({**row, "value": seconds * 1e9, "text": text})


def orders(writer: Writer, *, runs_s: float = 1.5, ready_s: float = 0.0) -> dict[str, int]:
    """A server whose threads wait for a lock that one holds, which sleeps most of the time."""
    key = process(writer, HOLDER, *ANSWERING)
    on_cpu(writer, key, runs_s, KEEP, COMPACT, DEFLATE, tid=HOLDER)
    sleeps = 4.9 - runs_s - ready_s
    writer.wait(key, HOLDER, "sleep", sleeps, count=10, stack=writer.stack(KEEP, "nanosleep"))
    if ready_s:
        writer.wait(key, HOLDER, "preempted", ready_s, count=500, kind="runqueue")
    for number, tid in enumerate(ANSWERING):
        taken = writer.stack(HANDLE, APPEND, SEM_WAIT)
        for seconds, waker in ((2.0, HOLDER), (2.0, ANSWERING[number - 1])):
            writer.wait(key, tid, "futex", seconds, count=50, waker=(42, waker), stack=taken)
        request = writer.stack(ONE, READINTO, RECV)
        writer.wait(key, tid, "socket", 0.9, count=50, stack=request)
    return key


def test_the_next_step_names_the_holder_of_the_lock_and_its_code(writer, explained):
    """Where it sleeps it does not hold the lock, though it does so for most of the time."""
    orders(writer)
    verdict = explained()

    assert verdict.threads == len(ANSWERING)
    (fact,) = next(one.facts for one in verdict.causes if one.key == Cause.LOCK)
    where = "Journal.compact orders.py:30 ← housekeeping orders.py:70"
    assert fact == f"held by t44 (44), on a CPU in {where}"
    assert verdict.advice[0].text == (
        "shorten what t44 (44) does with the lock in Journal.compact orders.py:30, or do it before "
        "or after"
    )


def test_a_holder_without_a_cpu_is_shown_with_its_code_and_who_had_the_cpus(writer, explained):
    orders(writer, runs_s=0.8, ready_s=3.0)
    beside(writer, **{"rustc (7)": 12.0, "processes of root": 6.0, "sh (8)": 0.1})
    verdict = explained()

    held, others = next(one.facts for one in verdict.causes if one.key == Cause.LOCK)
    assert held.startswith("held by t44 (44), mostly waiting for a CPU, in Journal.compact orders")
    assert others == (
        "not recorded, with 3.6 of 4 CPUs meanwhile: rustc (7) 2.40, processes of root 1.20; "
        "sonde top shows them live"
    )
    assert verdict.advice[0].text.endswith(
        "or do it before or after; and give it a CPU, for which it waits"
    )


def starved(writer: Writer) -> None:
    key = process(writer)
    on_cpu(writer, key, 1.5, KEEP, COMPACT, EVAL)
    writer.wait(key, 42, "preempted", 3.4, count=500, kind="runqueue")


def test_who_had_the_cpus_of_a_starved_thread_is_named(writer, explained):
    starved(writer)
    beside(writer, **{"rustc (7) and what it started": 15.0, "processes of other users": 3.0})
    verdict = explained()

    assert verdict.bounds[0].key == Bound.CPU_CONTENTION
    (fact,) = next(one.facts for one in verdict.causes if one.key == Cause.RUN_QUEUE)
    assert "rustc (7) and what it started 3.00, processes of other users 0.60" in fact
    assert "keep rustc (7) and what it started off the CPUs of the thread" in verdict.advice[0].text


@pytest.mark.parametrize("cpu_s", [0.5, 10.0])
def test_nobody_is_named_where_others_used_little_or_cpus_were_free(writer, explained, cpu_s):
    """Half of four CPUs were free: others are no reason to wait."""
    starved(writer)
    beside(writer, **{"rustc (7)": cpu_s})
    verdict = explained()

    assert not next(one.facts for one in verdict.causes if one.key == Cause.RUN_QUEUE)
    assert "rustc" not in render_of(verdict)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e300])
def test_what_a_file_claims_of_others_is_bounded(writer, explained, value):
    starved(writer)
    for number in range(1000):
        beside(writer, **{f"a{number}\n\x1b[31m": value})
    page = render_of(explained())

    assert "\x1b" not in page
    assert page.count("a0") <= 2


@pytest.mark.parametrize(
    ("key", "seconds", "stack", "reason", "text"),
    [
        (Cause.HOST, 4.8, (KEEP, COMPACT, EVAL), "", "make Journal.compact orders.py:30 faster"),
        (Cause.IO, 4.8, (KEEP, COMPACT, "fsync"), "sync to disk", "sync to disk less often in Jo"),
        (Cause.SLEEP, 4.8, (KEEP, "nanosleep"), "sleep", "remove the sleep in housekeeping orders"),
    ],
)
def test_the_next_step_names_the_place(writer, explained, key, seconds, stack, reason, text):
    owner = process(writer)
    if reason:
        on_cpu(writer, owner, 0.1, KEEP, EVAL)
        writer.wait(owner, 42, reason, seconds, count=100, stack=writer.stack(*stack))
    else:
        on_cpu(writer, owner, seconds, *stack)
    verdict = explained()

    assert verdict.causes[0].key == key
    assert verdict.advice[0].text.startswith(text)
    assert "launch" not in verdict.advice[0].text


# ---- idle ----


@pytest.mark.parametrize(
    ("stack", "reason", "is_idle"),
    [
        ((HANDLE, SERVE, SELECT, "poll"), "poll", True),
        ((ONE, READINTO, RECV), "socket", True),
        ((RUN_ONCE, SELECT, "epoll_wait"), "poll", True),
        ((HANDLE, ("accept4", "libc.so.6")), "socket", True),
        ((("ngx_epoll_process_events", "nginx"), ("epoll_wait", "libc.so.6")), "poll", True),
        ((WORKER, ("PyThread_acquire_lock_timed", "python3.12"), SEM_WAIT), "futex", True),
        ((HANDLE, READINTO, RECV), "socket", False),
        ((HANDLE, COMMUNICATE, SELECT, "poll"), "poll", False),
        ((ONE, HANDLE, "fsync"), "sync to disk", False),
        ((HANDLE, ("epoll_wait", "libc.so.6")), "poll", False),
    ],
)
def test_a_wait_for_the_next_thing_to_do_is_idle(writer, explained, stack, reason, is_idle):
    key = process(writer)
    on_cpu(writer, key, 0.1, HANDLE, APPEND, EVAL)
    writer.wait(key, 42, reason, 4.8, count=100, stack=writer.stack(*stack))
    verdict = explained()

    assert (Cause.IDLE in shares(verdict)) == is_idle
    assert (verdict.bounds[0].key == Bound.IDLE) == is_idle
    assert ("I/O" in render_of(verdict)) == (not is_idle and reason != "futex")


def test_a_thread_that_is_mostly_idle_is_bound_by_what_else_it_does(writer, explained):
    key = process(writer)
    on_cpu(writer, key, 1.0, HANDLE, APPEND, EVAL)
    request = writer.stack(ONE, READINTO, RECV)
    writer.wait(key, 42, "socket", 3.9, count=100, stack=request)
    verdict = explained()

    assert [one.key for one in verdict.bounds] == [Bound.HOST]
    assert "idle 78 %, else CPU-bound" in render_of(verdict).splitlines()[0]
    assert verdict.advice[0].text.startswith("make Journal.append orders.py:22 faster")


def test_a_worker_whose_queue_an_idle_thread_fills_is_idle(writer, verdicts):
    key = process(writer, 43)
    on_cpu(writer, key, 0.1, HANDLE, EVAL)
    writer.wait(key, FIRST, "socket", 4.8, count=9, stack=writer.stack(SERVE, SELECT, "poll"))
    on_cpu(writer, key, 0.7, HANDLE, APPEND, EVAL, tid=43)
    waits = writer.stack(HANDLE, GET, SEM_WAIT)
    writer.wait(key, 43, "futex", 4.2, count=90, waker=(42, FIRST), stack=waits)
    worker = next(one for one in verdicts() if one.device_name == "t43 (43)")

    assert shares(worker)[Cause.IDLE] == pytest.approx(0.84, abs=0.01)
    assert worker.bounds[0].key == Bound.HOST


def test_what_a_thread_waits_for_within_a_request_is_not_idle(writer, verdicts):
    """Handlers of one program pass connections to a database on among themselves."""
    key = process(writer, 43)
    request = writer.stack(ONE, READINTO, RECV)
    borrow = writer.stack(HANDLE, GET, SEM_WAIT)
    for tid, other in ((FIRST, 43), (43, FIRST)):
        on_cpu(writer, key, 0.3, ONE, HANDLE, APPEND, EVAL, tid=tid)
        writer.wait(key, tid, "socket", 2.6, count=90, stack=request)
        writer.wait(key, tid, "futex", 2.0, count=90, waker=(42, other), stack=borrow)
    (found,) = verdicts()

    assert found.service == "Handler.do_POST orders.py"
    assert found.request_ns == pytest.approx(2 * 2.3e9, rel=0.01)
    assert Cause.IDLE not in shares(found)
    assert shares(found)[Cause.INPUT] == pytest.approx(2.0 / 2.3, abs=0.01)


def test_a_caller_is_named_where_it_is_the_one_in_all_threads(writer, explained):
    """Threads of one kind ask for most of the time what others ask for, too."""
    key = process(writer, 43)
    on_cpu(writer, key, 3.0, KEEP, COMPACT, EVAL)
    assert "Journal.compact orders.py:30 ← housekeeping" in render_of(explained())
    on_cpu(writer, key, 0.2, HANDLE, COMPACT, EVAL, tid=43)
    assert "Journal.compact orders.py:30 ←" not in render_of(explained())


# ---- a process of a file ----


@pytest.fixture
def two(tmp_path):
    writer = Writer(seconds=5)
    for pid, name, parent in ((42, "shop", 1), (50, "batch", 1), (51, "child", 50)):
        key = writer.process(pid, name, ppid=parent)
        writer.on_cpu(key, pid, writer.stack(COMPACT, EVAL), 400 - pid)
    return writer.write(tmp_path / "two.sonde")


@pytest.mark.parametrize(
    ("named", "threads"),
    [
        (["--pid", "50"], {"batch (50)", "child (51)"}),
        (["--pid", "batch"], {"batch (50)", "child (51)"}),
        (["--pid", "42", "--pid", "child"], {"shop (42)", "child (51)"}),
        ([], {"shop (42)", "batch (50)", "child (51)"}),
    ],
)
def test_a_verdict_on_processes_of_a_file(two, capsys, named, threads):
    assert main(["explain", str(two), "--json", *named]) == 0

    document = json.loads(capsys.readouterr().out)
    assert {one["device_name"] for one in document["verdicts"]} == threads


def test_a_thread_of_a_file_stands_for_its_process(tmp_path, capsys):
    writer = Writer(seconds=5)
    threads = [{"tid": 42, "comm": "python3"}, {"tid": 43, "comm": "python3"}]
    key = writer.process(42, "python3", threads=threads, command="tune.py")
    for tid in (42, 43):
        writer.on_cpu(key, tid, writer.stack(COMPACT, EVAL), 400)
    path = str(writer.write(tmp_path / "threads.sonde"))

    assert main(["explain", path, "--pid", "43"]) == 0
    shown = capsys.readouterr()
    assert "43 is a thread of process 42 (tune.py): the whole process is meant" in shown.err
    assert shown.out.startswith("threads tune.py (42) and 1 more — ")


def test_a_process_that_is_not_in_the_file_is_refused(two, capsys):
    assert main(["explain", str(two), "--pid", "nginx"]) == 2
    assert "saw no process called nginx" in capsys.readouterr().err


def test_files_that_are_explained_are_not_asked_about_others(two):
    """A timeline without a choice is about all of its processes."""
    assert len(explain(open_timeline([two])).verdicts) == 3
