# SPDX-License-Identifier: Apache-2.0
"""Places of a verdict: who called the code, who was waited for, who had the CPU, where streams
wait."""

from __future__ import annotations

import pytest

from sonde.model.causes import Bound, Cause
from training_capture import on_cpu, process, runs

MODULE = ("<module>", "[python]", "train.py", 99, "python")
MAIN = ("main", "[python]", "train.py", 88, "python")
ENCODE = ("encode", "[python]", "train.py", 21, "python")
DECODE = ("decode", "[python]", "train.py", 25, "python")
FORWARD = ("forward", "[python]", "train.py", 14, "python")
AGAIN = ("forward", "[python]", "train.py", 16, "python")
FETCH = ("fetch", "[python]", "train.py", 30, "python")
CALL = ("_call_impl", "[python]", "torch/nn/modules/module.py", 1751, "python")
GET = ("Queue.get", "[python]", "queue.py", 171, "python")
RECEIVE = ("recv_bytes", "[python]", "multiprocessing/connection.py", 216, "python")
EVAL = ("_PyEval_EvalFrameDefault", "python3.12")
ADD = ("at::_ops::add::call", "libtorch_cpu.so")
LAUNCH = ("cudaLaunchKernel", "libcudart.so.13")
SEM_WAIT = ("sem_wait", "libc.so.6")
COND_WAIT = ("pthread_cond_timedwait", "libc.so.6")


def facts(verdict, cause):
    return "".join(next(one.facts for one in verdict.causes if one.key == cause))


@pytest.mark.parametrize(
    ("outer", "caller"),
    [
        ((MODULE, MAIN, ENCODE, CALL), "encode train.py:21"),
        ((MODULE, MAIN, ENCODE, AGAIN), "encode train.py:21"),
        ((MODULE,), ""),
        ((), ""),
    ],
    ids=["through a framework", "a function within itself", "a module is none", "none"],
)
def test_a_place_is_reported_with_its_caller(writer, explained, outer, caller):
    key = process(writer)
    on_cpu(writer, key, 4.0, *outer, FORWARD, EVAL)
    runs(writer, key, 0.001)
    (first, *_) = explained().causes

    assert first.key == Cause.HOST
    (place,) = first.locations
    assert (place.function, place.caller) == ("forward train.py:14", caller)


@pytest.mark.parametrize(("mostly", "caller"), [(2.5, "encode train.py:21"), (2.0, "")])
def test_who_called_it_for_half_of_the_time_is_no_answer(writer, explained, mostly, caller):
    key = process(writer)
    on_cpu(writer, key, mostly, MAIN, ENCODE, FORWARD, EVAL)
    on_cpu(writer, key, 2.0, MAIN, DECODE, FORWARD, EVAL)
    runs(writer, key, 0.001)

    assert explained().causes[0].locations[0].caller == caller


def test_kernels_are_reported_with_the_code_that_launched_them(writer, explained):
    key = process(writer)
    stack = writer.stack(MAIN, ENCODE, FORWARD, ADD, LAUNCH)
    writer.calls(key, 42, "cudaStreamSynchronize", seconds=4.5, op="sync", count=50)
    on_cpu(writer, key, 0.3, MAIN, ENCODE, FORWARD, ADD, LAUNCH)
    runs(writer, key, 0.95, stack_id=stack)
    (bound, *_) = explained().bounds

    assert bound.key == Bound.COMPUTE
    assert [one.text for one in bound.locations] == ["forward train.py:14 ← encode train.py:21"]


def test_where_streams_fork_and_where_they_join_are_places_of_the_dependency(writer, explained):
    key = process(writer)
    for where in (ENCODE, DECODE):
        stack = writer.stack(MAIN, where, ("cudaStreamWaitEvent", "libcudart.so.13"))
        writer.calls(
            key, 42, "cudaStreamWaitEvent", count=500, seconds=0.01, op="sync", stack=stack
        )
    writer.calls(key, 42, "cudaStreamSynchronize", seconds=4.5, op="sync", count=50)
    runs(writer, key, 0.6)
    runs(writer, key, 0.35, stream=8)
    found = next(one for one in explained().bounds if one.key == Bound.DEPENDENCY)

    assert {one.function for one in found.locations} == {"encode train.py:21", "decode train.py:25"}


