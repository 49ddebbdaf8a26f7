# SPDX-License-Identifier: Apache-2.0
"""A record whose processes are one long chain costs what its size does."""

from __future__ import annotations

import time

from sonde.model.timeline import MAX_ANCESTORS, Timeline, Track, TrackKind

COUNT = 60_000
LIMIT_S = 10.0


def test_a_chain_of_processes_takes_no_quadratic_time():
    """It took the square of their number: 16,000 processes 12 s."""
    tracks = [Track(TrackKind.THREAD, 10 + it, 10 + it, "sh") for it in range(COUNT)]
    parents = {10 + it: 9 + it for it in range(1, COUNT)}
    began_s = time.process_time()
    timeline = Timeline([], tracks, parents=parents, recorder=10)
    assert time.process_time() - began_s < LIMIT_S
    assert len(timeline.of_recorder) == MAX_ANCESTORS + 1
    assert len([*timeline.ancestors(10 + COUNT - 1)]) == MAX_ANCESTORS
