# SPDX-License-Identifier: Apache-2.0
"""The verdict on a server is about what its requests wait for, and names who holds what a pool
lends."""

from __future__ import annotations

from pathlib import Path

import pytest

from captures import Writer
from sonde.analyze.bound import explain
from sonde.export.verdict import document, headline, render
from sonde.model.causes import Bound, Cause
from sonde.model.verdict import Explanation
from sonde.recording.timelines import open_timeline
from training_capture import on_cpu, process

THREAD = ("ThreadingMixIn.process_request_thread", "[python]", "socketserver.py", 691, "python")
ONE = ("BaseHTTPRequestHandler.handle_one_request", "[python]", "http/server.py", 408, "python")
READ = ("SocketIO.readinto", "[python]", "socket.py", 706, "python")
PAGE = ("Page.do_GET", "[python]", "shop.py", 31, "python")
QUERY = ("Pool.query", "[python]", "shop.py", 23, "python")
RECEIVE = ("Pool.query", "[python]", "shop.py", 25, "python")
BORROW = ("Pool.borrow", "[python]", "shop.py", 17, "python")
TOTALS = ("totals", "[python]", "shop.py", 40, "python")
SESSION = ("Session.handle", "[python]", "shop.py", 9, "python")
NEXT = ("Session.handle", "[python]", "shop.py", 8, "python")
CUSTOMER = ("customer", "[python]", "shop.py", 50, "python")
WAIT = ("Condition.wait", "[python]", "threading.py", 359, "python")
GET = ("Queue.get", "[python]", "queue.py", 171, "python")
LOOP = ("BaseEventLoop._run_once", "[python]", "asyncio/base_events.py", 1919, "python")
SELECT = ("EpollSelector.select", "[python]", "selectors.py", 468, "python")
WORKER = ("_worker", "[python]", "concurrent/futures/thread.py", 90, "python")
LOOKUP = ("lookup", "[python]", "shop.py", 60, "python")
ANSWER = ("answer", "[python]", "shop.py", 70, "python")
MAKE = ("make", "[python]", "shop.py", 80, "python")
COND_WAIT = ("pthread_cond_wait", "libc.so.6")
TAKE_GIL = ("take_gil", "python3.12")
EVAL = ("_PyEval_EvalFrameDefault", "python3.12")
RECV = ("recv", "libc.so.6")
FIRST, HOLDERS = 42, (44, 45)
HANDLERS = range(60, 66)
SESSIONS = (70, 71, 72)
CUSTOMERS = range(80, 86)


@pytest.fixture
def writer():
    return Writer(seconds=5)


@pytest.fixture
def verdicts(writer, tmp_path):
    def found():
        return explain(open_timeline([writer.write(tmp_path / "a.sonde")])).verdicts

    return found


def shop(writer):
    """Requests wait for a pool, of which two threads hold nearly all, for sessions that sleep; the
    customers are threads of the process, too."""
    key = process(writer, *HOLDERS, *HANDLERS, *SESSIONS, *CUSTOMERS)
    handled = THREAD, ONE, PAGE
    for number, tid in enumerate(HANDLERS):
        idle = writer.stack(THREAD, ONE, READ, RECV)
        writer.wait(key, tid, "socket", 4.0, count=300, waker=(42, 80 + number), stack=idle)
        borrow = writer.stack(*handled, QUERY, BORROW, WAIT, COND_WAIT)
        giver = HANDLERS[number - 1]
        writer.wait(key, tid, "futex", 0.6, count=200, waker=(42, giver), stack=borrow)
        asks = writer.stack(*handled, RECEIVE, RECV)
        writer.wait(key, tid, "socket", 0.2, count=200, waker=(42, SESSIONS[2]), stack=asks)
    for number, tid in enumerate(HOLDERS):
        asks = writer.stack(TOTALS, RECEIVE, RECV)
        waker = (42, SESSIONS[number])
        writer.wait(key, tid, "socket", 4.6, count=5, waker=waker, stack=asks)
        writer.wait(key, tid, "futex", 0.1, count=5, waker=(42, 60), stack=writer.stack(
            TOTALS, QUERY, BORROW, WAIT, COND_WAIT))  # fmt: skip
    for number, tid in enumerate(SESSIONS):
        asked = (*HOLDERS, 60)[number]
        sleeps = writer.stack(THREAD, SESSION, "nanosleep")
        writer.wait(key, tid, "sleep", 4.2, count=40, stack=sleeps)
        reads = writer.stack(THREAD, NEXT, READ, RECV)
        writer.wait(key, tid, "socket", 0.5, count=40, waker=(42, asked), stack=reads)
    for number, tid in enumerate(CUSTOMERS):
        writer.wait(key, tid, "socket", 2.0, count=300, waker=(42, 60 + number),
                    stack=writer.stack(CUSTOMER, READ, RECV))  # fmt: skip
        writer.wait(key, tid, "sleep", 2.9, count=300, stack=writer.stack(CUSTOMER, "nanosleep"))
    return key


