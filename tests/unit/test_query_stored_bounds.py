# SPDX-License-Identifier: Apache-2.0
"""A question to a store ends in time and in memory, whatever its statements do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sonde.errors import CaptureError, CaptureTooLarge
from sonde.query import stored
from sonde.query.stored import QueryTimedOutError, StoredSession

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
    monkeypatch.setattr(stored, "MAX_BYTES", 1 << 20)
    with pytest.raises(CaptureTooLarge):
        session.arrow("SELECT repeat('x', 3000) AS t FROM range(200000)")


def test_what_fails_after_the_first_rows_is_an_error_of_ours(session: StoredSession) -> None:
    with pytest.raises(CaptureError, match="Conversion Error"):
        session.arrow(f"SELECT {LATE} AS n FROM range(1000000)")
