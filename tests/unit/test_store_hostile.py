# SPDX-License-Identifier: Apache-2.0
"""The store beside a tenant that sends what hurts others: attacks that once worked."""

from __future__ import annotations

import json
import struct
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import captures
from sonde.errors import SinkError, UsageError
from sonde.query import framing
from sonde.server.service import RefusedRequestError, ServerLimits, Service
from sonde.server.tokens import Caller, Scope, Tokens
from sonde.server.upload import _counts
from sonde.store import chunks, compaction, flush, row_reader
from sonde.store.catalog import Catalog
from sonde.store.flush import Flusher
from sonde.store.record import MAGIC, Record, digest_of, encode, scan
from sonde.store.tables import Hasher, siphash
from sonde.store.wal import Wal, sealed_segments, secret_of
from stored_chunks import as_of, recorded

CHUNKS = recorded()
HOUR_NS = 3_600 * 10**9
NOW_NS = 1_800_001_800 * 10**9
VICTIM = Caller("v", "victim", frozenset({Scope.INGEST}))
EVIL = Caller("e", "evil", frozenset({Scope.INGEST}))


def record(tenant: str, seq: int, at_ns: int = NOW_NS, body: bytes = b"") -> Record:
    body = body or as_of(CHUNKS[seq % len(CHUNKS)], tenant, seq, at_ns)
    return Record(tenant, "n", digest_of(tenant, "n", body), NOW_NS, body)


def write(folder: Path, records: list[Record]) -> Path:
    wal = Wal(folder / "wal")
    for one in records:
        wal.append(one).result(10)
    wal.close()
    return sealed_segments(folder / "wal")[-1]


def chunks_of(folder: Path, catalog: Catalog, tenant: str) -> int:
    files = catalog.files(tenant, "chunk")
    return sum(pq.read_table(folder / one.path).num_rows for one in files)


def chunk(tables: dict[str, pa.Table], **meta: Any) -> bytes:
    given = {"seq": 0, "start_ns": 10**9, "end_ns": 2 * 10**9, "wall_offset_ns": NOW_NS}
    given["capture"] = {"id": "x", "host": {"name": "h", "cpus": 1}}
    content: bytes = captures.chunk(tables, **{**given, **meta})
    return content


def with_surrogate() -> bytes:
    """Its recording is called by half of a UTF-16 pair."""
    host = {"name": "h", "cpus": 1}
    return chunk({}, capture={"id": "\ud800", "host": host})


def with_null_in_a_list() -> bytes:
    lists = pa.array([[1, None]], pa.list_(pa.uint64()))
    columns = {"stack_id": pa.array([1], pa.uint64()), "frame_ids": lists, "complete": [True]}
    return chunk({"stack": pa.table(columns)})


@pytest.mark.parametrize("make", [with_surrogate, with_null_in_a_list])
def test_no_chunk_keeps_others_from_being_stored(tmp_path: Path, make: Any) -> None:
    write(tmp_path, [record("victim", 0), record("evil", 0, body=make()), record("victim", 1)])
    catalog = Catalog(tmp_path)

    Flusher(tmp_path, catalog).flush()

    assert chunks_of(tmp_path, catalog, "victim") == 2
    assert not sealed_segments(tmp_path / "wal")


