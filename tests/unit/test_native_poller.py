# SPDX-License-Identifier: Apache-2.0
"""Questions to a C library at every tick, gathered natively: here to libc, whose clocks answer."""

from __future__ import annotations

import ctypes
import mmap
import os
import time

import pytest

from sonde import _native

TICK_NS = 20_000_000
MONOTONIC, NO_CLOCK = 1, 9999
SECONDS, NANOSECONDS = (0, 8), (8, 8)
LONG_NS = 20_000_000_000


@pytest.fixture
def poller():
    return _native.NativePoller(TICK_NS)


@pytest.fixture
def ends():
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def address(name):
    return ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value


def clock(poller, group, number=MONOTONIC, **options):
    function = address("clock_gettime")
    return poller.add_query(
        group, function, [number, None], bytes(16), [SECONDS, NANOSECONDS], **options
    )


def after(ns):
    return time.monotonic_ns() + ns


def test_answers_are_gathered_at_beats(poller, ends):
    number = clock(poller, poller.group("clock"))
    assert poller.drain(number) == []  # nothing is asked before the first question
    poller.query(number)
    assert not poller.wait(ends[0], after(20 * TICK_NS))
    answers = poller.drain(number)
    assert 2 <= len(answers) <= 21  # ticks that were missed are skipped
    for time_ns, code, (seconds, nanoseconds) in answers:
        assert code == 0
        assert 0 <= seconds * 1_000_000_000 + nanoseconds - time_ns < 1_000_000_000
    assert poller.drain(number) == []


def test_what_does_not_answer_is_not_asked_at_beats(poller, ends):
    group = poller.group("clock")
    good, bad = clock(poller, group), clock(poller, group)
    poller.query(good)
    assert poller.query(bad)[1] == 0
    broken = clock(poller, group, NO_CLOCK)
    assert poller.query(broken)[1] == -1  # not asked at ticks, as it did not answer
    assert not poller.wait(ends[0], after(2 * TICK_NS))
    assert not poller.is_pending(group)
    assert poller.drain(broken) == []
    assert poller.drain(good)


def test_what_is_no_news_is_not_kept_and_news_ends_the_wait(poller, ends):
    group = poller.group("news")
    quiet = clock(poller, group, NO_CLOCK, ignored_code=-1)
    poller.query(quiet)
    assert not poller.wait(ends[0], after(3 * TICK_NS))
    assert poller.drain(quiet) == []
    loud = clock(poller, group, ignored_code=-1)
    poller.query(loud)
    poller.wait(ends[0], after(LONG_NS))
    assert poller.is_pending(group)
    assert len(poller.drain(loud)) == 1
    poller.mark_read(group)
    assert not poller.is_pending(group)


def test_a_group_at_rest_is_asked_seldom_and_reports_what_changes(poller, ends):
    group = poller.group("clock")
    number = clock(poller, group, activity_field=1)  # nanoseconds: another at every tick
    poller.query(number)
    poller.wait(ends[0], after(3 * TICK_NS))
    assert not poller.is_pending(group)  # not while it works
    poller.drain(number)
    poller.set_interval(group, 10, True)
    poller.wait(ends[0], after(LONG_NS))
    assert poller.is_pending(group)
    assert len(poller.drain(number)) == 1


def test_a_group_that_works_may_be_asked_seldom_and_need_not_be_drained(poller, ends):
    group = poller.group("clock")
    number = clock(poller, group, activity_field=1)
    poller.query(number)
    poller.set_interval(group, 10, False)
    poller.wait(ends[0], after(20 * TICK_NS))
    assert not poller.is_pending(group)
    assert len(poller.drain(number)) in (1, 2, 3)


def test_a_group_that_was_given_up_is_forgotten(poller, ends):
    group = poller.group("clock")
    number = clock(poller, group)
    poller.query(number)
    poller.wait(ends[0], after(3 * TICK_NS))
    poller.suspend(group)
    assert not poller.wait(ends[0], after(3 * TICK_NS))
    assert poller.drain(number) == []


def test_a_descriptor_that_is_ready_ends_the_wait_at_once(poller, ends):
    poller.query(clock(poller, poller.group("clock")))
    os.write(ends[1], b"!")
    assert poller.wait(ends[0], after(LONG_NS))


def test_the_page_counts_also_where_nothing_is_asked(poller, ends):
    with mmap.mmap(-1, 4096) as page:
        assert not poller.wait(ends[0], after(2_200_000_000), page)
        count = int.from_bytes(page[-8:], "little")
        assert 1 <= count <= 3
        assert page[0] == 0


def test_what_cannot_be_asked_is_refused(poller):
    group = poller.group("clock")
    for function, arguments, fields in (
        (0, [None], [SECONDS]),
        (1, [1, 2, 3, None], [SECONDS]),
        (1, [None], [(12, 8)]),
        (1, [None], [(0, 9)]),
    ):
        with pytest.raises(ValueError, match=r"cannot be called|invalid query"):
            poller.add_query(group, function, arguments, bytes(16), fields)
    with pytest.raises(ValueError, match="invalid query"):
        poller.add_query(group + 1, 1, [None], bytes(16), [SECONDS])
    with pytest.raises(IndexError):
        poller.query(0)
