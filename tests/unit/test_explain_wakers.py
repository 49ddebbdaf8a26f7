# SPDX-License-Identifier: Apache-2.0
"""Waits belong to what they were for and to who ended them; other time to the code it is in."""

from __future__ import annotations

import pytest

from sonde.analyze.bound import explain
from sonde.export.verdict import render
from sonde.model.causes import Bound, Cause
from sonde.recording.timelines import open_timeline
from training_capture import on_cpu, process, runs, shares

EVAL = ("_PyEval_EvalFrameDefault", "python3.12")
STEP = ("step", "[python]", "train.py", 88, "python")
FETCH = ("fetch", "[python]", "train.py", 20, "python")
LOOKUP = ("lookup", "[python]", "train.py", 30, "python")
GET = ("Queue.get", "[python]", "queue.py", 171, "python")
NEXT = ("_try_get_data", "[python]", "torch/utils/data/dataloader.py", 1200, "python")
ALL_REDUCE = ("all_reduce", "[python]", "torch/distributed/distributed_c10d.py", 3075, "python")
WORK_WAIT = ("c10d::Work::wait", "libtorch_cpu.so")
ADD = ("at::_ops::add::call", "libtorch_cpu.so")
LAUNCH = ("cudaLaunchKernel", "libcudart.so.13")
SEM_WAIT = ("sem_wait", "libc.so.6")
COND_WAIT = ("pthread_cond_timedwait", "libc.so.6")
TAKE_GIL = ("take_gil", "python3.12")


def without_sample(writer, key, tid, seconds, waker):
    """Waits of which no stack was taken."""
    writer.wait(key, tid, "futex", seconds, count=100, waker=(42, waker))
    writer.rows["sample"].pop()


def test_each_wait_has_its_own_waker_and_the_thread_that_launches_in_turns_takes_no_input(
    writer, verdicts
):
    """The backward pass in one thread, batches from another: not all waits have one waker."""
    key = process(writer, 43, 44)
    without_sample(writer, key, 42, 0.2, 43)
    writer.wait(key, 42, "futex", 1.8, count=100, waker=(42, 43), stack=writer.stack(STEP, ADD))
    batches = writer.stack(STEP, NEXT, GET, SEM_WAIT)
    writer.wait(key, 42, "futex", 1.5, count=90, waker=(42, 44), stack=batches)
    writer.wait(key, 43, "futex", 3.0, count=90, waker=(42, 42), stack=writer.stack(ADD))
    on_cpu(writer, key, 1.4, STEP, ADD, LAUNCH)
    on_cpu(writer, key, 1.9, ADD, LAUNCH, tid=43)
    runs(writer, key, 0.2)
    runs(writer, key, 0.2, tid=43)
    (verdict,) = verdicts()

    assert shares(verdict)[Cause.INPUT] == pytest.approx(0.3, abs=0.05)
    assert Cause.LOCK not in shares(verdict)
    (fact,) = next(one.facts for one in verdict.causes if one.key == Cause.INPUT)
    assert "t44 (44)" in fact
    # Who ended the waits goes before how the device's time was measured.
    assert fact in verdict.evidence[1]
    assert verdict.evidence[0].startswith("in calls that wait for the device")
    assert any("the device computed" in line for line in verdict.evidence[2:])


@pytest.mark.parametrize("is_of_program", [False, True])
def test_a_thread_that_is_asked_to_work_waits_for_no_lock(writer, verdicts, is_of_program):
    """The backward pass takes little, as the thread that asks for it lacks a CPU. A wait in the
    program's code is one for a lock."""
    key = process(writer, 43)
    without_sample(writer, key, 42, 0.1, 43)
    stack = writer.stack(*((LOOKUP,) if is_of_program else ()), ADD, COND_WAIT)
    writer.wait(key, 43, "futex", 4.5, count=40, waker=(42, 42), stack=stack)
    on_cpu(writer, key, 4.4, STEP, EVAL)
    on_cpu(writer, key, 0.3, STEP, ADD, LAUNCH)
    on_cpu(writer, key, 0.3, ADD, LAUNCH, tid=43)
    runs(writer, key, 0.2)
    runs(writer, key, 0.2, tid=43)
    found = verdicts()

    assert [Cause.LOCK in shares(one) for one in found][1:] == [True] * is_of_program
    assert shares(found[0])[Cause.HOST] > 0.5


