# SPDX-License-Identifier: Apache-2.0
"""Programs without a device: the verdict is on the threads that are held up, and by what; its words
fit a program that launches nothing."""

from __future__ import annotations

import json

import pytest

from captures import Writer
from sonde.analyze.bound import explain
from sonde.export.verdict import headline, render, to_json
from sonde.model.causes import Bound, Cause
from sonde.model.verdict import Explanation
from sonde.recording.timelines import open_timeline
from training_capture import on_cpu, process, shares

HANDLE = ("Shop.do_GET", "[python]", "shop.py", 30, "python")
RESERVE = ("reserve", "[python]", "shop.py", 14, "python")
RESERVE_INSIDE = ("reserve", "[python]", "shop.py", 16, "python")
STORE = ("store", "[python]", "shop.py", 20, "python")
APPEND = ("append", "[python]", "shop.py", 8, "python")
FLUSH = ("flush_loop", "[python]", "shop.py", 50, "python")
METRICS = ("metrics", "[python]", "shop.py", 60, "python")
GET = ("Queue.get", "[python]", "queue.py", 171, "python")
ACCEPT = ("select", "[python]", "selectors.py", 415, "python")
SEM_WAIT = ("sem_wait", "libc.so.6")
COND_WAIT = ("pthread_cond_wait", "libc.so.6")
MUTEX = ("__lll_lock_wait", "libc.so.6")
TAKE_GIL = ("take_gil", "python3.12")
FSYNC = ("fsync", "libc.so.6")
EVAL = ("_PyEval_EvalFrameDefault", "python3.12")
FRAMEWORK = ("_call_impl", "[python]", "torch/nn/modules/module.py", 1751, "python")
ADD = ("at::_ops::add::call", "libtorch_cpu.so")
FIRST, TIMER, HOLDER = 42, 43, 44
ANSWERING = range(60, 66)


def server(writer, *more):
    """A server: its first thread accepts, one thread measures something from time to time."""
    key = process(writer, TIMER, *ANSWERING, *more)
    writer.wait(key, FIRST, "poll", 4.9, count=10, stack=writer.stack(ACCEPT))
    on_cpu(writer, key, 1.2, METRICS, EVAL, tid=TIMER)
    writer.wait(key, TIMER, "sleep", 3.6, count=50, stack=writer.stack(METRICS, "nanosleep"))
    return key


def waits_for_lock(writer, key, tid, seconds, waker, *inside, count=100):
    stack = writer.stack(HANDLE, RESERVE, *(inside or (SEM_WAIT,)))
    writer.wait(key, tid, "futex", seconds, count=count, waker=(42, waker), stack=stack)


@pytest.mark.parametrize(("synced", "short"), [(0.1, True), (0.5, False), (0.0, True)])
def test_of_a_lock_held_without_a_cpu_the_next_step_is_on_what_is_done_besides(
    writer, verdicts, synced, short
):
    """Nobody can do "ready, without a CPU" before or after."""
    key = server(writer)
    deep = writer.stack(HANDLE, RESERVE_INSIDE, STORE, APPEND, FSYNC)
    for number, tid in enumerate(ANSWERING):
        waits_for_lock(writer, key, tid, 3.2, ANSWERING[number - 1])
        if synced:
            writer.wait(key, tid, "sync to disk", synced, count=90, stack=deep)
        writer.wait(key, tid, "sync to disk", 0.4, kind="runqueue", count=90, stack=deep)
        writer.wait(key, tid, "socket", 0.9, count=90, stack=writer.stack(ACCEPT))
    neighbour = writer.process(99, "burner")
    on_cpu(writer, neighbour, 4.0, ("spin", "burner"), tid=99)
    writer.wait(neighbour, 99, "preempted", 1.5, kind="runqueue", count=200)
    verdict, lock = next(
        (one, cause) for one in verdicts() for cause in one.causes if cause.key == Cause.LOCK
    )
    assert "ready, without a CPU" in lock.facts[0]
    assert any("burner" in fact for fact in lock.facts) == short
    step = verdict.advice[0].text
    assert "ready, without" not in step
    if not synced:
        assert step.startswith("give the threads that hold the lock a CPU, for which they wait in ")
    else:
        assert step.startswith("shorten what is done with the lock") and "sync to disk in" in step
        assert ("; and give these threads CPUs" in step) == short


