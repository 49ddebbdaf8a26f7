# SPDX-License-Identifier: Apache-2.0
"""What must hold of every timeline, whatever it was read from."""

from __future__ import annotations

import numpy as np

from sonde.model.timeline import Events, Timeline


def check(timeline: Timeline) -> None:
    """Raises AssertionError if columns differ in length or hold invalid indices."""
    names, tracks = len(timeline.names), len(timeline.tracks)
    for table in (timeline.device, timeline.calls, timeline.host, timeline.states):
        _check_events(table, names, tracks)
    samples = timeline.samples
    lengths = {len(samples.time_ns), len(samples.track), len(samples.weight_ns), len(samples.name)}
    assert len(lengths) == 1, lengths
    if len(samples.track):
        assert 0 <= samples.track.min() <= samples.track.max() < tracks
        assert 0 <= samples.name.min() <= samples.name.max() < names


def _check_events(table: Events, names: int, tracks: int) -> None:
    columns = [getattr(table, slot) for slot in table.__slots__ if not slot.startswith("_")]
    arrays = [column for column in columns if isinstance(column, np.ndarray)]
    assert len({len(column) for column in arrays}) <= 1
    if not len(table):
        return
    assert (table.end_ns >= table.start_ns).all()
    assert 0 <= table.track.min() <= table.track.max() < tracks
    assert 0 <= table.name.min() <= table.name.max() < names