def test_a_chunk_that_ends_the_flusher_is_quarantined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an engine that crashes, or the kernel where memory is short, would end it."""
    write(tmp_path, [record("victim", 0), record("evil", 1), record("victim", 2)])
    catalog = Catalog(tmp_path)
    open_chunk = flush.open_chunk

    def dies(one: Record) -> Any:
        if one.tenant == "evil":
            raise KeyboardInterrupt
        return open_chunk(one)

    monkeypatch.setattr(flush, "open_chunk", dies)
    crashes = 0
    while sealed_segments(tmp_path / "wal"):
        try:
            Flusher(tmp_path, catalog).flush()
        except KeyboardInterrupt:
            crashes += 1
        assert crashes < 20

    assert chunks_of(tmp_path, catalog, "victim") == 2
    assert len(list((tmp_path / "quarantine").iterdir())) == 1


def test_a_disk_that_refuses_puts_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, [record("victim", 0)])
    catalog = Catalog(tmp_path)
    flusher = Flusher(tmp_path, catalog)
    with monkeypatch.context() as patch:

        def refuses(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(flush, "write_file", refuses)
        for _ in range(12):
            with pytest.raises(OSError, match="space"):
                flusher.flush()

    assert flusher.flush().chunks == 1


def test_a_body_cannot_hold_records_of_others(tmp_path: Path) -> None:
    """A write that is cut in the middle of it must not be read on inside it."""
    forged = b"".join(encode(record("victim", 7), bytes(32)))
    fixed = forged[: len(MAGIC)]
    assert fixed == MAGIC
    write(tmp_path, [record("victim", 0), record("evil", 0, body=forged * 3)])
    (path,) = sealed_segments(tmp_path / "wal")
    content = path.read_bytes()
    secret = secret_of(tmp_path / "wal")
    first = next(iter(scan(path, secret))).end
    damaged = bytearray(content)
    damaged[first + 20] ^= 1  # the head of the evil record
    for changed in (content[:-100], bytes(damaged), bytes(damaged[:-100])):
        path.write_bytes(changed)
        found = [one.item for one in scan(path, secret)]
        assert [one.tenant for one in found if isinstance(one, Record)] == ["victim"]
        assert len(found) == 2


def test_keys_cannot_be_foreseen() -> None:
    """They were a linear function of frames: a stack with another one's key took 4 s to find."""
    one, other = (Hasher(bytes([n]) * 32) for n in (1, 2))
    table = pa.table({"function": ["main", "train"], "binary": ["a", "b"]})
    assert set(one.of_rows(table)).isdisjoint(other.of_rows(table))
    keys, ends = np.arange(1, 5, dtype=np.uint64), np.array([0, 2, 4])
    complete = np.array([True, True])
    assert set(one.of_lists(keys, ends, complete)).isdisjoint(other.of_lists(keys, ends, complete))
    assert (one.of_lists(keys, ends, complete) == one.of_lists(keys, ends, complete)).all()
    split = pa.table({"function": ["a\x1fb", "a"], "binary": ["c", "b\x1fc"]})
    assert len(set(one.of_rows(split))) == 2


def test_keys_of_rows_are_the_published_siphash() -> None:
    """The vectors of its authors: of 8 and 16 bytes that count from 0, the key 0, 1, .. 15."""
    key = struct.unpack("<2Q", bytes(range(16)))
    for size, expected in ((8, "93f5f5799a932462"), (16, "3f2acc7f57c29bdb")):
        words = np.frombuffer(bytes(range(size)), np.uint64)
        found = siphash(key, [np.full(3, word, np.uint64) for word in words])
        assert {f"{int(one):016x}" for one in found} == {expected}


def test_chunks_of_many_hours_make_few_files(tmp_path: Path) -> None:
    small = min(CHUNKS, key=len)
    hours = [NOW_NS - hour * HOUR_NS for hour in range(100)]
    write(tmp_path, [record("evil", 0, body=as_of(small, "evil", 0, at)) for at in hours])
    catalog = Catalog(tmp_path)

    Flusher(tmp_path, catalog).flush()

    assert len(catalog.files("evil", "chunk")) <= 4
    old = NOW_NS - 90 * HOUR_NS
    assert catalog.files("evil", "chunk", old, old + HOUR_NS), "found by their own times"