@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_rows_are_joined_by_order_with_one_without_a_stack_anywhere_among_them(
    writer, verdicts, skipped
):
    key = process(writer, 43, 44)
    waits = [(1.0, 400, 43, (STEP, TAKE_GIL)), (3.0, 20, 44, (LOOKUP, SEM_WAIT))]
    for number in range(3):
        if number == skipped:
            without_sample(writer, key, 42, 0.5, 43)
        if waits and number != skipped:
            seconds, count, waker, stack = waits.pop(0)
            where = writer.stack(*stack)
            writer.wait(key, 42, "futex", seconds, count=count, waker=(42, waker), stack=where)
    runs(writer, key, 0.002)
    facts = {one.key: "".join(one.facts) for one in verdicts()[0].causes}

    assert "100 % of it ended by t43" in facts[Cause.GIL]
    assert "100 % of it ended by t44" in facts[Cause.LOCK]


def test_a_thread_that_asks_for_little_of_the_devices_time_is_not_reported(writer, verdicts):
    """It sleeps between requests, which is no stall of the device that another thread feeds."""
    key = process(writer, 43, 44)
    writer.wait(key, 42, "futex", 2.0, waker=(42, 44), stack=writer.stack(LOOKUP, SEM_WAIT))
    writer.wait(key, 42, "futex", 0.1, waker=(42, 43), stack=writer.stack(STEP, TAKE_GIL))
    writer.wait(key, 43, "sleep", 4.2, stack=writer.stack(FETCH, ("nanosleep", "libc.so.6")))
    on_cpu(writer, key, 1.5, STEP, ADD, LAUNCH)
    on_cpu(writer, key, 0.7, FETCH, ADD, LAUNCH, tid=43)
    runs(writer, key, 0.5)
    runs(writer, key, 0.03, tid=43)
    (verdict,) = verdicts()

    assert verdict.bounds[0].key == Bound.LOCK
    assert Cause.SLEEP not in shares(verdict)


@pytest.mark.parametrize("timed", [True, False])
def test_a_copy_to_the_host_waits_for_the_work_before_it(writer, verdicts, timed):
    """2,000 copies of 64 kB take 0.1 s at most; the calls take 2.5, as the kernels do."""
    key = process(writer)
    copies = {"count": 2000, "moved": 131_000_000, "direction": "d2h"}
    stack = writer.stack(STEP, ADD)
    writer.calls(key, 42, "cudaMemcpyAsync", seconds=2.5, op="copy", stack=stack, **copies)
    writer.wait(key, 42, "poll", 2.0, waker=(900, 901), stack=writer.stack(LOOKUP, "epoll_wait"))
    on_cpu(writer, key, 0.4, STEP, ADD, LAUNCH)
    runs(writer, key, 0.5)
    if timed:
        runs(writer, key, 0.002, kind="copy", direction="d2h", bytes=65_536)
    (verdict,) = verdicts()

    assert verdict.bounds[0].key == Bound.IO
    assert shares(verdict).get(Cause.COPY, 0.0) < 0.04


def test_waits_behind_copies_are_for_the_kernels_that_ran_meanwhile(writer, verdicts):
    """Three inputs to the device and a result back in each step, each with a wait."""
    key = process(writer)
    copies = {"count": 900, "moved": 90_000_000, "direction": "h2d"}
    writer.calls(key, 42, "cudaMemcpyAsync", seconds=0.1, op="copy", **copies)
    writer.calls(key, 42, "cudaStreamSynchronize", count=1000, seconds=2.6, op="sync")
    writer.wait(key, 42, "sync to disk", 1.5, stack=writer.stack(FETCH, "fsync"))
    on_cpu(writer, key, 0.5, STEP, ADD, LAUNCH)
    runs(writer, key, 0.5)
    runs(writer, key, 0.002, kind="copy", direction="h2d", bytes=100_000)
    (verdict,) = verdicts()

    assert verdict.bounds[0].key == Bound.IO
    assert shares(verdict).get(Cause.COPY, 0.0) < 0.06


