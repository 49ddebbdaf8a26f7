# SPDX-License-Identifier: Apache-2.0
"""Waits of streams for events of other streams, in traces with the device's own records of them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from sonde.analyze.critical_path import walk
from sonde.analyze.stalls import stalls_of
from sonde.analyze.stream_dependencies import awaited_by
from sonde.model.causes import Cause
from sonde.model.timeline import StreamWaits, Timeline
from sonde.readers import kineto
from timelines import Scene, repeated, shares


def waits(timeline: Timeline, *rows: tuple[int, int, int, int]) -> StreamWaits:
    """(waiting stream, awaited stream, id of the wait, id of the record), streams by number."""
    track = {
        (one.device, one.number): number
        for number, one in enumerate(timeline.tracks)
        if one.device >= 0
    }
    columns = np.array(rows, np.int64).T
    of = [[track[divmod(one, 100)] for one in column] for column in columns[:2].tolist()]
    return StreamWaits(np.array(of[0], np.int32), np.array(of[1], np.int32), columns[2], columns[3])


def test_an_operation_waits_for_the_last_one_before_the_record():
    scene = Scene()
    scene.kernel(1000, 2000, launched=900, stream=8)  # id 1
    scene.kernel(2000, 3000, launched=910, stream=8)  # 2: launched behind the record
    scene.kernel(1000, 1100, launched=920, stream=7)  # 3
    scene.correlation += 2  # the record was 2, the wait 4
    scene.kernel(2001, 2100, launched=930, stream=7)  # 6
    timeline = scene.timeline()
    timeline = replace(timeline, stream_waits=waits(timeline, (7, 8, 4, 2)))

    found = awaited_by(timeline)
    ids = timeline.device.correlation
    assert {int(ids[row]): int(ids[found[row]]) for row in np.flatnonzero(found >= 0)} == {6: 1}


@pytest.mark.parametrize(
    ("has_event", "cause"), [(True, Cause.DEPENDENCY), (False, Cause.NOT_TAKEN)]
)
def test_a_device_that_waits_for_another_ones_stream_shows_it(has_event, cause):
    rows = []

    def step(scene: Scene, t: float) -> None:
        scene.kernel(t, t + 1000, launched=t - 100)
        scene.kernel(t, t + 8000, launched=t - 90, device=1)
        record = scene.correlation + 1
        scene.correlation += 2
        scene.kernel(t + 8005, t + 9500, launched=t - 50)
        rows.append((7, 107, record + 1, record))

    scene = repeated(Scene(), step)
    timeline = scene.timeline()
    table = waits(timeline, *rows) if has_event else timeline.stream_waits
    assert shares(scene, stream_waits=table)[cause] == pytest.approx(0.7, abs=0.02)


def test_the_critical_path_follows_the_event_and_not_what_ended_last():
    scene = Scene()
    scene.kernel(1000, 8000, launched=900, stream=8, name="awaited")  # 1
    scene.kernel(1000, 8001, launched=900, stream=9, name="beside")  # 2
    scene.correlation += 2
    scene.kernel(8004, 9000, launched=950, stream=7, name="waiting")  # 5
    timeline = scene.timeline()
    timeline = replace(timeline, stream_waits=waits(timeline, (7, 8, 4, 3)))
    path = walk(timeline, stalls_of(timeline, 0), 1_000_000, 9_000_000)

    assert {"waiting", "awaited"} <= {one.name for one in path}
    assert "beside" not in {one.name for one in path}


def test_kinetos_records_of_waits_are_read(tmp_path):
    common = {"ph": "X", "pid": 0, "tid": 7, "dur": 5}
    args = {"device": 0, "stream": 7, "correlation": 40, "wait_on_cuda_event_id": 1}
    wait = {
        **args, "cuda_sync_kind": "Stream Wait Event", "wait_on_stream": 20,
        "wait_on_cuda_event_record_corr_id": 32,
    }  # fmt: skip
    events = [
        {**common, "cat": "kernel", "name": "a", "ts": 10, "args": args},
        {**common, "cat": "cuda_sync", "name": "Stream Wait Event", "ts": 9, "args": wait},
        {**common, "cat": "cuda_sync", "name": "Event Sync", "ts": 9,
         "args": {**wait, "cuda_sync_kind": "Event Sync", "stream": -1}},
        {**common, "cat": "cuda_sync", "name": "Stream Wait Event", "ts": 9,
         "args": {**wait, "wait_on_stream": -1}},
    ]  # fmt: skip
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    timeline = kineto.read(path)
    table = timeline.stream_waits

    assert len(table) == 1
    assert timeline.tracks[table.waiting[0]].number == 7
    assert timeline.tracks[table.awaited[0]].number == 20
    assert (table.wait[0], table.record[0]) == (40, 32)
    assert not any("not understood" in note for note in timeline.notes)


def test_a_wait_without_a_device_is_between_streams_of_one(tmp_path):
    common = {"ph": "X", "pid": 3, "tid": 7, "dur": 5, "ts": 9}
    wait = {
        "stream": 7, "correlation": 40, "cuda_sync_kind": "Stream Wait Event",
        "wait_on_stream": 20, "wait_on_cuda_event_record_corr_id": 32,
    }  # fmt: skip
    events = [
        {**common, "cat": "kernel", "name": "a", "args": {"stream": 7}},
        {**common, "cat": "cuda_sync", "name": "Stream Wait Event", "args": wait},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    timeline = kineto.read(path)
    table = timeline.stream_waits

    tracks = [timeline.tracks[it[0]] for it in (table.waiting, table.awaited)]
    assert [(it.device, it.number) for it in tracks] == [(3, 7), (3, 20)]