def test_requests_come_before_threads_that_sleep_longer(writer, verdicts):
    """Those of the server which asks, not of the one that is asked; its customers are no part."""
    shop(writer)
    first, second, *_ = verdicts()

    assert first.service == "Page.do_GET shop.py"
    assert first.threads == len(HANDLERS)
    assert first.bounds[0].key == Bound.POOL
    assert first.request_ns == pytest.approx(6 * 0.8e9, rel=0.01)
    shares = {one.key: one.share for one in first.causes}
    assert shares == {Cause.POOL: pytest.approx(0.75), Cause.IO: pytest.approx(0.25)}
    assert second.service == "Session.handle shop.py"
    assert second.bounds[0].key == Bound.SLEEP


def test_who_holds_what_a_pool_lends_is_named(writer, verdicts):
    """By what threads do in the function that takes from it, though they end hardly any wait."""
    shop(writer)
    first = verdicts()[0]
    pool = first.causes[0]

    assert pool.key == Cause.POOL
    assert pool.locations[0].text == "Pool.borrow shop.py:17 ← Pool.query shop.py:23"
    assert pool.facts == [
        "1.8 of what it lends held by t44 (44) and 1 more, on average: mostly socket in Pool.query "
        "shop.py:25 ← totals shop.py:40; answered by t70 (70) and 1 more: mostly sleep in "
        "Session.handle shop.py:9",
        "0.2 of what it lends held by the requests themselves, on average: mostly socket in "
        "Pool.query shop.py:25 ← Page.do_GET shop.py:31; answered by t72 (72): mostly sleep in "
        "Session.handle shop.py:9",
    ]
    lines = headline(Explanation([first], [], [])).splitlines()
    assert lines[0] == (
        "VERDICT  requests of Page.do_GET shop.py, in 6 threads — mix: pool exhausted 75 %, "
        "I/O-bound 25 %"
    )
    assert lines[-1].startswith("  next: let t44 (44) and 1 more keep what the pool lends for a ")


def test_functions_of_the_same_names_in_another_program_hold_nothing(writer, verdicts):
    shop(writer)
    threads = [{"tid": tid, "comm": "x"} for tid in (500, 501, 502)]
    other = writer.process(500, "python", threads=threads, command="evil.py")
    borrow = writer.stack(THREAD, ONE, PAGE, QUERY, BORROW, WAIT, COND_WAIT)
    for tid in (501, 502):
        writer.wait(other, tid, "futex", 0.3, count=99, waker=(500, 1003 - tid), stack=borrow)
        holds = writer.stack(TOTALS, RECEIVE, "fsync")
        writer.wait(other, tid, "sync to disk", 4.5, count=5, stack=holds)
    first = next(one for one in verdicts() if one.causes[0].key == Cause.POOL)
    assert first.causes[0].facts[0].startswith("1.8 of what it lends held by t44 (44) and 1 more")
    assert not any("sync to disk" in fact for fact in first.causes[0].facts)


