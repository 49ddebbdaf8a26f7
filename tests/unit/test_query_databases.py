# SPDX-License-Identifier: Apache-2.0
"""Databases that are made ahead of the questions."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import duckdb
import pytest

from sonde.query import databases
from sonde.query.databases import Databases
from sonde.query.stored_session import StoredSession


def settled() -> None:
    until_s = time.monotonic() + 10
    while any(it.name == "sonde-database" for it in threading.enumerate()):
        assert time.monotonic() < until_s
        time.sleep(0.005)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[duckdb.DuckDBPyConnection]:
    """Those that were made, in order."""
    found: list[duckdb.DuckDBPyConnection] = []
    make = databases.database

    def noted() -> duckdb.DuckDBPyConnection:
        found.append(make())
        return found[-1]

    monkeypatch.setattr(databases, "database", noted)
    return found


def test_the_next_is_made_while_one_is_used(made: list[duckdb.DuckDBPyConnection]) -> None:
    ahead = Databases()
    taken = []
    for _ in range(3):
        taken.append(ahead.take())
        settled()
    assert len({id(it) for it in taken}) == 3
    assert len(made) == 4  # one is ready
    assert taken[1:] == made[-3:-1]
    taken[0].execute("CREATE TABLE t AS SELECT 1")
    with pytest.raises(duckdb.CatalogException):
        taken[1].execute("SELECT * FROM t")
    ahead.close()


def test_those_who_ask_at_once_wait_for_nobody(made: list[duckdb.DuckDBPyConnection]) -> None:
    ahead = Databases()
    taken = [ahead.take() for _ in range(4)]
    settled()
    assert len({id(it) for it in taken}) == 4
    assert len(made) <= 8
    ahead.close()


def test_one_that_cannot_be_made_ahead_is_made_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead = Databases()
    make = databases.database

    def only_for_a_question() -> duckdb.DuckDBPyConnection:
        if threading.current_thread().name == "sonde-database":
            raise duckdb.OutOfMemoryException("no room")
        return make()

    monkeypatch.setattr(databases, "database", only_for_a_question)
    for _ in range(2):
        assert ahead.take().execute("SELECT 1").fetchone() == (1,)
        settled()


def test_a_session_has_its_limits_with_a_database_made_ahead(tmp_path: Path) -> None:
    ahead = Databases()
    ahead.take().close()
    settled()
    session = StoredSession(tmp_path, {}, 100 << 20, tmp_path / "spill", ahead)
    settings = "SELECT current_setting('memory_limit'), current_setting('temp_directory')"
    assert session._connection.execute(settings).fetchone() == (
        "100.0 MiB",
        str(tmp_path / "spill"),
    )
    with pytest.raises(duckdb.Error):
        session._connection.execute("SELECT * FROM read_csv('/etc/passwd')")
    with pytest.raises(duckdb.Error):
        session._connection.execute("SET memory_limit = '1GB'")
    session.close()
    settled()
    ahead.close()