@pytest.mark.parametrize(("working", "cause"), [(0.05, Cause.INPUT), (1.0, Cause.SLEEP)])
def test_a_function_that_only_receives_and_sleeps_polls(writer, verdicts, working, cause):
    key = process(writer)
    writer.wait(key, 42, "sleep", 2.5, count=2500, stack=writer.stack(FETCH, "nanosleep"))
    on_cpu(writer, key, 0.5, FETCH, GET, EVAL)
    on_cpu(writer, key, working, FETCH, EVAL)
    runs(writer, key, 0.1)
    (verdict,) = verdicts()

    assert shares(verdict)[cause] >= 0.5


@pytest.mark.parametrize(
    ("handed_over", "count", "cause"),
    [(0.0, 300, Cause.SLEEP), (0.3, 300, Cause.INPUT), (0.0, 3000, Cause.INPUT)],
    ids=["never", "at times", "too short to know"],
)
def test_a_wait_for_something_that_only_a_timer_ends_is_a_sleep(
    writer, verdicts, handed_over, count, cause
):
    """`Event.wait` with a timeout as a beat; a queue that is asked again and again is input."""
    key = process(writer, 43)
    beat = writer.stack(FETCH, GET, SEM_WAIT)
    writer.wait(key, 42, "futex", 2.5 - handed_over, count=count, stack=beat)
    if handed_over:
        writer.wait(key, 42, "futex", handed_over, count=9, waker=(42, 43), stack=beat)
    on_cpu(writer, key, 0.1, FETCH, GET, EVAL)
    on_cpu(writer, key, 1.0, STEP, ADD, LAUNCH)
    runs(writer, key, 0.1)

    assert shares(verdicts()[0])[cause] == pytest.approx(0.5, abs=0.03)


def test_code_keeps_its_time_beside_waits_that_are_longer(writer, verdicts):
    key = process(writer)
    writer.calls(key, 42, "cuStreamSynchronize", count=800, seconds=2.8, op="sync")
    on_cpu(writer, key, 1.8, FETCH, EVAL)
    on_cpu(writer, key, 0.4, STEP, ADD, LAUNCH)
    runs(writer, key, 0.6)
    (verdict,) = verdicts()

    assert verdict.bounds[0].key == Bound.HOST
    assert shares(verdict)[Cause.HOST] == pytest.approx(0.36, abs=0.02)
    assert verdict.causes[0].locations[0].function.startswith("fetch train.py")


def test_code_that_waits_keep_from_running_beside_the_device_and_kernels_that_are_waited_for(
    writer, verdicts
):
    """Not waiting would save what the waits take; the code keeps its time, and comes first."""
    key = process(writer)
    item = writer.stack(STEP, ADD)
    writer.calls(key, 42, "cuStreamSynchronize", count=100, seconds=1.2, op="sync", stack=item)
    on_cpu(writer, key, 1.7, FETCH, EVAL)
    on_cpu(writer, key, 1.9, STEP, ADD, LAUNCH)
    runs(writer, key, 0.6)
    (verdict,) = verdicts()
    named = {one.key: one.share for one in verdict.bounds}

    assert list(named) == [Bound.HOST, Bound.SYNCHRONIZATION, Bound.COMPUTE]
    assert named[Bound.HOST] == pytest.approx(0.34, abs=0.01)
    assert named[Bound.SYNCHRONIZATION] == pytest.approx(0.24, abs=0.01)
    assert sum(shares(verdict).values()) == pytest.approx(0.4, abs=0.01)


@pytest.mark.parametrize(("back", "slept"), [(4.5, 0.6), (1.0, 0.0)])
def test_threads_that_wait_for_each_other_wait_for_a_timer(writer, verdicts, back, slept):
    """A server collects requests until its window is over, from threads that wait for answers."""
    key = process(writer, 43)
    batches = writer.stack(STEP, GET, SEM_WAIT)
    writer.wait(key, 42, "futex", 3.5, count=300, waker=(42, 43), stack=batches)
    answers = writer.stack(FETCH, SEM_WAIT)
    writer.wait(key, 43, "futex", back, count=300, waker=(42, 42), stack=answers)
    on_cpu(writer, key, 0.5, STEP, ADD, LAUNCH)
    runs(writer, key, 0.1)
    found = shares(verdicts()[0])

    assert found.get(Cause.SLEEP, 0.0) == pytest.approx(slept, abs=0.01)
    assert found[Cause.INPUT] == pytest.approx(0.7 - slept, abs=0.01)