def test_a_queue_that_one_thread_fills_is_no_pool(writer, verdicts):
    key = process(writer, 44, *HANDLERS)
    on_cpu(writer, key, 4.0, MAKE, EVAL, tid=44)
    for tid in HANDLERS:
        stack = writer.stack(THREAD, ONE, PAGE, GET, COND_WAIT)
        writer.wait(key, tid, "futex", 2.0, count=100, waker=(42, 44), stack=stack)
    first = verdicts()[0]

    assert first.service == "Page.do_GET shop.py"
    assert first.bounds[0].key == Bound.INPUT
    assert "t44 (44), on a CPU in make shop.py:80" in first.causes[0].facts[0]


def test_threads_that_hand_work_to_one_another_take_no_requests(writer, verdicts):
    """A crawler's workers fill the queue that they take from."""
    key = process(writer, *HANDLERS)
    on_cpu(writer, key, 0.5, MAKE, EVAL, tid=60)
    for number, tid in enumerate(HANDLERS):
        stack = writer.stack(PAGE, GET, COND_WAIT)
        waker = (42, HANDLERS[number - 1])
        writer.wait(key, tid, "futex", 4.0, count=100, waker=waker, stack=stack)

    for verdict in verdicts():
        assert not verdict.service
        assert Cause.POOL not in {one.key for one in verdict.causes}


def test_a_page_of_metrics_in_a_program_that_computes_decides_nothing(writer, verdicts):
    key = process(writer, 60)
    on_cpu(writer, key, 4.5, MAKE, EVAL)
    on_cpu(writer, key, 0.3, THREAD, ONE, PAGE, EVAL, tid=60)
    writer.wait(key, 60, "socket", 4.0, count=30, stack=writer.stack(THREAD, ONE, READ, RECV))

    assert verdicts()[0].device_name == "t42 (42)"


def event_loop(writer, loop_waker):
    """An event loop whose tasks wait for a thread that they are handed to."""
    key = process(writer, 60)
    waits = writer.stack(LOOP, SELECT)
    writer.wait(key, FIRST, "poll", 4.0, count=120, waker=loop_waker, stack=waits)
    on_cpu(writer, key, 0.4, LOOP, ANSWER, EVAL)
    sleeps = writer.stack(WORKER, LOOKUP, "nanosleep")
    writer.wait(key, 60, "sleep", 4.8, count=160, stack=sleeps)


def test_an_event_loop_whose_tasks_are_pending_is_not_idle(writer, verdicts):
    event_loop(writer, (42, 60))
    first, second = verdicts()

    assert first.service == "answer shop.py"
    assert first.bounds[0].key == Bound.INPUT
    assert "t60 (60), mostly waiting: sleep in lookup shop.py:60" in first.causes[0].facts[0]
    assert second.service == "lookup shop.py"
    assert "all of them are busy: further tasks wait for a thread" in second.evidence[1]


def test_an_event_loop_that_others_wake_is_idle(writer, verdicts):
    event_loop(writer, (0, 0))

    (loop,) = (one for one in verdicts() if one.service == "answer shop.py")
    assert loop.bounds[0].key == Bound.HOST


def test_tasks_of_a_program_that_takes_no_requests_are_none(writer, verdicts):
    key = process(writer, *HANDLERS)
    for tid in HANDLERS:
        on_cpu(writer, key, 1.0, WORKER, LOOKUP, EVAL, tid=tid)

    assert not any(one.service for one in verdicts())


def test_a_connection_that_the_program_accepts_itself_shows_requests(writer, verdicts):
    """The system call is known where no stack is: nobody came meanwhile. What the function that was
    given a connection waits for itself is the next request."""
    key = process(writer, *HANDLERS)
    writer.wait(key, FIRST, "socket", 4.9, count=0, call="accept4")
    for tid in HANDLERS:
        on_cpu(writer, key, 0.5, WORKER, ANSWER, MAKE, EVAL, tid=tid)
        reads = writer.stack(WORKER, ANSWER, READ, RECV)
        writer.wait(key, tid, "socket", 4.0, count=100, stack=reads)
    first = verdicts()[0]

    assert first.service == "answer shop.py"
    assert first.bounds[0].key == Bound.HOST
    assert "for 89 % of their time they wait for the next one" in first.evidence[1]