def test_a_lock_that_answering_threads_pass_on_comes_before_the_busiest_thread(writer, verdicts):
    """Six threads wait for it, one after the other writes to the disk under it, and deep below."""
    key = server(writer)
    for number, tid in enumerate(ANSWERING):
        waits_for_lock(writer, key, tid, 3.2, ANSWERING[number - 1])
        deep = writer.stack(HANDLE, RESERVE_INSIDE, STORE, APPEND, FSYNC)
        writer.wait(key, tid, "sync to disk", 0.7, count=90, stack=deep)
        writer.wait(key, tid, "socket", 0.9, count=90, stack=writer.stack(ACCEPT))
    (verdict,) = verdicts()

    assert verdict.threads == len(ANSWERING)
    assert verdict.bounds[0].key == Bound.LOCK
    lock = next(one for one in verdict.causes if one.key == Cause.LOCK)
    assert lock.locations[0].text == "reserve shop.py:14 ← Shop.do_GET shop.py:30"
    assert lock.share == pytest.approx(3.2 / 4.8, abs=0.01)
    (fact,) = lock.facts
    assert fact == (
        "these threads pass it on, and in reserve hold it for sync to disk (84 % of the time) in "
        "append shop.py:8 ← store shop.py:20"
    )
    step = "shorten what is done with the lock, or do it before or after: sync to disk in append "
    assert verdict.advice[0].text == f"{step}shop.py:8"
    text = render_of(verdict)
    assert headline(Explanation([verdict], [], [])).splitlines() == [
        "VERDICT  threads t60 (60) and 5 more — mix: lock contention 67 %, I/O-bound 33 %",
        "  66.7 %  lock contention  reserve shop.py:14 ← Shop.do_GET shop.py:30",
        f"  {fact}",
        f"  next: {step}shop.py:8",
    ]
    assert "threads t60 (60) and 5 more — " in text
    assert "of it socket 56 %, sync to disk 44 %" in text


def test_the_holder_of_a_lock_and_what_it_does_are_named(writer, verdicts):
    """It hardly uses a CPU, and so is none of the busiest threads."""
    key = server(writer, HOLDER)
    sync = writer.stack(FLUSH, STORE, APPEND, FSYNC)
    writer.wait(key, HOLDER, "sync to disk", 4.2, count=900, stack=sync)
    taken = writer.stack(FLUSH, SEM_WAIT)
    writer.wait(key, HOLDER, "futex", 0.1, count=90, waker=(42, 60), stack=taken)
    for number, tid in enumerate(ANSWERING):
        waits_for_lock(writer, key, tid, 3.0, HOLDER)
        waits_for_lock(writer, key, tid, 1.5, ANSWERING[number - 1])
    (verdict,) = verdicts()

    assert verdict.bounds[0].key == Bound.LOCK
    (fact, held) = next(one.facts for one in verdict.causes if one.key == Cause.LOCK)
    assert fact.startswith("held by t44 (44), ")
    assert held == "held for sync to disk (84 % of the time) in append shop.py:8 ← store shop.py:20"


def test_threads_that_answer_one_request_each_are_held_up_together(writer, verdicts):
    """A server that starts a thread for each request has none that waits long."""
    threads = range(100, 300)
    key = server(writer, *threads)
    for tid in threads:
        waits_for_lock(writer, key, tid, 0.05, tid - 1, count=1)
    (verdict,) = verdicts()

    assert verdict.threads == len(threads)
    assert shares(verdict) == {Cause.LOCK: pytest.approx(1.0)}