def test_the_thread_between_is_reported_with_where_it_waits(writer, explained):
    """A batch comes from a thread that reads a pipe, which a worker fills after a sleep."""
    key = process(writer, 43)
    worker = process(writer, pid=90, ppid=42)
    batch = writer.stack(MAIN, GET, SEM_WAIT)
    writer.wait(key, 42, "futex", 2.5, count=100, waker=(42, 43), stack=batch)
    pipe = writer.stack(FETCH, RECEIVE, ("read", "libc.so.6"))
    writer.wait(key, 43, "read", 4.5, count=100, waker=(90, 90), stack=pipe)
    on_cpu(writer, key, 0.2, FETCH, EVAL, tid=43)
    writer.wait(worker, 90, "sleep", 4.8, stack=writer.stack(DECODE, ("nanosleep", "libc.so.6")))
    on_cpu(writer, worker, 0.1, DECODE, EVAL, tid=90)
    on_cpu(writer, key, 2.0, MAIN, ADD, LAUNCH)
    runs(writer, key, 0.1)

    fact = facts(explained(), Cause.INPUT)
    assert "t43 (43), which waits in fetch train.py:30 for t90 (90)" in fact
    assert "sleep in decode train.py:25" in fact


@pytest.mark.parametrize(("inner", "follows"), [((GET, SEM_WAIT), True), ((SEM_WAIT,), False)])
def test_a_thread_that_writes_results_to_a_pipe_stands_for_who_makes_them(
    writer, explained, inner, follows
):
    """It waits in a queue of the same process; who waits for a lock may hold up others itself."""
    key = process(writer)
    worker = process(writer, 91, pid=90, ppid=42)
    pipe = writer.stack(FETCH, RECEIVE, ("poll", "libc.so.6"))
    writer.wait(key, 42, "poll", 2.5, count=100, waker=(90, 91), stack=pipe)
    writer.wait(worker, 91, "futex", 4.8, waker=(90, 90), stack=writer.stack(*inner))
    on_cpu(writer, worker, 0.1, ENCODE, EVAL, tid=91)
    on_cpu(writer, worker, 4.8, DECODE, EVAL, tid=90)
    on_cpu(writer, key, 2.0, MAIN, ADD, LAUNCH)
    runs(writer, key, 0.1)

    fact = facts(explained(), Cause.INPUT)
    assert ("t91 (91), which waits for t90 (90), on a CPU in decode train.py:25" in fact) is follows
    assert ("t91 (91), on a CPU in encode train.py:21" in fact) is not follows


@pytest.mark.parametrize(("queued", "named"), [(1.0, True), (0.1, False)])
def test_who_had_the_cpu_is_who_was_short_of_one_too(writer, explained, queued, named):
    """Other threads that ran, but never waited for a CPU, had other ones."""
    key = process(writer, 43, 44)
    writer.wait(key, 42, "preempted", 2.4, count=900, kind="runqueue")
    on_cpu(writer, key, 2.0, MAIN, ADD, LAUNCH)
    for tid in (43, 44):
        on_cpu(writer, key, 3.0, ENCODE, ("deflate", "libz.so.1.3"), tid=tid)
        writer.wait(key, tid, "preempted", queued, count=300, kind="runqueue")
    runs(writer, key, 0.1)

    fact = facts(explained(), Cause.RUN_QUEUE)
    text = "t43 (43) and 1 more, of the program itself, short of a CPU, too, had 1.2 CPUs "
    text += "meanwhile, mostly in encode"
    assert (text in fact) is named
    assert bool(fact) is named


@pytest.mark.parametrize("function", ["PyEval_AcquireThread", "_PyThreadState_Attach"])
def test_the_interpreters_lock_is_known_by_whatever_function_takes_it(writer, explained, function):
    """Interpreters without symbols show only their public functions; a framework takes it, too."""
    key = process(writer, 43)
    acquire = ("pybind11::gil_scoped_acquire::gil_scoped_acquire()", "libtorch_python.so")
    stack = writer.stack(
        MAIN, ADD, acquire, (function, "python3.12"), ("", "python3.12"), COND_WAIT
    )
    writer.wait(key, 42, "futex", 2.5, count=600, stack=stack)
    on_cpu(writer, key, 2.0, MAIN, ADD, LAUNCH)
    runs(writer, key, 0.1)

    assert {Cause.GIL, Cause.LOCK} & {one.key for one in explained().causes} == {Cause.GIL}


@pytest.mark.parametrize(("seconds", "named"), [(0.5, True), (0.05, False)])
def test_the_timer_that_cuts_waits_for_the_interpreter_is_nobody(writer, explained, seconds, named):
    """Of 3 s, few waits are ended by a thread: CPython asks for its lock every 5 ms."""
    key = process(writer, 43)
    stack = writer.stack(MAIN, ("take_gil", "python3.12"), COND_WAIT)
    writer.wait(key, 42, "futex", 3.0 - seconds, count=600, stack=stack)
    other = writer.stack(ENCODE, ("take_gil", "python3.12"), COND_WAIT)
    writer.wait(key, 42, "futex", seconds, count=10, waker=(42, 43), stack=other)
    on_cpu(writer, key, 3.0, DECODE, EVAL, tid=43)
    on_cpu(writer, key, 1.5, MAIN, ADD, LAUNCH)
    runs(writer, key, 0.1)

    fact = facts(explained(), Cause.GIL)
    assert ("t43 (43), on a CPU in decode train.py:25" in fact) is named