def test_more_threads_are_not_advised_where_they_share_the_interpreter_lock(writer, verdicts):
    """The thread that fills the queue already runs ahead."""
    key = process(writer, 44)
    writer.wait(key, FIRST, "futex", 4.0, count=100, waker=(42, 44),
                stack=writer.stack(MAKE, GET, COND_WAIT))  # fmt: skip
    writer.wait(key, FIRST, "futex", 0.4, count=80, waker=(42, 44),
                stack=writer.stack(MAKE, EVAL, TAKE_GIL))  # fmt: skip
    on_cpu(writer, key, 4.5, LOOKUP, EVAL, tid=44)
    first = verdicts()[0]

    assert first.bounds[0].key == Bound.INPUT
    assert first.advice[0].text.startswith(
        "make lookup shop.py:60 in t44 (44) faster, or move it into other processes"
    )


def test_no_share_of_a_place_exceeds_its_cause(writer, verdicts):
    """Samples may estimate more time on a CPU than there was: it is cut by cause and by place."""
    key = process(writer)
    on_cpu(writer, key, 5.5, MAKE, EVAL)
    on_cpu(writer, key, 1.5, LOOKUP, EVAL)
    (verdict,) = verdicts()

    assert sum(place.share for place in verdict.causes[0].locations) <= 1.001
    assert "%" in render(Explanation([verdict], [], []))


def test_a_short_recording_has_a_verdict_with_a_warning(tmp_path):
    """Also where a recording that was interrupted prints only its headline."""
    writer = Writer(seconds=0.2, chunk_seconds=0.2)
    key = process(writer)
    on_cpu(writer, key, 0.18, MAKE, EVAL)
    found = explain(open_timeline([writer.write(tmp_path / "a.sonde")]))

    warning = "  only 200 ms were recorded: what is rare is not in it, and shares are rough; record"
    for text in (render(found), headline(found)):
        first, second, *_ = text.splitlines()
        assert first.endswith("t42 (42) — CPU-bound: Python/C++ code")
        assert second.startswith(warning)


def traced(writer, key, number, kind, seconds, *stack, name=""):
    writer.add(
        "traced",
        key,
        kind=kind,
        name=name,
        trace_id=f"{number:032x}",
        span_id=f"{number:016x}",
        tid=60,
        stack_id=writer.stack(*stack),
        weight_count=1.0,
        weight_ns=seconds * 1e9,
    )


def test_the_slowest_traced_requests_are_shown_with_what_they_waited_for(writer, tmp_path):
    key = process(writer, 60)
    on_cpu(writer, key, 1.0, THREAD, ONE, PAGE, EVAL, tid=60)
    for number in range(1, 41):
        handled = THREAD, ONE, PAGE
        borrow = *handled, QUERY, BORROW, WAIT, COND_WAIT
        traced(writer, key, number, "blocked", 0.01 * number, *borrow, name="futex")
        traced(writer, key, number, "blocked", 0.004, *handled, RECEIVE, RECV, name="socket")
        traced(writer, key, number, "cpu", 0.002, *handled, EVAL)
        traced(writer, key, number, "runqueue", 0.001, *handled, EVAL)
    found = explain(open_timeline([writer.write(tmp_path / "a.sonde")]))

    assert found.requests_in_all == 40
    assert [one.ns for one in found.requests] == sorted(one.ns for one in found.requests)[::-1]
    lines = render(found).splitlines()
    at = lines.index("slowest of 40 traced requests:")
    waits = "400 ms futex in Pool.borrow shop.py:17, 4.00 ms socket in Pool.query shop.py:25"
    assert lines[at + 2].split() == f"{40:032x} 407 ms 2.00 ms 1.00 ms {waits}".split()
    assert len([line for line in lines[at:] if "futex" in line]) == 5
    assert lines[at] in headline(found)


