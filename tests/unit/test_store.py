# SPDX-License-Identifier: Apache-2.0
"""The store: what was acknowledged is read back once, whatever happened to the log."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sonde.store import compaction
from sonde.store.catalog import Catalog
from sonde.store.compaction import compact, retain, sweep, sweep_orphans
from sonde.store.flush import Flusher
from sonde.store.record import Damage, Record, digest_of, scan
from sonde.store.wal import Wal, WalFailedError, sealed_segments, secret_of
from stored_chunks import as_of, recorded, rows_of

CHUNKS = recorded()
NOW_NS = 1_800_001_800 * 10**9
"""In the middle of an hour: what a test writes is in one folder."""


def record(seq: int, node: str = "one", tenant: str = "lab") -> Record:
    body = as_of(CHUNKS[seq % len(CHUNKS)], node, seq, NOW_NS + seq * 10**9)
    return Record(tenant, node, digest_of(tenant, node, body), NOW_NS, body)


def write(folder: Path, records: list[Record]) -> Path:
    """One sealed segment."""
    wal = Wal(folder / "wal")
    for future in [wal.append(one) for one in records]:
        future.result(10)
    wal.close()
    return sealed_segments(folder / "wal")[-1]


def stored_rows(folder: Path, catalog: Catalog, name: str, tenant: str = "lab") -> int:
    return sum(pq.read_table(folder / one.path).num_rows for one in catalog.files(tenant, name))


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    records = [record(seq) for seq in range(5)]

    found = [one.item for one in scan(write(tmp_path, records), secret_of(tmp_path / "wal"))]

    assert found == records


@pytest.mark.parametrize("at", [0, 10, 60, 5_000, -1])
def test_a_flipped_bit_costs_one_record(tmp_path: Path, at: int) -> None:
    records = [record(seq) for seq in range(3)]
    path = write(tmp_path, records)
    ends = [one.end for one in scan(path, secret_of(tmp_path / "wal"))]
    content = bytearray(path.read_bytes())
    content[ends[0] + at if at >= 0 else ends[1] - 1] ^= 4
    path.write_bytes(content)

    found = [one.item for one in scan(path, secret_of(tmp_path / "wal"))]

    assert [one for one in found if isinstance(one, Record)] == [records[0], records[2]]
    assert sum(isinstance(one, Damage) for one in found) == 1


@pytest.mark.parametrize("cut", [1, 40, 3_000])
def test_a_torn_end_costs_the_last_record(tmp_path: Path, cut: int) -> None:
    records = [record(seq) for seq in range(3)]
    path = write(tmp_path, records)
    path.write_bytes(path.read_bytes()[:-cut])
    catalog = Catalog(tmp_path)

    done = Flusher(tmp_path, catalog).flush()

    assert (done.chunks, done.damaged) == (2, 1)
    assert catalog.counters()["log_parts_damaged"] == 1


def test_a_chunk_is_stored_once_and_every_row_of_it(tmp_path: Path) -> None:
    records = [record(seq) for seq in range(30)]
    write(tmp_path, records + records[:10])
    write(tmp_path, records[5:15])
    catalog = Catalog(tmp_path)

    done = Flusher(tmp_path, catalog).flush()

    assert (done.chunks, done.duplicates) == (30, 20)
    assert stored_rows(tmp_path, catalog, "chunk") == 30
    for name in ("sample", "activity", "metric", "span"):
        expected = sum(rows_of(one.body, name) for one in records)
        assert stored_rows(tmp_path, catalog, name) == expected
    assert not sealed_segments(tmp_path / "wal")


def test_an_old_chunk_is_stored_once_after_its_name_was_forgotten(tmp_path: Path) -> None:
    old_ns = time.time_ns() - 30 * 86_400 * 10**9
    body = as_of(CHUNKS[0], "one", 0, old_ns)
    one = Record("lab", "one", digest_of("lab", "one", body), old_ns, body)
    catalog = Catalog(tmp_path)
    write(tmp_path, [one])
    Flusher(tmp_path, catalog).flush()
    retain(tmp_path, catalog, 0, 0, time.time_ns())
    assert catalog.known([one.digest]) == set()

    write(tmp_path, [one])
    done = Flusher(tmp_path, catalog).flush()

    assert (done.chunks, done.duplicates) == (0, 1)
    assert stored_rows(tmp_path, catalog, "chunk") == 1


def test_dictionaries_are_stored_once_a_day(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    for start in (0, 28, 56):
        write(tmp_path, [record(seq) for seq in range(start, start + 28)])
        Flusher(tmp_path, catalog).flush()  # a new one knows nothing but what is stored

    keys = [
        key
        for one in catalog.files("lab", "stack")
        for key in pq.read_table(tmp_path / one.path, columns=["key"]).column("key").to_pylist()
    ]
    assert len(keys) == len(set(keys))


def test_a_killed_flush_leaves_nothing_that_counts_and_is_done_again(tmp_path: Path) -> None:
    write(tmp_path, [record(seq) for seq in range(20)])
    program = (
        "import os, sys; from pathlib import Path; from sonde.store.catalog import Catalog;"
        "from sonde.store.flush import Flusher;"
        "Catalog.commit = lambda *a: os.kill(os.getpid(), 9);"
        "f = Path(sys.argv[1]); Flusher(f, Catalog(f)).flush()"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    catalog = Catalog(tmp_path)

    assert killed.returncode == -9
    assert catalog.files() == []
    assert sweep_orphans(tmp_path, catalog) > 0
    assert Flusher(tmp_path, catalog).flush().chunks == 20


def test_tenants_lie_apart_and_do_not_share_digests(tmp_path: Path) -> None:
    body = record(0).body
    write(
        tmp_path,
        [Record(name, "one", digest_of(name, "one", body), NOW_NS, body) for name in ("a", "b")],
    )
    catalog = Catalog(tmp_path)
    Flusher(tmp_path, catalog).flush()

    for name in ("a", "b"):
        assert stored_rows(tmp_path, catalog, "chunk", name) == 1
        assert all(one.path.startswith(f"data/{name}/") for one in catalog.files(name))


def test_a_compaction_that_fails_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = Catalog(tmp_path)
    flusher = Flusher(tmp_path, catalog)
    for seq in range(13):
        write(tmp_path, [record(seq)])
        flusher.flush()
    before = set(tmp_path.glob("data/*/*/*/*/*.parquet"))

    def fail(folder: Path, sample: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(compaction, "_sums_of", fail)
    with pytest.raises(OSError, match="no room"):
        compact(tmp_path, catalog)

    assert set(tmp_path.glob("data/*/*/*/*/*.parquet")) == before


def test_compaction_keeps_rows_and_removes_files(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    flusher = Flusher(tmp_path, catalog)
    for seq in range(13):
        write(tmp_path, [record(seq)])
        flusher.flush()
    before = stored_rows(tmp_path, catalog, "sample")

    gone = compact(tmp_path, catalog).gone

    assert gone > 0
    assert stored_rows(tmp_path, catalog, "sample") == before
    assert len(catalog.files("lab", "sample")) < 13
    assert sweep(tmp_path, catalog, time.time_ns() + 10**12) == gone


def test_retention_by_age_and_by_size(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    write(tmp_path, [record(0)])
    Flusher(tmp_path, catalog).flush()

    assert retain(tmp_path, catalog, 86_400 * 10**9, 0, NOW_NS) == 0
    assert retain(tmp_path, catalog, 0, 1, NOW_NS) > 0
    assert catalog.files() == []


def test_a_refused_write_is_not_acknowledged_and_the_next_one_is(tmp_path: Path) -> None:
    wal = Wal(tmp_path / "wal")
    wal.append(record(0)).result(10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(WalFailedError, match="cannot write"):
            for seq in range(1, 20):
                wal.append(record(seq)).result(10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    wal.append(record(99)).result(10)
    wal.close()

    (path,) = sealed_segments(tmp_path / "wal")
    assert not any(isinstance(one.item, Damage) for one in scan(path, secret_of(tmp_path / "wal")))


def test_a_chunk_that_is_wrong_inside_costs_itself_alone(tmp_path: Path) -> None:
    from stored_chunks import with_meta

    good = [record(seq) for seq in range(3)]
    import stored_chunks

    meta = stored_chunks.meta_of(good[0].body) | {"raw_len": 7}
    body = with_meta(good[0].body, meta)
    bad = Record("lab", "one", digest_of("lab", "one", body), NOW_NS, body)
    write(tmp_path, [*good, bad])
    catalog = Catalog(tmp_path)

    done = Flusher(tmp_path, catalog).flush()

    assert (done.chunks, done.undecodable) == (3, 1)
