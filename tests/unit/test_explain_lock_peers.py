# SPDX-License-Identifier: Apache-2.0
"""Who waits for the same lock, by the names of functions, is looked for among a process's kin: a
program of another user may have functions of the same names."""

from __future__ import annotations

import pytest

from sonde.analyze.culprits import _waiting_at
from sonde.model.timeline import CallKind, Timeline, Total, TotalKind, Track, TrackKind

WINDOW = 1_000_000_000
PLACE = "Ledger.commit ledger.py:40"


@pytest.mark.parametrize(
    ("parents", "is_kin"),
    [
        ({}, False),
        ({10: 1, 20: 1}, False),  # both are services of the machine
        ({10: 5, 20: 6}, False),
        ({20: 10}, True),  # a worker
        ({10: 20}, True),
        ({10: 5, 20: 5}, True),  # workers of one program
    ],
)
def test_only_kin_share_a_lock(parents, is_kin):
    tracks = [Track(TrackKind.THREAD, pid, pid, "python3") for pid in (10, 20)]
    totals = [
        Total(it, TotalKind.BLOCKED, "futex", CallKind.OTHER, WINDOW // 2, 50, location=PLACE)
        for it in (0, 1)
    ]
    timeline = Timeline([], tracks, totals=totals, parents=parents, extent_ns=(0, WINDOW))
    assert _waiting_at(timeline, {PLACE}, WINDOW, [0]) == ({0, 1} if is_kin else {0})
