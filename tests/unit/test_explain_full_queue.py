# SPDX-License-Identifier: Apache-2.0
"""A thread that fills a queue and waits for room in it is ahead: what takes from it is slower."""

from __future__ import annotations

import pytest

from captures import Writer
from sonde.export.verdict import render
from sonde.model.causes import Bound, Cause
from sonde.model.verdict import Explanation
from training_capture import on_cpu, process

FEED = ("feed", "[python]", "tune.py", 12, "python")
STEP = ("step", "[python]", "tune.py", 40, "python")
PUT = ("Queue.put", "[python]", "queue.py", 140, "python")
GET = ("Queue.get", "[python]", "queue.py", 171, "python")
WAIT = ("Condition.wait", "[python]", "threading.py", 359, "python")
ENTER = ("Condition.__enter__", "[python]", "threading.py", 304, "python")
PUT_OF_PROCESSES = ("Queue.put", "[python]", "multiprocessing/queues.py", 88, "python")
COND_WAIT = ("pthread_cond_wait", "libc.so.6")
SEM_WAIT = ("sem_wait", "libc.so.6")
EVAL = ("_PyEval_EvalFrameDefault", "python3.12")


@pytest.mark.parametrize("stack", [(PUT, WAIT, COND_WAIT), (PUT_OF_PROCESSES, SEM_WAIT)])
def test_a_feeder_that_waits_for_room_is_ahead_of_what_takes(writer: Writer, verdicts, stack):
    key = process(writer, 43)
    on_cpu(writer, key, 4.8, STEP, EVAL)
    waits = writer.stack(FEED, *stack)
    writer.wait(key, 43, "futex", 4.3, count=100, waker=(42, 42), stack=waits)
    on_cpu(writer, key, 0.6, FEED, EVAL, tid=43)
    first, feeder = verdicts()

    assert first.bounds[0].key == Bound.HOST
    assert feeder.bounds[0].key == Bound.FULL_QUEUE
    assert feeder.causes[0].key == Cause.FULL_QUEUE
    text = render(Explanation([feeder], [], []))
    assert "t43 (43) — mix: output-bound 86 %" in text
    assert "next: nothing here: it is ahead of t42 (42), which takes from the queue" in text
    assert "make step tune.py:40 there faster" in text
    assert "input" not in text


@pytest.mark.parametrize(
    ("stack", "bound"),
    [((GET, WAIT, COND_WAIT), Bound.INPUT), ((PUT, ENTER, COND_WAIT), Bound.LOCK)],
)
def test_other_waits_of_a_queue_are_none_for_room(writer: Writer, verdicts, stack, bound):
    key = process(writer, 43)
    on_cpu(writer, key, 4.8, STEP, EVAL)
    waits = writer.stack(FEED, *stack)
    writer.wait(key, 43, "futex", 4.3, count=100, waker=(42, 42), stack=waits)
    _, feeder = verdicts()

    assert feeder.bounds[0].key == bound
