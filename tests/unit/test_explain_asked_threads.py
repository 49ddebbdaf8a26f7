# SPDX-License-Identifier: Apache-2.0
"""A pool that asks others when it is asked makes nothing ahead: who waits for it waits for their
answers. One that fetches ahead is an input pipeline."""

from __future__ import annotations

import pytest

from sonde.analyze.bound import explain
from sonde.model.causes import Cause
from sonde.model.peers import Peer
from sonde.model.timeline import (
    CallKind,
    Timeline,
    Total,
    TotalKind,
    Track,
    TrackKind,
    WaitDetail,
)

WINDOW = 1_000_000_000
STEP, FETCH = "Ranker.gather p19.py:71", "Catalog.fetch p19.py:53"
LAUNCHES = 0.3


def total(track: int, kind: TotalKind, name: str, share: float, **more) -> Total:
    return Total(track, kind, name, CallKind.OTHER, round(share * WINDOW), 100, **more)


def timeline(
    awaited: float, idle: float, *, reason: str = "poll", tasks: bool = True, pools: int = 3
) -> Timeline:
    """The first thread launches work and waits for others, each of which waits for the next task
    (`idle`), and for the rest of the time for `reason`, or is on a CPU."""
    tracks = [Track(TrackKind.THREAD, 1, 1, "rank.py")]
    tracks += [Track(TrackKind.THREAD, 1, 2 + it, f"t{it}") for it in range(pools)]
    totals = [
        total(0, TotalKind.CALL, "cuLaunchKernel", LAUNCHES),
        total(0, TotalKind.SAMPLED, "code", 0.05, location=STEP, samples=5),
    ]
    for it in range(1, pools + 1):
        part = awaited / pools
        totals += [
            total(0, TotalKind.BLOCKED, "futex", part, location=STEP, waker_track=it,
                  waker_ns=round(part * WINDOW), wait_detail=WaitDetail.QUEUE),
            total(it, TotalKind.BLOCKED, "futex", idle, waker_track=0, serves=tasks,
                  waker_ns=round(idle * WINDOW), wait_detail=WaitDetail.QUEUE),
        ]  # fmt: skip
        if reason == "on a CPU":
            work = total(it, TotalKind.SAMPLED, "code", 1 - idle, location=FETCH, samples=50)
        else:
            work = total(it, TotalKind.BLOCKED, reason, 1 - idle, location=FETCH)
        totals.append(work)
    peers = {it: [Peer("127.0.0.1:9301", 9, "shelf.py", 40, True)] for it in range(1, pools + 1)}
    return Timeline([], tracks, totals=totals, extent_ns=(0, WINDOW), peers=peers)


@pytest.mark.parametrize("tasks", [True, False], ids=["an executor's", "by a queue"])
def test_what_is_asked_for_when_it_is_needed_is_a_wait_for_its_answer(tasks):
    (verdict,) = explain(timeline(0.5, 0.5, tasks=tasks)).verdicts
    first = verdict.causes[0]

    assert first.key == Cause.IO
    assert [one.function for one in first.locations] == [STEP]
    assert first.facts[0] == (
        f"it is answered through 3 threads, most of it t0 (2), mostly waiting in {FETCH} for "
        "shelf.py (9) at 127.0.0.1:9301"
    )
    assert verdict.advice[0].text.startswith(f"look at what answers {FETCH} in t0 (2), or ask it")


def test_the_step_holds_where_no_thread_ends_a_good_part():
    (verdict,) = explain(timeline(0.5, 0.5, pools=12)).verdicts
    assert verdict.causes[0].key == Cause.IO
    assert "through 12 threads" in verdict.causes[0].facts[0]
    assert verdict.advice[0].text.startswith(f"look at what answers {FETCH}")


@pytest.mark.parametrize(
    ("idle", "reason"),
    [
        (0.3, "poll"),  # it fetches ahead for a part of the time
        (0.0, "socket"),  # and always
        (0.5, "on a CPU"),  # it makes what it hands over
        (0.5, "file"),
    ],
)
def test_what_is_made_ahead_or_made_here_is_input(idle, reason):
    (verdict,) = explain(timeline(0.5, idle, reason=reason)).verdicts
    assert verdict.causes[0].key == Cause.INPUT