def test_memory_follows_what_chunks_unpack_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 100_000
    columns = {"time_ns": pa.array(np.full(rows, 1_500_000_000, np.uint64))}
    columns["value"] = pa.array(np.zeros(rows))
    columns["series"] = columns["labels"] = pa.array(["x"] * rows)
    large = [chunk({"metric": pa.table(columns)}, seq=seq) for seq in range(32)]
    assert max(map(len, large)) < 1_000_000
    write(tmp_path, [record("evil", 0, body=body) for body in large])
    sizes: list[int] = []
    ready = Flusher._ready

    def watched(self: Flusher, chunks: list[flush.OpenedChunk]) -> Any:
        sizes.append(sum(one.size_bytes for one in chunks))
        return ready(self, chunks)

    monkeypatch.setattr(Flusher, "_ready", watched)
    done = Flusher(tmp_path, Catalog(tmp_path)).flush()

    assert done.chunks == 32
    assert len(sizes) > 1
    assert max(sizes) < 2 * flush.BATCH_BYTES


def small_rows(rows: int, seq: int = 0, **more: Any) -> bytes:
    """Rows of `process` of 24 bytes, of 400 once the columns that they leave out are made."""
    empty = pa.StringArray.from_buffers(
        rows, pa.py_buffer(np.zeros(rows + 1, np.int32)), pa.py_buffer(b"")
    )
    columns = {
        "pid": np.arange(rows, dtype=np.uint32),
        "start_ns": np.full(rows, seq + 1, np.uint64),
        "ppid": np.zeros(rows, np.uint32),
        "comm": empty,
        "exe": empty,
    }
    return chunk({"process": pa.table(columns | more)}, seq=seq)


@pytest.mark.parametrize("way", ["native", "arrow"])
def test_small_rows_are_charged_for_what_is_made_of_them(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_reader, "ROWS_BYTES", 4 << 20)
    monkeypatch.setattr(chunks, "JOINED_BYTES", 8 << 20)
    rows = 50_000
    more = {"unknown": pa.array(np.zeros(rows, np.int8))} if way == "arrow" else {}
    bomb = record("evil", 0, body=small_rows(rows, 0, **more))
    others = [record("evil", 1, body=small_rows(2_000, 1)), record("victim", 2)]
    write(tmp_path, [bomb, *others])
    catalog = Catalog(tmp_path)

    done = Flusher(tmp_path, catalog).flush()

    assert (done.chunks, done.undecodable) == (2, 1)
    assert chunks_of(tmp_path, catalog, "victim") == chunks_of(tmp_path, catalog, "evil") == 1
    catalog.close()


def test_a_batch_whose_rows_are_large_is_written_part_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_reader, "ROWS_BYTES", 4 << 20)
    monkeypatch.setattr(flush, "MADE_BYTES", 1 << 20)
    write(tmp_path, [record("evil", seq, body=small_rows(8_000, seq)) for seq in range(6)])
    catalog = Catalog(tmp_path)
    most = []
    some = flush._next_parts

    def counted(parts: Any) -> Any:
        found = some(parts)
        most.append(len(found))
        return found

    monkeypatch.setattr(flush, "_next_parts", counted)
    done = Flusher(tmp_path, catalog).flush()

    assert (done.chunks, done.undecodable) == (6, 0)
    assert max(most) <= 2
    files = catalog.files("evil", "process")
    assert sum(pq.read_table(tmp_path / one.path).num_rows for one in files) == 6 * 8_000
    catalog.close()


def test_keys_of_a_day_are_known_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, [record("a", seq, body=small_rows(1_000, seq)) for seq in range(3)])
    catalog = Catalog(tmp_path)
    Flusher(tmp_path, catalog).flush()
    flusher = Flusher(tmp_path, catalog)
    (one,) = catalog.files("a", "process")
    assert len(flusher._known_keys(("a", one.day, "process"))) == 3_000

    monkeypatch.setattr(flush, "_KNOWN_KEYS", 2_000)
    flusher = Flusher(tmp_path, catalog)
    assert len(flusher._known_keys(("a", one.day, "process"))) == 0
    flusher._learn(("a", one.day, "process"), np.arange(3_000))
    assert len(flusher._known_keys(("a", one.day, "process"))) == 0
    catalog.close()