def test_a_capture_without_traced_requests_has_no_table_of_them(writer, tmp_path):
    key = process(writer)
    on_cpu(writer, key, 4.0, MAKE, EVAL)
    found = explain(open_timeline([writer.write(tmp_path / "a.sonde")]))

    assert "traced requests" not in render(found)
    assert document(found)["requests"] == []


def test_a_function_that_reads_for_itself_waits_for_its_connection_alone(writer, verdicts):
    """What it asks others for, through a library, its request waits for."""
    key = process(writer, *HANDLERS)
    fetch = ("HTTPConnection.getresponse", "[python]", "http/client.py", 1390, "python")
    for tid in HANDLERS:
        on_cpu(writer, key, 0.1, THREAD, SESSION, EVAL, tid=tid)
        asks = writer.stack(THREAD, SESSION, fetch, READ, RECV)
        writer.wait(key, tid, "socket", 2.0, count=100, stack=asks)
        reads = writer.stack(THREAD, NEXT, READ, RECV)
        writer.wait(key, tid, "socket", 2.0, count=100, stack=reads)
    first = verdicts()[0]

    assert first.service == "Session.handle shop.py"
    assert {one.key: round(one.share, 1) for one in first.causes} == {
        Cause.IO: 1.0,
        Cause.HOST: 0.0,
    }
    assert first.request_ns == pytest.approx(6 * 2.1e9, rel=0.01)


@pytest.mark.parametrize(("worked", "goes_first"), [(0.5, False), (0.0, True)])
def test_a_program_that_works_goes_before_the_service_that_it_started(
    writer, verdicts, worked, goes_first
):
    """A training job whose shards come from a child, and a program that starts services alone."""
    key = process(writer, pid=41)
    if worked:
        on_cpu(writer, key, worked, ("train", "[python]", "train.py", 5, "python"), EVAL, tid=41)
    fetch = ("fetch", "[python]", "train.py", 9, "python")
    writer.wait(key, 41, "poll", 4.4, count=100, stack=writer.stack(fetch, RECV))
    key = process(writer, *HANDLERS, ppid=41)
    for tid in HANDLERS:
        handled = writer.stack(THREAD, ONE, PAGE, QUERY, RECV)
        writer.wait(key, tid, "socket", 3.0, count=200, stack=handled)

    assert bool(verdicts()[0].service) is goes_first
    assert any(one.service for one in verdicts())


def test_a_capture_that_was_cut_has_a_verdict_with_a_note(tmp_path):
    data = Path(__file__).parents[1] / "data/h200_input_pipeline.sonde"
    whole = data.read_bytes()
    path = tmp_path / "cut.sonde"
    path.write_bytes(whole[: len(whole) * 3 // 4])

    notes = explain(open_timeline([path])).notes

    assert any("the capture is incomplete" in note for note in notes)
    assert not any("incomplete" in note for note in explain(open_timeline([data])).notes)


ASK = ("Session.question", "[python]", "shop.py", 12, "python")


def kept_connection(writer, looked):
    """Threads of a socketserver that read the next question of a kept connection in a function of
    the program, and answer it on a CPU. `looked`: kinds of looks at each."""
    key = process(writer, *HANDLERS)
    for tid in HANDLERS:
        reads = writer.stack(THREAD, SESSION, ASK, RECV)
        writer.wait(key, tid, "socket", 4.0, count=300, stack=reads)
        on_cpu(writer, key, 0.5, THREAD, SESSION, ANSWER, tid=tid)
        for kind in looked:
            writer.add("activity", key, tid=tid, kind=kind, name="", api="", op="", count=3)
    return key


def test_the_next_question_on_a_kept_connection_is_no_request(writer, verdicts):
    kept_connection(writer, ["client"])
    (first,) = verdicts()
    assert not any(one.key == Cause.IO for one in first.causes)
    assert any("they wait for the next one" in line for line in first.evidence)


@pytest.mark.parametrize("looked", [[], ["client", "peer"]])
def test_where_looks_do_not_show_it_a_wait_counts_for_the_request(writer, verdicts, looked):
    kept_connection(writer, looked)
    first = verdicts()[0]
    assert first.causes[0].key == Cause.IO
