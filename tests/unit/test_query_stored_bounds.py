# SPDX-License-Identifier: Apache-2.0
"""A question to a store ends in time and in memory, whatever its statements do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sonde.errors import CaptureError, CaptureTooLarge
from sonde.query import stored, stored_charts, stored_session, stored_traces, stored_views
from sonde.query.bounded import bounded
from sonde.query.selection import Selection
from sonde.query.stored_session import QueryTimedOutError, StoredSession

LONG = "SELECT sum(a.range * b.range) AS n FROM range(10000000) a, range(3000) b"
"""Some minutes."""
LATE = "CASE WHEN range = 900000 THEN CAST(range AS TINYINT) ELSE 0 END"


@pytest.fixture
def session(tmp_path: Path) -> Iterator[StoredSession]:
    found = StoredSession(tmp_path, {})
    yield found
    found.close()


def test_a_deadline_holds_for_every_statement(session: StoredSession) -> None:
    began = time.monotonic()
    with session.deadline(0.5):
        with pytest.raises(QueryTimedOutError):
            session.arrow(LONG)
        with pytest.raises(QueryTimedOutError):
            session.arrow(LONG)
    assert time.monotonic() - began < 5
    assert session.arrow("SELECT 1 AS n").num_rows == 1


def test_a_deadline_that_passes_between_statements_is_kept(session: StoredSession) -> None:
    with session.deadline(0.2):
        session.arrow("SELECT 1 AS n")
        time.sleep(0.3)
        with pytest.raises(QueryTimedOutError):
            session.arrow("SELECT 1 AS n")
        with pytest.raises(QueryTimedOutError):
            session.check()


def test_rows_that_are_read_one_by_one_end_in_time(session: StoredSession) -> None:
    with session.deadline(0.5), pytest.raises((QueryTimedOutError, CaptureTooLarge)):
        session.arrow(
            "SELECT a.range FROM range(100000000) a, range(100000) b"
            " WHERE hash(a.range + b.range) % 1000 = 0"
        )


def test_an_answer_of_long_texts_is_refused(
    session: StoredSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_session, "MAX_BYTES", 1 << 20)
    with pytest.raises(CaptureTooLarge):
        session.arrow("SELECT repeat('x', 3000) AS t FROM range(200000)")


def test_a_question_that_is_given_up_between_rows_leaves_the_engine_usable(
    session: StoredSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_session, "MAX_BYTES", 1 << 16)
    chosen = pa.table({"key": range(200_000)})
    with pytest.raises(CaptureTooLarge):
        session.arrow("SELECT key, key + 1 AS next FROM chosen", chosen=chosen)
    assert session.arrow("SELECT key FROM chosen", chosen=chosen.slice(0, 3)).num_rows == 3


def test_what_fails_after_the_first_rows_is_an_error_of_ours(session: StoredSession) -> None:
    with pytest.raises(CaptureError, match="Conversion Error"):
        session.arrow(f"SELECT {LATE} AS n FROM range(1000000)")


def metrics_of(tmp_path: Path, series: int) -> StoredSession:
    """A store with one metric: a number of series with two values each."""
    rows = [
        ("n", "hw.power", f"gpu={at}", time_ns, 1.0) for at in range(series) for time_ns in (1, 2)
    ]
    names = ("node", "series", "labels", "time_ns", "value")
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    path = tmp_path / "metric.parquet"
    pq.write_table(pa.table(columns), path)  # type: ignore[no-untyped-call]
    return StoredSession(tmp_path, {"metric": [path]})


def test_series_that_charts_have_no_room_for_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, when = metrics_of(tmp_path, 7), Selection(0, 10)
    for module in (stored, stored_charts):
        monkeypatch.setattr(module, "MAX_SERIES", 3)
    for ask in (
        lambda: stored_charts.charts(session, when, ["hw.power"], 1),
        lambda: stored.series(session, when, "hw.power", 1),
        lambda: stored_charts.devices(session, when, 3),
    ):
        session.rows_left_out = 0
        assert ask().num_rows == 3
        assert session.rows_left_out == 4
    monkeypatch.setattr(stored_charts, "MAX_SERIES", 7)
    session.rows_left_out = 0
    stored_charts.charts(session, when, ["hw.power"], 1)
    assert session.rows_left_out == 0
    session.close()


def test_rows_beyond_a_bound_are_counted_and_those_beyond_what_was_asked_for_are_not(
    session: StoredSession,
) -> None:
    each = "SELECT range AS n FROM range(10) ORDER BY n"
    for room, limit, shown, left_out in (
        (20, 1 << 40, 10, 0),
        (4, 1 << 40, 4, 6),
        (4, 7, 4, 3),
        (4, 3, 3, 0),
    ):
        session.rows_left_out = 0
        assert bounded(session, each, [], room, limit).num_rows == shown
        assert session.rows_left_out == left_out


def test_lanes_and_intervals_that_a_timeline_has_no_room_for_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {
        "node": ["n"] * 6, "kind": ["blocked"] * 6, "pid": [1] * 6, "start_ns": [1] * 6,
        "tid": [1, 2, 3, 4, 4, 4], "name": ["read"] * 6,
        "start_time_ns": [0, 0, 0, 0, 400, 700], "end_time_ns": [900, 800, 700, 300, 600, 900],
    }  # fmt: skip
    path = tmp_path / "span.parquet"
    pq.write_table(pa.table(rows), path)  # type: ignore[no-untyped-call]
    session = StoredSession(tmp_path, {"span": [path]})
    when = Selection(0, 1_000, stored_views.EVERY_KIND)
    monkeypatch.setattr(stored_views, "MAX_LANES", 3)
    lanes, _ = stored_views.timeline(session, when, 10, 10)
    assert (lanes.num_rows, session.rows_left_out) == (3, 1)
    session.rows_left_out = 0
    monkeypatch.setattr(stored_views, "MAX_LANES", 9)
    monkeypatch.setattr(stored_views, "MAX_SPANS", 2)
    _, boxes = stored_views.timeline(session, when, 10, 9)
    assert (boxes.num_rows, session.rows_left_out) == (2, 4)
    session.close()


def test_traces_and_their_processes_that_have_no_room_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {
        "node": ["n"] * 8, "kind": ["cpu"] * 8, "pid": [1, 2, 3, 4, 5, 6, 7, 7], "name": [""] * 8,
        "start_ns": [1] * 8, "trace_id": ["a", "a", "a", "a", "a", "b", "c", "d"],
        "time_ns": [10] * 8, "weight_count": [1] * 8, "weight_ns": [1.0] * 8,
    }  # fmt: skip
    path = tmp_path / "traced.parquet"
    pq.write_table(pa.table(rows), path)  # type: ignore[no-untyped-call]
    session = StoredSession(tmp_path, {"traced": [path]})
    for module in (stored_views, stored_traces):
        monkeypatch.setattr(module, "MAX_ROWS", 3)
    assert stored_views.processes(session, Selection(0, 99, trace="a"), 50).num_rows == 3
    assert session.rows_left_out == 2
    session.rows_left_out = 0
    assert stored_traces.traces(session, Selection(0, 99), 50).num_rows == 3
    assert session.rows_left_out == 1
    session.close()
