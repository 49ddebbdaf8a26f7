# SPDX-License-Identifier: Apache-2.0
"""Whose chunks are stored first: a tenant whose chunks take long keeps no others waiting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from sonde.store import compaction, flush, put_off
from sonde.store.catalog import Catalog
from sonde.store.flush import Flusher
from sonde.store.record import Record, digest_of, encode, scan
from sonde.store.wal import Wal, later_segments, sealed_segments, secret_of
from stored_chunks import as_of, meta_of, recorded

NOW_NS = 1_800_001_800 * 10**9
CHUNK = recorded()[0]
SIZE = max(meta_of(CHUNK)["raw_len"], len(CHUNK))


def record(tenant: str, seq: int) -> Record:
    body = as_of(CHUNK, tenant, seq, NOW_NS)
    return Record(tenant, "n", digest_of(tenant, "n", body), NOW_NS, body)


def write(folder: Path, *segments: list[Record]) -> None:
    """Segments of servers that have ended, in this order."""
    secret = secret_of(folder / "wal")
    for records in segments:
        server = folder / "wal" / f"{len(list((folder / 'wal').glob('0*'))):032x}"
        server.mkdir()
        (server / "lock").touch()
        parts = [part for one in records for part in encode(one, secret)]
        (server / "1.wal").write_bytes(b"".join(parts))


def numbers(folder: Path, tenant: str) -> list[int]:
    """Of the chunks of a tenant that are stored."""
    files = Catalog(folder).files(tenant, "chunk")
    return sorted(
        seq for one in files for seq in pq.read_table(folder / one.path)["seq"].to_pylist()
    )


@pytest.fixture(autouse=True)
def small_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush, "TURN_BYTES", 2 * SIZE)
    monkeypatch.setattr(flush, "BATCH_BYTES", 2 * SIZE)


def order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is stored, as it is: (tenant, number of the chunk)."""
    found: list[tuple[str, int]] = []
    commit = Catalog.commit

    def noted(self: Catalog, files: Any, chunks: Any, *others: Any) -> None:
        commit(self, files, chunks, *others)
        for one in files:
            if one.name == "chunk":
                rows = pq.read_table(folder / one.path)["seq"].to_pylist()
                found.extend((one.tenant, seq) for seq in sorted(rows))

    monkeypatch.setattr(Catalog, "commit", noted)
    return found


def test_a_tenant_with_much_to_store_does_not_keep_others_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = order(tmp_path, monkeypatch)
    first = [record("evil", seq) for seq in range(20)]
    write(tmp_path, [*first, record("victim", 0)], [record("evil", 20), record("victim", 1)])
    catalog = Catalog(tmp_path)

    done = Flusher(tmp_path, catalog).flush()

    assert [seq for tenant, seq in found if tenant == "evil"] == list(range(21))
    # Before the last of the first segment come a turn, what is read with it, and a batch.
    assert found.index(("victim", 0)) <= 4
    assert found.index(("victim", 1)) <= 8
    assert (done.chunks, done.duplicates) == (23, 0)
    assert catalog.counters()["chunks_put_off"] == 19
    assert not sealed_segments(tmp_path / "wal")
    assert not later_segments(tmp_path / "wal")


def test_tenants_whose_chunks_were_put_off_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = order(tmp_path, monkeypatch)
    tenants = ["a", "b", "c"]
    write(tmp_path, [record(tenant, seq) for tenant in tenants for seq in range(12)])

    Flusher(tmp_path, Catalog(tmp_path)).flush()

    last = [found.index((tenant, 11)) for tenant in tenants]
    assert min(last) > 3 * 12 - 9
    assert len(found) == len(set(found)) == 36


def test_a_new_segment_is_stored_before_the_rest_of_one_tenants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = order(tmp_path, monkeypatch)
    write(tmp_path, [record("evil", seq) for seq in range(30)])
    commit = Catalog.commit

    def one_more(self: Catalog, *arguments: Any) -> None:
        commit(self, *arguments)
        if len(found) == 2:
            write(tmp_path, [record("victim", 0), record("evil", 30)])

    monkeypatch.setattr(Catalog, "commit", one_more)

    Flusher(tmp_path, Catalog(tmp_path)).flush()

    assert found.index(("victim", 0)) < 2 + 2 * (flush.DECODERS + 2)
    assert [seq for tenant, seq in found if tenant == "evil"] == list(range(31))


@pytest.mark.parametrize(
    ("owner", "name", "at"),
    [
        (put_off.PutOff, "seal", 2),  # while chunks are put off
        (put_off, "sync_folder", 1),  # afterwards
        (Catalog, "commit", 1),  # before the catalog notes it
        (Catalog, "commit", 4),  # while what was put off is stored
    ],
)
def test_nothing_is_lost_or_doubled_by_a_crash(
    tmp_path: Path, owner: Any, name: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, [record("victim", 0), *(record("evil", seq) for seq in range(12))])
    catalog = Catalog(tmp_path)
    flusher = Flusher(tmp_path, catalog)
    original = getattr(owner, name)
    calls = 0

    def ends(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= at:
            raise OSError("it ends here")
        return original(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, ends)
        # What a process that ends leaves as it is.
        patched.setattr(put_off.PutOff, "drop", lambda _: None)
        with pytest.raises(OSError, match="it ends here"):
            flusher.flush()

    Flusher(tmp_path, catalog).flush()

    assert numbers(tmp_path, "evil") == list(range(12))
    assert numbers(tmp_path, "victim") == [0]
    assert not [*(tmp_path / "wal" / "later").iterdir()]


def test_compaction_ends_in_time_and_goes_on_with_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "COMPACTED_FROM", 2)
    catalog = Catalog(tmp_path)
    for seq in range(2):
        write(tmp_path, [record(tenant, seq) for tenant in ("a", "b", "c")])
        Flusher(tmp_path, catalog).flush()

    last, gone = "", []
    for tenant in ("a", "b", "c"):
        done = compaction.compact(tmp_path, catalog, most_s=-1.0, after=last)
        last = done.last
        assert last == tenant
        gone.append(done.gone)

    # One group each; the others afterwards.
    assert all(2 <= one <= 4 for one in gone)
    assert compaction.compact(tmp_path, catalog, after=last).gone > sum(gone)
    assert not compaction.compact(tmp_path, catalog).gone


def test_what_is_put_off_counts_for_the_tenants_part_of_the_log(tmp_path: Path) -> None:
    later = put_off.PutOff(tmp_path / "wal", secret_of(tmp_path / "wal"))
    for seq in range(3):
        later.add(record("evil", seq))
    later.seal(tmp_path / "wal" / "secret")

    wal = Wal(tmp_path / "wal")
    wal._looked_at -= 2.0
    own, every = wal.left_bytes("evil")
    wal.close()

    path = later_segments(tmp_path / "wal")[0]
    assert own == every == path.stat().st_size > 3 * len(CHUNK)
    found = [one.item for one in scan(path, secret_of(tmp_path / "wal"))]
    assert found == [record("evil", seq) for seq in range(3)]