@pytest.mark.parametrize(("inner", "cause"), [((SEM_WAIT,), Cause.LOCK), ((ADD, SEM_WAIT), None)])
def test_a_lock_of_the_program_is_no_turn(writer, verdicts, inner, cause):
    """Threads that launch wait for each other: for a lock, or for the other's launches."""
    key = process(writer, 43)
    for tid, other in ((42, 43), (43, 42)):
        stack = writer.stack(LOOKUP, *inner)
        writer.wait(key, tid, "futex", 3.0, count=300, waker=(42, other), stack=stack)
        on_cpu(writer, key, 1.0, STEP, ADD, LAUNCH, tid=tid)
        runs(writer, key, 0.1, tid=tid)
    found = verdicts()

    assert len(found) == (2 if cause else 1)
    assert shares(found[0]).get(Cause.LOCK, 0.0) == pytest.approx(0.6 if cause else 0, abs=0.02)


def test_a_collective_of_the_host_is_communication(writer, verdicts):
    key = process(writer, 43)
    stack = writer.stack(STEP, ALL_REDUCE, WORK_WAIT, ("pthread_cond_wait", "libc.so.6"))
    writer.wait(key, 42, "futex", 3.0, count=200, waker=(42, 43), stack=stack)
    on_cpu(writer, key, 1.0, STEP, ADD, LAUNCH)
    runs(writer, key, 0.1)
    (verdict,) = verdicts()

    assert verdict.bounds[0].key == Bound.COMMUNICATION
    assert verdict.causes[0].locations[0].function == "step train.py:88"


@pytest.mark.parametrize(
    ("waits", "second", "is_named"), [(500, 0.2, True), (0, 0.2, False), (500, 0.03, False)]
)
def test_work_of_a_second_stream_for_which_the_first_one_waits(
    writer, verdicts, waits, second, is_named
):
    key = process(writer)
    if waits:
        stack = writer.stack(LOOKUP, ADD)
        writer.calls(
            key, 42, "cudaStreamWaitEvent", count=waits, seconds=0.01, op="sync", stack=stack
        )
    writer.calls(key, 42, "cuStreamSynchronize", count=50, seconds=4.0, op="sync")
    runs(writer, key, 0.78)
    runs(writer, key, second, stream=13, kind="replay", name="")
    (verdict,) = verdicts()
    named = [one.share for one in verdict.bounds if one.key == Bound.DEPENDENCY]

    assert named == ([pytest.approx(0.2, abs=0.01)] if is_named else [])
    assert any("in lookup train.py:30" in line for line in verdict.evidence) == is_named


@pytest.mark.parametrize(("waited", "is_named"), [(4.0, True), (0.2, False)])
def test_the_order_of_streams_is_named_wherever_kernels_are(writer, verdicts, waited, is_named):
    """The host waits for kernels for most of the time, and a device that idles for 25 % of it is
    not bound by its kernels alone."""
    key = process(writer)
    stack = writer.stack(LOOKUP, ADD)
    writer.calls(key, 42, "cudaStreamWaitEvent", count=500, seconds=0.01, op="sync", stack=stack)
    item = writer.stack(STEP, ADD)
    writer.calls(key, 42, "cuStreamSynchronize", count=50, seconds=waited, op="sync", stack=item)
    on_cpu(writer, key, 0.8, STEP, ADD, LAUNCH)
    runs(writer, key, 0.6)
    runs(writer, key, 0.15, stream=13)
    (verdict,) = verdicts()
    named = {one.key: one.share for one in verdict.bounds}

    assert (Bound.COMPUTE in named) == is_named
    assert named.get(Bound.DEPENDENCY, 0.0) == pytest.approx(0.15 * is_named, abs=0.01)


@pytest.mark.parametrize(
    ("back", "ppid", "cause"), [(0.0, 42, Cause.INPUT), (2.0, 42, Cause.LOCK), (0.0, 1, Cause.LOCK)]
)
def test_a_semaphore_goes_one_way_and_a_lock_is_passed_on(writer, verdicts, back, ppid, cause):
    """Between a program and its worker process, on a futex in memory of both."""
    key = process(writer)
    worker = writer.process(90, "worker", ppid=ppid, threads=[{"tid": 90, "comm": "courier"}])
    stack = writer.stack(FETCH, SEM_WAIT)
    writer.wait(key, 42, "futex", 3.0, count=300, waker=(90, 90), stack=stack)
    writer.on_cpu(worker, 90, writer.stack(LOOKUP, EVAL), 400)
    if back:
        writer.wait(worker, 90, "futex", back, count=300, waker=(42, 42), stack=stack)
    runs(writer, key, 0.1)
    first = verdicts()[0].causes[0]

    assert first.key == cause
    ended = "ended by courier (90), on a CPU in lookup train.py:30"
    assert [ended in fact for fact in first.facts] == ([] if back else [True])


