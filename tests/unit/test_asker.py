# SPDX-License-Identifier: Apache-2.0
"""Questions to a C library at every beat, gathered natively: here to libc, whose clocks answer."""

from __future__ import annotations

import ctypes
import mmap
import os
import time

import pytest

from sonde import _native

BEAT_NS = 20_000_000
MONOTONIC, NO_CLOCK = 1, 9999
SECONDS, NANOSECONDS = (0, 8), (8, 8)
LONG_NS = 20_000_000_000


@pytest.fixture
def asker():
    return _native.Asker(BEAT_NS)


@pytest.fixture
def ends():
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def address(name):
    return ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value


def clock(asker, group, number=MONOTONIC, **options):
    function = address("clock_gettime")
    return asker.put(group, function, [number, None], bytes(16), [SECONDS, NANOSECONDS], **options)


def after(ns):
    return time.monotonic_ns() + ns


def test_answers_are_gathered_at_beats(asker, ends):
    number = clock(asker, asker.group("clock"))
    assert asker.take(number) == []  # nothing is asked before the first question
    asker.ask(number)
    assert not asker.wait(ends[0], after(20 * BEAT_NS))
    answers = asker.take(number)
    assert 2 <= len(answers) <= 21  # beats that were missed are skipped
    for time_ns, code, (seconds, nanoseconds) in answers:
        assert code == 0
        assert 0 <= seconds * 1_000_000_000 + nanoseconds - time_ns < 1_000_000_000
    assert asker.take(number) == []


def test_what_does_not_answer_is_not_asked_at_beats(asker, ends):
    group = asker.group("clock")
    good, bad = clock(asker, group), clock(asker, group)
    asker.ask(good)
    assert asker.ask(bad)[1] == 0
    broken = clock(asker, group, NO_CLOCK)
    assert asker.ask(broken)[1] == -1  # not asked at beats, as it did not answer
    assert not asker.wait(ends[0], after(2 * BEAT_NS))
    assert not asker.calls(group)
    assert asker.take(broken) == []
    assert asker.take(good)


def test_what_is_no_news_is_not_kept_and_news_ends_the_wait(asker, ends):
    group = asker.group("news")
    quiet = clock(asker, group, NO_CLOCK, silent=-1)
    asker.ask(quiet)
    assert not asker.wait(ends[0], after(3 * BEAT_NS))
    assert asker.take(quiet) == []
    loud = clock(asker, group, silent=-1)
    asker.ask(loud)
    asker.wait(ends[0], after(LONG_NS))
    assert asker.calls(group)
    assert len(asker.take(loud)) == 1
    asker.hear(group)
    assert not asker.calls(group)


def test_a_group_at_rest_is_asked_seldom_and_tells_what_changes(asker, ends):
    group = asker.group("clock")
    number = clock(asker, group, telling=1)  # nanoseconds: another at every beat
    asker.ask(number)
    asker.wait(ends[0], after(3 * BEAT_NS))
    assert not asker.calls(group)  # not while it works
    asker.take(number)
    asker.pace(group, 10, True)
    asker.wait(ends[0], after(LONG_NS))
    assert asker.calls(group)
    assert len(asker.take(number)) == 1


def test_a_group_that_works_may_be_asked_seldom_and_need_not_be_heard(asker, ends):
    group = asker.group("clock")
    number = clock(asker, group, telling=1)
    asker.ask(number)
    asker.pace(group, 10, False)
    asker.wait(ends[0], after(20 * BEAT_NS))
    assert not asker.calls(group)
    assert len(asker.take(number)) in (1, 2, 3)


def test_a_group_that_was_given_up_is_forgotten(asker, ends):
    group = asker.group("clock")
    number = clock(asker, group)
    asker.ask(number)
    asker.wait(ends[0], after(3 * BEAT_NS))
    asker.give_up(group)
    assert not asker.wait(ends[0], after(3 * BEAT_NS))
    assert asker.take(number) == []


def test_who_waits_for_it_is_heard_at_once(asker, ends):
    asker.ask(clock(asker, asker.group("clock")))
    os.write(ends[1], b"!")
    assert asker.wait(ends[0], after(LONG_NS))


def test_the_page_counts_also_where_nothing_is_asked(asker, ends):
    with mmap.mmap(-1, 4096) as page:
        assert not asker.wait(ends[0], after(2_200_000_000), page)
        count = int.from_bytes(page[-8:], "little")
        assert 1 <= count <= 3
        assert page[0] == 0


def test_what_cannot_be_asked_is_refused(asker):
    group = asker.group("clock")
    for function, arguments, fields in (
        (0, [None], [SECONDS]),
        (1, [1, 2, 3, None], [SECONDS]),
        (1, [None], [(12, 8)]),
        (1, [None], [(0, 9)]),
    ):
        with pytest.raises(ValueError, match="cannot be"):
            asker.put(group, function, arguments, bytes(16), fields)
    with pytest.raises(ValueError, match="cannot be"):
        asker.put(group + 1, 1, [None], bytes(16), [SECONDS])
    with pytest.raises(IndexError):
        asker.ask(0)
