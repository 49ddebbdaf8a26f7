# SPDX-License-Identifier: Apache-2.0
"""The time of threads by cause costs as much as it has totals, however many waits there are."""

from __future__ import annotations

from collections.abc import Iterator

from sonde.analyze.thread_time import thread_time
from sonde.model.causes import Cause
from sonde.model.timeline import Timeline, Total, TotalKind, Track, TrackKind, WaitDetail
from sonde.model.timeline_kinds import CallKind

PARENT, CHILD = 42, 90


class Counted(list[Total]):
    """Totals that count how often they were gone through."""

    passes = 0

    def __iter__(self) -> Iterator[Total]:
        self.passes += 1
        return super().__iter__()


def test_all_totals_are_gone_through_once_and_not_for_each_wait() -> None:
    """A sender chooses how many waits on futexes a child process ended."""
    tracks = [Track(TrackKind.THREAD, pid, pid, "t", -1, "p") for pid in (PARENT, CHILD)]
    totals = Counted(
        Total(0, TotalKind.BLOCKED, "futex", CallKind.OTHER, 1_000, 1, waker_ns=1_000,
              waker_track=1)
        for _ in range(20_000)
    )  # fmt: skip
    timeline = Timeline([], tracks, totals=totals, extent_ns=(0, 10**9), parents={CHILD: PARENT})
    found = thread_time(timeline, list(totals))

    assert totals.passes <= 3
    assert found.ns[Cause.INPUT] == 20_000 * 1_000, "the child does not wait for it in turn"


def test_waits_without_a_length_that_another_thread_ended_divide_nothing() -> None:
    tracks = [Track(TrackKind.THREAD, PARENT, tid, "t", -1, "p") for tid in (42, 43)]
    totals = [
        Total(0, TotalKind.BLOCKED, "futex", CallKind.OTHER, 1_000, 1, waker_ns=0, waker_track=1,
              wait_detail=WaitDetail.QUEUE)
    ]  # fmt: skip
    timeline = Timeline([], tracks, totals=totals, extent_ns=(0, 10**9))
    assert sum(thread_time(timeline, totals).ns.values()) == 1_000