def test_stalls_of_a_busy_device_are_named_beside_its_kernels(writer, verdicts):
    key = process(writer)
    writer.wait(key, 42, "sync to disk", 0.5, stack=writer.stack(FETCH, "fsync"))
    writer.calls(key, 42, "cuStreamSynchronize", count=50, seconds=4.0, op="sync")
    runs(writer, key, 0.88)
    (verdict,) = verdicts()

    assert [one.key for one in verdict.bounds] == [Bound.COMPUTE, Bound.IO]
    assert verdict.bounds[1].share == pytest.approx(0.1, abs=0.01)
    assert sum(one.share for one in verdict.causes) <= 0.13


def test_without_a_device_the_first_thread_is_reported_where_others_let_it_go_on(writer, verdicts):
    """It is hardly ever on a CPU, and waits for the lock that a busy thread holds."""
    key = process(writer, 43)
    stack = writer.stack(LOOKUP, SEM_WAIT)
    writer.wait(key, 42, "futex", 4.8, count=300, waker=(42, 43), stack=stack)
    on_cpu(writer, key, 0.05, STEP, EVAL)
    on_cpu(writer, key, 4.5, FETCH, EVAL, tid=43)
    first = verdicts()[0]

    assert first.device_name == "t42 (42)"
    assert first.bounds[0].key == Bound.LOCK
    assert "on a CPU in fetch train.py:20" in first.causes[0].facts[0]


def test_a_thread_that_waits_for_the_end_only_is_not_reported(writer, verdicts):
    key = process(writer, 43)
    writer.wait(key, 42, "futex", 4.9, count=1, waker=(42, 43), stack=writer.stack(LOOKUP))
    on_cpu(writer, key, 4.5, FETCH, EVAL, tid=43)

    assert [one.device_name for one in verdicts()] == ["t43 (43)"]


def test_a_python_function_may_be_named_like_one_of_the_kernel_or_the_interpreter(writer, verdicts):
    key = process(writer)
    names = ("take_gil", "munmap", "vfs_read")
    stack = writer.stack(*((name, "[python]", "train.py", 9, "python") for name in names), SEM_WAIT)
    writer.wait(key, 42, "futex", 2.0, count=300, stack=stack)
    writer.on_cpu(key, 42, stack, 200)
    (verdict,) = verdicts()

    assert set(shares(verdict)) == {Cause.LOCK, Cause.HOST}


@pytest.mark.parametrize(
    ("inside", "cause"),
    [
        ((EVAL, COND_WAIT), Cause.GIL),
        ((GET, COND_WAIT), Cause.INPUT),
        ((ADD, COND_WAIT), Cause.LOCK),
    ],
)
def test_a_condition_of_the_interpreter_itself_is_its_lock_also_without_symbols(
    writer, verdicts, inside, cause
):
    key = process(writer, 43)
    stack = writer.stack(STEP, *inside)
    writer.wait(key, 42, "futex", 3.0, count=600, waker=(42, 43), stack=stack)
    on_cpu(writer, key, 0.5, STEP, EVAL)
    (verdict,) = verdicts()

    assert verdict.causes[0].key == cause


def test_samples_of_perf_are_explained(tmp_path):
    lines = [
        f"app 100/100 [000] {second}.{part:02}0000: 10000000 cpu-clock:\n"
        f"\t  1000 {'parse' if part % 4 else 'emit'}+0x10 (/usr/bin/app)\n"
        for second in range(5)
        for part in range(0, 99, 3)
    ]
    path = tmp_path / "perf.txt"
    path.write_text("\n".join(lines))
    explanation = explain(open_timeline([path]))

    assert explanation.verdicts[0].bounds[0].key == Bound.HOST
    assert "parse" in render(explanation)
