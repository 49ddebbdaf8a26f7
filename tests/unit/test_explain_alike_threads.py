# SPDX-License-Identifier: Apache-2.0
"""Threads of a process that do the same have one verdict, on all of them."""

from __future__ import annotations

import pytest

from sonde.analyze.bound import explain
from sonde.export import verdict as texts
from sonde.model.causes import Bound
from sonde.model.timeline import CallKind, Timeline, Total, TotalKind, Track, TrackKind

WINDOW = 1_000_000_000
PLACE = "client app.py:16"


def total(track: int, kind: TotalKind, name: str, share: float, place: str) -> Total:
    return Total(
        track, kind, name, CallKind.OTHER, round(share * WINDOW), 100, location=place, samples=20
    )


def thread(number: int, waits: float, place: str = PLACE, reason: str = "socket") -> list[Total]:
    return [
        total(number, TotalKind.BLOCKED, reason, waits, place),
        total(number, TotalKind.SAMPLED, "code", 0.95 - waits, place),
    ]


def verdicts(*threads: list[Total], pids: tuple[int, ...] = ()):
    tracks = [
        Track(TrackKind.THREAD, pids[it] if pids else 1, 2 + it, f"t{it}")
        for it in range(len(threads))
    ]
    totals = [one for each in threads for one in each]
    return explain(Timeline([], tracks, totals=totals, extent_ns=(0, WINDOW))).verdicts


def test_clients_of_a_pool_have_one_verdict():
    (one,) = verdicts(*(thread(it, 0.6 + it / 100) for it in range(12)))
    assert one.threads == 12
    assert texts.of_verdict(one)[0].startswith("threads t0 (2) and 11 more — ")
    assert one.bounds[0].key == Bound.IO
    assert one.causes[0].share == pytest.approx(0.655 / 0.95)  # of the time that is known


def test_threads_that_do_something_else_have_their_own():
    other = thread(6, 0.7, "store app.py:40", "sync to disk")
    found = verdicts(*(thread(it, 0.7) for it in range(6)), other)
    assert [(one.device_name, one.threads) for one in found] == [("t0 (2)", 6), ("t6 (8)", 1)]


def test_each_process_has_its_own():
    found = verdicts(*(thread(it, 0.7) for it in range(4)), pids=(1, 1, 2, 2))
    assert [one.threads for one in found] == [2, 2]


def test_alike_on_a_cpu_is_not_alike_in_waits():
    found = verdicts(thread(0, 0.1), thread(1, 0.8))
    assert [one.threads for one in found] == [1, 1]
    assert [one.bounds[0].key for one in found] == [Bound.HOST, Bound.IO]
