# SPDX-License-Identifier: Apache-2.0
"""Who answers requests of another process is no input pipeline: nothing is made ahead."""

from __future__ import annotations

import pytest

from sonde.analyze.round_trips import is_round_trip
from sonde.analyze.thread_time import cause_of
from sonde.model.causes import Cause
from sonde.model.timeline import CallKind, Timeline, Total, TotalKind, Track, TrackKind

WINDOW = 1_000_000_000


def timeline(waited: float, asked: float) -> Timeline:
    """The first thread waits for a process that it started, and that one for the first."""
    tracks = [Track(TrackKind.THREAD, 1, 1, "python"), Track(TrackKind.THREAD, 2, 2, "child")]
    totals = [
        Total(track, TotalKind.BLOCKED, "socket", CallKind.OTHER, round(share * WINDOW), 100,
              waker_track=1 - track, waker_ns=round(share * WINDOW))
        for track, share in enumerate((waited, asked))
    ]  # fmt: skip
    return Timeline([], tracks, totals=totals, parents={2: 1}, extent_ns=(0, WINDOW))


@pytest.mark.parametrize(
    ("waited", "asked", "cause"),
    [
        (0.2, 0.8, Cause.IO),  # it works only while it is waited for
        (0.2, 0.5, Cause.INPUT),  # it works ahead for a part of the time
        (0.6, 0.0, Cause.INPUT),  # it never waits
    ],
)
def test_a_round_trip_is_a_wait_for_an_answer(waited, asked, cause):
    one = timeline(waited, asked)
    assert is_round_trip(one, 0, 1) == (cause == Cause.IO)
    assert cause_of(one, one.totals[0]) == cause
