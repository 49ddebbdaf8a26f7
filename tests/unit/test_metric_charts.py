# SPDX-License-Identifier: Apache-2.0
"""Metrics as people see them: charts over time, rates of counters, gaps that stay empty."""

from __future__ import annotations

import io
import re

import pytest

from captures import SECOND_NS, START_NS, Writer, scene
from sonde.export import html, metric_charts, summary, table
from sonde.metrics import labels
from sonde.model.profile import ProfileKind
from sonde.query.capture import read
from sonde.query.session import Session

GPU = {"hw__id": "GPU-1"}
BUSY = labels(hw__gpu__task="general", **GPU)


def put(writer, second, series, tags, value):
    time_ns = START_NS + int(second * SECOND_NS)
    row = {"time_ns": time_ns, "series": series, "labels": tags, "value": float(value)}
    writer.rows["metric"].append(row)


@pytest.fixture
def opened(tmp_path):
    def opened(rows, writer=None):
        writer = writer or Writer()
        put(writer, 0, "sonde.gpu.info", labels(sonde__gpu__index="0", **GPU), 1)
        for row in rows:
            put(writer, *row)
        return Session(read(writer.write(tmp_path / "a.sonde")))

    return opened


def only(session, name, cells=10):
    (one,) = metric_charts.charts(session, [name], cells=cells)
    return one


def test_a_chart_shows_when(opened):
    session = opened([(t / 10, "hw.gpu.utilization", BUSY, t >= 50) for t in range(100)])
    one = only(session, "hw.gpu.utilization")
    assert metric_charts.bars(one.cells, one.top) == "▁▁▁▁▁█████"
    assert (one.low, one.mean, one.high) == (0, 0.5, 1)
    assert one.of == "gpu 0"


def test_a_gap_is_not_a_zero(opened):
    session = opened(
        [(t / 10, "hw.gpu.utilization", BUSY, 1) for t in range(100) if not 30 <= t < 60]
    )
    one = only(session, "hw.gpu.utilization")
    assert metric_charts.bars(one.cells, one.top) == "███   ████"


def test_what_is_asked_rarely_has_no_gaps(opened):
    session = opened([(t, "hw.energy", labels(hw__type="gpu", **GPU), 5 * t) for t in (0, 4, 8)])
    one = only(session, "hw.energy")
    assert one.cells.count(None) <= 4  # before the first rate, and at the end
    assert (one.mean, one.unit) == (5, "J/s")


def test_a_counter_that_is_reset_is_no_negative_rate(opened):
    values = [100, 110, 0, 10]
    session = opened(
        [(t, "hw.gpu.io", labels(network__io__direction="receive", **GPU), v)
         for t, v in enumerate(values)]
    )  # fmt: skip
    one = only(session, "hw.gpu.io")
    assert (one.low, one.high) == (10, 10)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.5, "1", "50.0 %"),
        (2e9, "By", "2.00 GB"),
        (2e9, "By/s", "2.00 GB/s"),
        (692.04, "W", "692 W"),
        (41, "Cel", "41.0 °C"),
        (1.98e9, "Hz", "1,980 MHz"),
        (16, "{lane}", "16.0"),
        (0, "W", "0 W"),
        (0.25, "s/s", "25.0 %"),
        (12, "{fault}/s", "12.0 /s"),
        (250, "J/s", "250 W"),
    ],
)
def test_amounts_have_their_unit(value, unit, text):
    assert metric_charts.amount(value, unit) == text


def test_the_first_screen_has_a_few_lines_and_only_where_there_is_a_device(opened):
    rows = [(t / 10, "hw.gpu.utilization", BUSY, 0.5) for t in range(100)]
    rows += [(t, "hw.power", labels(hw__type="gpu", **GPU), 300 + t) for t in range(10)]
    text = summary.render(opened(rows, scene()))
    assert re.search(r"GPU METRICS +min +mean +max\n  busy +▅+ +50.0 %", text)
    assert max(map(len, text.splitlines())) <= 100
    assert "GPU METRICS" not in summary.render(opened([], scene()))


def test_the_tables_have_every_signal(opened):
    rows = [(t / 10, "hw.gpu.utilization", BUSY, 0.5) for t in range(100)]
    out = io.BytesIO()
    table.write(opened(rows, scene()), out)
    assert re.search(r"hw.gpu.utilization +gpu 0, general +▅+", out.getvalue().decode())


def test_the_page_carries_them(opened):
    rows = [(t / 10, "hw.gpu.utilization", BUSY, 0.5) for t in range(100)]
    session = opened(rows, scene())
    document = html._document(session, [ProfileKind.ON_CPU], metric_charts.EVERYTHING)
    (one,) = document["tables"]["charts"]
    assert (one["name"], one["of"]) == ("hw.gpu.utilization", "gpu 0 general")
    assert set(one["bars"]) == {"▅"}