def test_a_pool_without_work_is_not_held_up(writer, verdicts):
    """Its threads wait for a condition, by a queue or in machine code."""
    key = server(writer)
    for tid in ANSWERING:
        stack = writer.stack(HANDLE, GET, COND_WAIT)
        writer.wait(key, tid, "futex", 4.9, count=100, waker=(42, FIRST), stack=stack)
    found = verdicts()

    assert found[0].device_name == "t43 (43)"
    assert all(one.threads == 1 for one in found)


def test_threads_that_wait_for_one_that_works_get_a_verdict(writer, verdicts):
    """A single thread does for all others what they ask for."""
    key = server(writer, HOLDER)
    sync = writer.stack(FLUSH, APPEND, FSYNC)
    writer.wait(key, HOLDER, "sync to disk", 4.5, count=900, stack=sync)
    on_cpu(writer, key, 0.2, FLUSH, EVAL, tid=HOLDER)
    for tid in ANSWERING:
        stack = writer.stack(HANDLE, GET, SEM_WAIT)
        writer.wait(key, tid, "futex", 4.5, count=100, waker=(42, HOLDER), stack=stack)
    found = verdicts()

    (group,) = (one for one in found if one.threads == len(ANSWERING))
    (fact,) = next(one.facts for one in group.causes if one.key == Cause.INPUT)
    assert "sync to disk in append shop.py:8" in fact


def test_a_mutex_of_machine_code_is_a_lock_and_a_condition_is_not(writer, verdicts):
    key = server(writer)
    for number, tid in enumerate(ANSWERING):
        for waits, seconds in ((MUTEX, 3.0), (COND_WAIT, 1.0)):
            stack = writer.stack(("shop::reserve(int)", "shop"), waits)
            other = (42, ANSWERING[number - 1])
            writer.wait(key, tid, "futex", seconds, count=50, waker=other, stack=stack)
        sleep = writer.stack(("shop::reserve(int)", "shop"), ("nanosleep", "libc.so.6"))
        writer.wait(key, tid, "sleep", 0.5, stack=sleep)
    verdict = verdicts()[0]

    assert verdict.threads == len(ANSWERING)
    assert shares(verdict)[Cause.LOCK] == pytest.approx(3.0 / 4.5, abs=0.01)
    assert "hold it for sleep (60 % of the time) in shop::reserve(int)" in verdict.evidence[1]


def test_threads_that_wait_for_the_interpreter_lock_do_not_take_in_who_has_it(writer, verdicts):
    key = server(writer, HOLDER)
    on_cpu(writer, key, 4.6, FLUSH, EVAL, tid=HOLDER)
    writer.wait(key, HOLDER, "futex", 0.4, count=50, stack=writer.stack(FLUSH, TAKE_GIL))
    for tid in ANSWERING:
        stack = writer.stack(HANDLE, TAKE_GIL)
        writer.wait(key, tid, "futex", 3.0, count=600, waker=(42, HOLDER), stack=stack)
        writer.wait(key, tid, "socket", 1.8, count=90, stack=writer.stack(ACCEPT))
    first, second = verdicts()

    assert (first.threads, second.threads) == (len(ANSWERING), 1)
    assert first.bounds[0].key == Bound.LOCK
    (fact,) = next(one.facts for one in first.causes if one.key == Cause.GIL)
    assert fact == "100 % of it ended by t44 (44), on a CPU in flush_loop shop.py:50"
    assert second.device_name == "t44 (44)"


def test_a_first_thread_that_works_comes_before_those_that_wait_for_its_lock(writer, verdicts):
    key = process(writer, *ANSWERING)
    on_cpu(writer, key, 4.9, FLUSH, EVAL)
    for tid in ANSWERING:
        waits_for_lock(writer, key, tid, 4.5, FIRST)
    first, second = verdicts()

    assert first.device_name == "t42 (42)"
    assert second.threads == len(ANSWERING)


