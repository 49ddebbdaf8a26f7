# SPDX-License-Identifier: Apache-2.0
"""How the SQLite files of a store are opened and changed: all of them in one way."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from sonde.errors import UsageError
from sonde.server import alert_states, collection_pauses, tokens
from sonde.store import catalog
from sonde.store.database import Database

SCHEMA = "CREATE TABLE IF NOT EXISTS it (x INTEGER PRIMARY KEY)"
ALL: dict[str, Callable[[Path], object]] = {
    alert_states.NAME: alert_states.AlertStates,
    catalog.NAME: catalog.Catalog,
    collection_pauses.NAME: collection_pauses.CollectionPauses,
    tokens.NAME: tokens.Tokens,
}


@pytest.mark.parametrize("name", ALL)
def test_each_file_is_private_durable_and_no_link(tmp_path: Path, name: str) -> None:
    """A file of before, which a umask left readable, becomes private."""
    (tmp_path / name).touch(mode=0o644)
    with closing(ALL[name](tmp_path)) as opened:  # type: ignore[type-var]
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
        db = opened._db._db  # type: ignore[attr-defined]
        assert db.execute("PRAGMA synchronous").fetchone() == (2,)
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    for left in tmp_path.glob(f"{name}*"):
        left.unlink()
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="alone can change"):
        ALL[name](tmp_path)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", ALL)
def test_a_folder_of_others_is_refused(tmp_path: Path, name: str) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(UsageError, match="other users can write"):
        ALL[name](tmp_path)


def test_a_transaction_is_whole_or_nothing(tmp_path: Path) -> None:
    with closing(Database(tmp_path, "x.sqlite", SCHEMA)) as database:
        with pytest.raises(sqlite3.IntegrityError), database.transaction() as db:
            db.execute("INSERT INTO it VALUES (1)")
            db.execute("INSERT INTO it VALUES (1)")
        with database.transaction() as db:
            db.execute("INSERT INTO it VALUES (2)")
        with database.held() as db:
            assert db.execute("SELECT x FROM it").fetchall() == [(2,)]


def test_a_file_that_is_none_of_sqlite_is_an_error_and_stays_closed(tmp_path: Path) -> None:
    (tmp_path / "x.sqlite").write_bytes(b"none" * 1_000)
    with pytest.raises(sqlite3.DatabaseError):
        Database(tmp_path, "x.sqlite", SCHEMA)


def test_what_cannot_be_compacted_leaves_no_open_transaction(tmp_path: Path) -> None:
    """`exclude_from_compaction` ended no failed transaction: each later one failed, too."""
    with closing(catalog.Catalog(tmp_path)) as kept:
        with pytest.raises(AttributeError):
            kept.exclude_from_compaction([None])  # type: ignore[list-item]
        kept.count(tries=1)
        assert kept.counters() == {"tries": 1}