def test_retention_takes_from_who_has_most(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    far = 4_500_000_000 * 10**9  # in the year 2112
    write(tmp_path, [record("victim", 0)])
    Flusher(tmp_path, catalog).flush()
    own = sum(one.size_bytes for one in catalog.files("victim"))
    write(tmp_path, [record("evil", seq, far + seq) for seq in range(len(CHUNKS))])
    Flusher(tmp_path, catalog).flush()
    assert sum(one.size_bytes for one in catalog.files("evil")) > own

    compaction.retain(tmp_path, catalog, 0, 2 * own, NOW_NS)
    assert chunks_of(tmp_path, catalog, "victim") == 1

    compaction.retain(tmp_path, catalog, 48 * HOUR_NS, 0, NOW_NS + 60 * HOUR_NS)
    assert not catalog.files("evil"), "the times that it claims do not keep it"


def test_files_that_cannot_be_merged_keep_no_others_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = Catalog(tmp_path)
    flusher = Flusher(tmp_path, catalog)
    small = {"time_ns": pa.array([1_500_000_000], pa.uint64()), "value": pa.array([0.0])}
    small["series"] = small["labels"] = pa.array(["x"])
    for seq in range(compaction.COMPACTED_FROM):
        body = chunk({"metric": pa.table(small)}, seq=seq)
        write(tmp_path, [record(tenant, seq, body=body) for tenant in ("evil", "victim")])
        flusher.flush()
    merged = compaction._merged

    def fails(folder: Path, files: Any, *others: Any) -> Any:
        if files[0].tenant == "evil":
            raise duckdb.OutOfMemoryException("no")
        return merged(folder, files, *others)

    monkeypatch.setattr(compaction, "_merged", fails)
    done = compaction.compact(tmp_path, catalog)
    assert done.failed
    assert len(catalog.files("victim", "metric")) == 1
    assert compaction.compact(tmp_path, catalog).failed == 0, "not tried again"


def test_files_are_read_once_for_all_chunks_that_claim_an_old_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = Catalog(tmp_path)
    old_ns = time.time_ns() - 5 * 86_400 * 10**9
    for seq in range(10):
        write(tmp_path, [record("evil", seq, old_ns)])
        assert Flusher(tmp_path, catalog).flush().chunks == 1
    read: list[str] = []
    read_table = pq.read_table

    def counted(path: Any, *args: Any, **kwargs: Any) -> pa.Table:
        if kwargs.get("columns") == ["digest"]:
            read.append(str(path))
        return read_table(path, *args, **kwargs)

    monkeypatch.setattr(pq, "read_table", counted)
    catalog.forget_chunks(1 << 62)
    flusher = Flusher(tmp_path, catalog)
    write(tmp_path, [record("evil", seq, old_ns) for seq in range(100)])
    done = flusher.flush()
    assert (done.chunks, done.duplicates) == (90, 10)
    assert len(read) <= 10 + 10


def test_a_log_that_grows_faster_than_it_is_stored_is_bounded_by_tenant(tmp_path: Path) -> None:
    service = Service(tmp_path / "store", ServerLimits(log_bytes=4 << 20), flushes=False)
    taken = 0
    with pytest.raises(RefusedRequestError, match="behind") as refused:
        for taken in range(200):
            for future, _ in service.take(EVIL, "n", as_of(CHUNKS[0], "n", taken, NOW_NS)):
                future.result(10)
    assert refused.value.status == 503
    assert 5 < taken < 64
    assert service.take(VICTIM, "n", as_of(CHUNKS[0], "n", 0, NOW_NS))

    service.wal._seal_in_s = lambda: 0.0  # type: ignore[method-assign]
    service.take(VICTIM, "n", as_of(CHUNKS[0], "n", 1, NOW_NS))[0][0].result(10)
    ends = time.monotonic() + 20
    while not Flusher(service.folder, service.catalog).flush().segments:
        assert time.monotonic() < ends
    time.sleep(1.1)
    assert service.take(EVIL, "n", as_of(CHUNKS[0], "n", 1_000, NOW_NS))
    service.close()


@pytest.fixture
def service(tmp_path: Path) -> Any:
    folder = tmp_path / "store"
    found = Service(folder, ServerLimits(), flushes=False)
    yield found
    found.close()


def test_a_body_is_not_searched_for_chunks(service: Service) -> None:
    body = framing.CHUNK_MAGIC * (4 << 20)
    began = time.process_time()
    with pytest.raises(RefusedRequestError, match="damaged"):
        service.take(EVIL, "n", body)
    assert time.process_time() - began < 0.2


def test_long_descriptions_are_refused(service: Service) -> None:
    padding = chunk({}, padding="x" * 100_000)
    with pytest.raises(RefusedRequestError, match="described"):
        service.take(EVIL, "n", padding)


def test_what_takes_long_to_decode_counts_against_the_rate(service: Service) -> None:
    body = as_of(CHUNKS[0], "x", 0, NOW_NS)
    meta_size = framing.CHUNK_HEADER.unpack(body[:32])[3]
    meta = json.loads(body[32 : 32 + meta_size])
    for _ in range(1_000):
        meta["raw_len"] = 30 << 20
        meta["seq"] += 1
        from stored_chunks import with_meta

        try:
            service.take(EVIL, "n", with_meta(body, meta))
        except RefusedRequestError as error:
            assert error.status == 429
            break
    else:
        pytest.fail("never too much")
    assert service.take(VICTIM, "n", body)


def test_refused_requests_use_up_no_names_of_nodes(service: Service) -> None:
    for number in range(10):
        with pytest.raises(RefusedRequestError):
            service.take(EVIL, f"n{number}", b"nothing")
    assert not service._nodes.get("evil")


def test_a_folder_of_somebody_else_is_no_store(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(UsageError, match="other users"):
        Service(shared, flushes=False)
    with pytest.raises(UsageError, match="other users"):
        Tokens(shared)


@pytest.mark.parametrize(
    "answer",
    [b"[]", b"{", b'{"accepted": 1e999, "duplicates": 0}', b'{"accepted": "1"}', b"[" * 100_000],
)
def test_answers_that_are_none_are_refused(answer: bytes) -> None:
    with pytest.raises(SinkError, match="no answer"):
        _counts(answer)


def test_deep_descriptions_are_refused() -> None:
    nested: Any = "x"
    for _ in range(min(900, sys.getrecursionlimit() - 100)):
        nested = {"a": nested}
    body = chunk({}, capture={"id": "x", "host": {"name": nested, "cpus": 1}})
    meta_size = framing.CHUNK_HEADER.unpack(body[:32])[3]
    from sonde.query.capture import DamagedChunkError, chunk_meta

    with pytest.raises(DamagedChunkError, match="out of range"):
        chunk_meta(body[32 : 32 + meta_size])


def test_checksums_of_the_tests_are_those_of_the_format() -> None:
    body = as_of(CHUNKS[0], "x", 0, NOW_NS)
    assert struct.unpack("<I", body[28:32])[0] == zlib.crc32(body[:28])


def test_flushers_of_two_processes_miss_no_crash_of_one_another(tmp_path: Path) -> None:
    one, other = Catalog(tmp_path), Catalog(tmp_path)
    assert one.attempt("log", 0, "first") == 0
    found: list[int] = []
    between = threading.Thread(target=lambda: found.append(other.attempt("log", 0, "third")))

    def pause(statement: str) -> None:
        if statement.startswith("INSERT"):
            between.start()
            between.join(0.3)

    one._db._db.set_trace_callback(pause)
    found.append(one.attempt("log", 0, "second"))
    between.join()

    assert found == [1, 2]
