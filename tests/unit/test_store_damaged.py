# SPDX-License-Identifier: Apache-2.0
"""A damaged object in a bucket keeps nobody's chunks from being stored, and is counted."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pyarrow as pa
import pytest

from sonde.store import stored_digests
from sonde.store.catalog import Catalog, StoredFile
from sonde.store.compaction import retain
from sonde.store.flush import Flusher
from sonde.store.record import Record, digest_of
from sonde.store.storage import BucketSettings, BucketStorage, DirectoryStorage
from sonde.store.stored_digests import StoredDigests
from sonde.store.tables import DICTIONARIES, Origin
from sonde.store.wal import Wal, sealed_segments
from stored_chunks import as_of, recorded

CHUNKS = recorded()
NOW_NS = 1_800_001_800 * 10**9


def flushed(folder: Path, catalog: Catalog, copies: BucketStorage, seq: int) -> Record:
    body = as_of(CHUNKS[seq], "one", seq, NOW_NS + seq * 10**9)
    record = Record("lab", "one", digest_of("lab", "one", body), time.time_ns(), body)
    wal = Wal(folder / "wal")
    wal.append(record).result(10)
    wal.close()
    copies.join()
    assert Flusher(folder, catalog, copies).flush().chunks == 1
    return record


@pytest.mark.parametrize("content", [b"", b"as long as it was"])
def test_a_damaged_object_stops_no_flush(tmp_path: Path, content: bytes) -> None:
    folder, bucket = tmp_path / "store", tmp_path / "bucket"
    folder.mkdir()
    catalog = Catalog(folder)
    copies = BucketStorage(folder, catalog, BucketSettings(f"file://{bucket}", "a", 1 << 40))
    record = flushed(folder, catalog, copies, 0)
    (chunk,) = catalog.files("lab", "chunk")
    for path in bucket.rglob("*.parquet"):
        size = path.stat().st_size
        path.write_bytes(content and content.ljust(size))
    shutil.rmtree(folder / "data")

    flushed(folder, catalog, copies, 1)
    assert not sealed_segments(folder / "wal")
    dictionaries = sum(bool(catalog.files("lab", name)) for name in DICTIONARIES)
    assert 0 < catalog.counters()["damaged_files"] <= dictionaries

    meta = {"start_ns": chunk.max_ns, "end_ns": chunk.max_ns, "wall_offset_ns": 0}
    origin = Origin("lab", "one", record.digest, 0, 1, meta)
    assert StoredDigests(catalog, copies).has(origin) is None, "nobody knows whether it is there"


def test_an_old_chunk_is_not_stored_twice_because_its_file_is_damaged(tmp_path: Path) -> None:
    """It is kept beside, and counted, where nobody can know any more whether it is stored."""
    old_ns = time.time_ns() - 30 * 86_400 * 10**9
    bodies = [as_of(CHUNKS[seq], "one", seq, old_ns) for seq in range(2)]
    records = [Record("lab", "one", digest_of("lab", "one", one), old_ns, one) for one in bodies]
    catalog = Catalog(tmp_path)

    def flush(some: list[Record]) -> tuple[int, int]:
        wal = Wal(tmp_path / "wal")
        for one in some:
            wal.append(one).result(10)
        wal.close()
        done = Flusher(tmp_path, catalog).flush()
        return done.chunks, done.duplicates

    assert flush(records[:1]) == (1, 0)
    retain(tmp_path, catalog, 0, 0, time.time_ns())
    assert flush(records[:1]) == (0, 1), "its file knows it"
    (chunk,) = catalog.files("lab", "chunk")
    whole = (tmp_path / chunk.path).read_bytes()
    (tmp_path / chunk.path).write_bytes(whole[: len(whole) // 2])

    assert flush(records) == (0, 0)
    counters = catalog.counters()
    assert (counters["chunks_stored"], counters["chunks_set_aside"]) == (1, 2)
    kept = {path.name: path.read_bytes() for path in (tmp_path / "quarantine").iterdir()}
    assert kept == {f"{one.digest.hex()}.chunk": one.body for one in records}
    (tmp_path / chunk.path).write_bytes(whole)
    assert flush(records) == (1, 1), "once it is whole again"


def test_digests_of_files_that_are_gone_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_digests, "_FEW_FILES", 4)
    catalog = Catalog(tmp_path)
    storage = DirectoryStorage(tmp_path)
    digests = StoredDigests(catalog, storage)
    monkeypatch.setattr(stored_digests, "column_of", lambda *_: pa.array([bytes(16)]))
    meta = {"start_ns": 5, "end_ns": 5, "wall_offset_ns": 0}
    origin = Origin("lab", "one", bytes(16), 0, 1, meta)
    before: list[StoredFile] = []
    for at in range(40):
        one = StoredFile(
            f"data/lab/chunk/{at}.parquet", "lab", "chunk", "1970-01-01", 0, 0, 10, 1, 1, 0
        )
        catalog.replace([one], before, at + 1)
        before = [one]
        assert digests.has(origin)
    assert len(digests._of_file) <= 5
    assert digests._count == len(digests._of_file)
    catalog.close()