def test_the_next_step_is_about_the_bound_that_is_named_first(writer, verdicts):
    """Two causes of one bound together are more than I/O, which is the largest cause."""
    key = process(writer, 43)
    writer.wait(key, 42, "sync to disk", 2.0, count=50, stack=writer.stack(STORE, FSYNC))
    gil = writer.stack(STORE, TAKE_GIL)
    writer.wait(key, 42, "futex", 1.4, count=50, waker=(42, 43), stack=gil)
    waits_for_lock(writer, key, 42, 1.2, 43)
    verdict = verdicts()[0]

    assert [one.key for one in verdict.bounds] == [Bound.LOCK, Bound.IO]
    assert verdict.advice[0].text.startswith("move the work of other Python threads into proc")


def advice_of(tmp_path, name, for_cpu, on_cpu_s):
    writer = Writer(seconds=5)
    key = process(writer)
    writer.wait(key, 42, "futex", for_cpu, kind="runqueue", count=500)
    on_cpu(writer, key, on_cpu_s, STORE, EVAL)
    explanation = explain(open_timeline([writer.write(tmp_path / name)]))
    return explanation.verdicts[0].advice[0].text


def test_what_changes_from_run_to_run_does_not_change_the_next_step(tmp_path):
    """Two causes about as large: their steps are one, in the same order."""
    first = advice_of(tmp_path, "a.sonde", 2.4, 2.2)
    assert first == advice_of(tmp_path, "b.sonde", 2.2, 2.4)
    assert first.startswith("reserve a CPU for the thread")
    assert "; or make store shop.py:20 faster" in first
    assert "; or " not in advice_of(tmp_path, "c.sonde", 2.9, 1.9)


def test_causes_sum_to_no_more_than_the_time(writer, verdicts):
    """Samples are an estimate: where waits leave less room, they are cut, and waits are not."""
    key = process(writer)
    writer.wait(key, 42, "futex", 3.0, kind="runqueue", count=500)
    on_cpu(writer, key, 2.6, STORE, EVAL)
    (verdict,) = verdicts()

    assert shares(verdict)[Cause.RUN_QUEUE] == pytest.approx(0.6)
    assert sum(shares(verdict).values()) == pytest.approx(1.0)


def test_words_about_launches_are_left_out_where_nothing_calls_a_device(writer, tmp_path):
    """A framework on a CPU, in code, with want of a CPU, I/O, a sleep and a lock."""
    key = process(writer, 43)
    on_cpu(writer, key, 1.0, STORE, FRAMEWORK, ADD)
    on_cpu(writer, key, 0.5, STORE, EVAL)
    writer.wait(key, 42, "futex", 0.5, kind="runqueue", count=500)
    writer.wait(key, 42, "sync to disk", 0.6, stack=writer.stack(STORE, FSYNC))
    writer.wait(key, 42, "sleep", 0.6, stack=writer.stack(STORE, "nanosleep"))
    writer.wait(key, 42, "futex", 0.7, count=50, stack=writer.stack(STORE, GET, SEM_WAIT))
    waits_for_lock(writer, key, 42, 0.8, 43)
    explanation = explain(open_timeline([writer.write(tmp_path / "a.sonde")]))
    text, document = render(explanation), json.loads(to_json(explanation))
    words = json.dumps(
        [
            [[cause["title"], cause["facts"]] for cause in one["causes"]]
            + [one["evidence"], one["advice"]]
            for one in document["verdicts"]
        ]
    )

    for word in ("launch", "batch", "kernel"):
        assert word not in text
        assert word not in words
    assert shares(explanation.verdicts[0])[Cause.HOST] == pytest.approx(0.3, abs=0.01)


def render_of(verdict):
    return render(Explanation([verdict], [], []))
