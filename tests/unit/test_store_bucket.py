# SPDX-License-Identifier: Apache-2.0
"""A store in a bucket (here a folder): whatever dies when, what was acknowledged is there once."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sonde.errors import CaptureTooLarge, UsageError
from sonde.query.stored_session import QueryTimedOutError
from sonde.server.service import Service
from sonde.store import storage
from sonde.store.bucket import Bucket, BucketError
from sonde.store.catalog import Catalog
from sonde.store.compaction import compact, retain, sweep
from sonde.store.flush import Flusher
from sonde.store.published import NameTakenError, Published, Publisher, servers_of
from sonde.store.readable_files import in_bucket
from sonde.store.record import Record, digest_of
from sonde.store.shared import SharedStore
from sonde.store.storage import BucketSettings, BucketStorage, keep_server_name
from sonde.store.wal import Wal, sealed_segments
from stored_chunks import as_of, recorded, rows_of

CHUNKS = recorded()
NOW_NS = 1_800_001_800 * 10**9
LARGE = 1 << 40


def record(seq: int) -> Record:
    body = as_of(CHUNKS[seq % len(CHUNKS)], "one", seq, NOW_NS + seq * 10**9)
    return Record("lab", "one", digest_of("lab", "one", body), time.time_ns(), body)


def write(folder: Path, numbers: range) -> None:
    wal = Wal(folder / "wal")
    for future in [wal.append(record(seq)) for seq in numbers]:
        future.result(10)
    wal.close()


class Place:
    """A server's directory and its name in a bucket."""

    def __init__(self, folder: Path, bucket: Path, server: str = "a", cache: int = LARGE) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.settings = BucketSettings(f"file://{bucket}", server, cache)
        self.catalog = Catalog(folder)
        self.storage = BucketStorage(folder, self.catalog, self.settings)

    def flush(self) -> int:
        """As the flusher does; returns the chunks."""
        self.storage.join()
        return Flusher(self.folder, self.catalog, self.storage).flush().chunks


def published(bucket: Path, name: str = "chunk", server: str = "a") -> list[Path]:
    """The files of a table in the bucket that count."""
    view = Published(Bucket(f"file://{bucket}"), server)
    view.refresh()
    return [
        bucket / f"server={server}" / one.path for one in view.files.values() if one.name == name
    ]


def stored(bucket: Path, server: str = "a") -> Counter[int]:
    """How often each chunk is in the bucket, by its number."""
    paths = published(bucket, server=server)
    return Counter(
        seq for path in paths for seq in pq.read_table(path, columns=["seq"])["seq"].to_pylist()
    )


def objects(bucket: Path) -> set[str]:
    return {str(path.relative_to(bucket)) for path in bucket.rglob("*.parquet")}


def once(numbers: range) -> Counter[int]:
    return Counter(dict.fromkeys(numbers, 1))


def test_a_new_disk_gets_everything_back_and_takes_no_chunk_twice(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    first = Place(tmp_path / "first", bucket)
    write(first.folder, range(20))
    assert first.flush() == 20
    assert not sealed_segments(first.folder / "wal")
    shutil.rmtree(first.folder)

    second = Place(tmp_path / "second", bucket)
    write(second.folder, range(10, 25))
    assert second.flush() == 5

    assert stored(bucket) == once(range(25))
    expected = sum(rows_of(record(seq).body, "sample") for seq in range(25))
    samples = [second.storage.local(one) for one in second.catalog.files("lab", "sample")]
    assert sum(pq.read_table(path).num_rows for path in samples) == expected
    assert second.catalog.counters()["files_adopted"] > 0


KILLED = """
import os, sys
from pathlib import Path
from sonde.store import bucket, catalog, storage, flush, published
step, at, folder, to = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
def die(*_a, **_k): os.kill(os.getpid(), 9)
kept = catalog.Catalog(folder)
here = storage.BucketStorage(folder, kept, storage.BucketSettings(to, "a", 1 << 40))
here.join()
if step == "upload":
    whole, calls = bucket.Bucket.put_file, []
    def put_file(self, path, name):
        calls.append(name)
        (die if len(calls) > at else whole)(self, path, name)
    bucket.Bucket.put_file = put_file
elif step == "commit": catalog.Catalog.commit = die
elif step == "publish": bucket.Bucket.put = die
elif step == "published":
    whole = published.Publisher.publish
    published.Publisher.publish = lambda self, files: (whole(self, files), die())
flush.Flusher(folder, kept, here).flush()
"""


@pytest.mark.parametrize(
    ("step", "at"),
    [("upload", 0), ("upload", 5), ("commit", 0), ("publish", 0), ("published", 0)],
)
def test_a_kill_at_any_step_costs_nothing_and_doubles_nothing(
    tmp_path: Path, step: str, at: int
) -> None:
    bucket = tmp_path / "bucket"
    place = Place(tmp_path / "store", bucket)
    write(place.folder, range(5))
    place.flush()
    write(place.folder, range(5, 20))
    arguments = [step, str(at), str(place.folder), place.settings.uri]
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False)
    assert killed.returncode == -9
    assert stored(bucket) == once(range(5 if step != "published" else 20))

    again = Place(place.folder, bucket)
    again.flush()

    assert stored(bucket) == once(range(20))
    listed = {str(path.relative_to(bucket)) for path in bucket.rglob("*.parquet")}
    view = Published(Bucket(again.settings.uri), "a")
    view.refresh()
    assert listed == {f"server=a/{path}" for path in view.files}
    assert not sealed_segments(place.folder / "wal")


def test_a_bucket_that_refuses_costs_nothing_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = tmp_path / "bucket"
    place = Place(tmp_path / "store", bucket)
    place.flush()
    write(place.folder, range(10))
    before = objects(place.folder)

    def refuse(*_: object) -> None:
        raise BucketError("the bucket: refused")

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "put_file", refuse)
        for _ in range(3):
            with pytest.raises(BucketError):
                place.flush()
    assert objects(place.folder) == before
    assert len(sealed_segments(place.folder / "wal")) == 1
    assert place.catalog.counters()["bucket_failures"] == 3

    assert place.flush() == 10
    assert stored(bucket) == once(range(10))


def test_objects_that_somebody_removed_are_counted_and_written_again_where_they_can_be(
    tmp_path: Path,
) -> None:
    bucket = tmp_path / "bucket"
    first = Place(tmp_path / "first", bucket)
    write(first.folder, range(5))
    first.flush()
    (chunks,) = published(bucket)
    (samples,) = published(bucket, "sample")
    chunks.unlink()
    samples.unlink()

    other = Place(tmp_path / "other", bucket)
    other.storage.join()
    assert other.catalog.counters()["files_lost"] == 2
    assert len(other.catalog.files()) == len(first.catalog.files()) - 2

    again = Place(first.folder, bucket)
    again.storage.join()
    assert stored(bucket) == once(range(5))
    assert samples.exists()


def test_compaction_and_retention_happen_in_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = tmp_path / "bucket"
    place = Place(tmp_path / "store", bucket)
    for seq in range(13):
        write(place.folder, range(seq, seq + 1))
        place.flush()
    before = sum(pq.read_table(path).num_rows for path in published(bucket, "sample"))
    objects_before = objects(bucket)

    gone = compact(place.folder, place.catalog, place.storage).gone
    assert gone > 0
    assert sum(pq.read_table(path).num_rows for path in published(bucket, "sample")) == before
    # Those who read an older catalog may go on.
    assert sweep(place.folder, place.catalog, time.time_ns() + 10**12, place.storage) == 0
    assert objects_before <= objects(bucket)
    monkeypatch.setattr(storage, "_ABSENT_S", 0)
    assert sweep(place.folder, place.catalog, time.time_ns() + 10**12, place.storage) == gone

    assert retain(place.folder, place.catalog, 0, 1, time.time_ns()) > 0
    for _ in range(2):
        sweep(place.folder, place.catalog, time.time_ns() + 10**12, place.storage)
    assert objects(bucket) == objects(place.folder) == set()


def test_the_directory_is_bounded_and_compacts_what_it_fetches(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    place = Place(tmp_path / "store", bucket, cache=1_000)
    for seq in range(13):
        write(place.folder, range(seq, seq + 1))
        place.flush()
    assert place.storage.shrink_cache() == 0, "used a moment ago"
    for name in objects(place.folder):
        os.utime(place.folder / name, (1, 1))
    assert place.storage.shrink_cache() > 0
    assert sum((place.folder / name).stat().st_size for name in objects(place.folder)) <= 1_000

    assert compact(place.folder, place.catalog, place.storage).gone > 0
    assert stored(bucket) == once(range(13))


def test_what_others_took_while_a_server_was_dead_is_not_stored_again(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    dead, other = (Place(tmp_path / name, bucket, name) for name in ("a", "b"))
    write(dead.folder, range(10))
    write(other.folder, range(5, 15))
    assert other.flush() == 10

    assert dead.flush() == 5

    assert stored(bucket) == once(range(5))
    assert stored(bucket, "b") == once(range(5, 15))
    assert dead.catalog.counters()["chunks_duplicate"] == 5


def test_every_server_answers_with_what_all_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = tmp_path / "bucket"
    for server, numbers in (("a", range(5)), ("b", range(5, 12))):
        place = Place(tmp_path / server, bucket, server)
        write(place.folder, numbers)
        place.flush()
    (tmp_path / "c").mkdir()
    settings = BucketSettings(f"file://{bucket}", "c", LARGE)
    shared = SharedStore(tmp_path / "c", settings)
    while shared.age_s < 0:
        time.sleep(0.01)

    assert servers_of(Bucket(settings.uri)) == ["a", "b"]
    files = shared.files("lab", "chunk", 0, 1 << 62)
    assert shared.files("other", "chunk", 0, 1 << 62) == []
    with monkeypatch.context() as patch, pytest.raises(QueryTimedOutError):
        patch.setattr(shared.downloads, "file", lambda *_: time.sleep(0.2))
        shared.paths(files, time.monotonic() + 0.01)
    paths = shared.paths(files, time.monotonic() + 10)
    assert paths == shared.paths(files, time.monotonic() + 10)
    assert sum(pq.read_table(path).num_rows for path in paths) == 12
    shared.close()

    Bucket(settings.uri).put(b"none", f"server=0/catalog/{1:012d}-{'0' * 32}-all.json.gz")
    partly = SharedStore(tmp_path / "c", settings)
    while not partly.failures:
        time.sleep(0.01)
    assert partly.files("lab", "chunk", 0, 1 << 62) == files, "one catalog that cannot be read"
    partly.close()

    small = SharedStore(tmp_path / "c", BucketSettings(settings.uri, "c", 10))
    samples = shared.files("lab", "sample", 0, 1 << 62)
    with pytest.raises(CaptureTooLarge, match="--cache-gb"):
        small.paths(samples, time.monotonic() + 10)
    small.close()


def test_the_catalog_is_listed_whole_from_time_to_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sonde.store.published.ALL_EVERY", 4)
    bucket = Bucket(f"file://{tmp_path}")
    place = Place(tmp_path / "store", tmp_path / "else")
    write(place.folder, range(1))
    place.flush()
    files = place.catalog.files()
    writer, slow = Publisher(bucket, "a"), Published(bucket, "a")
    for count in [*range(1, len(files)), *range(len(files), 0, -1)]:
        writer.publish(files[:count])
        if count % 7 == 0:
            slow.refresh()
    slow.refresh()
    new = Published(bucket, "a")
    new.refresh()

    assert new.files == slow.files == {files[0].path: files[0]}
    assert len(bucket.listed("server=a/catalog")) <= 8


def test_two_servers_of_one_name_are_noticed(tmp_path: Path) -> None:
    place = Place(tmp_path / "store", tmp_path / "bucket")
    write(place.folder, range(1))
    place.flush()
    bucket = Bucket(f"file://{tmp_path / 'other'}")
    files = place.catalog.files()
    one, two = Publisher(bucket, "a"), Publisher(bucket, "a")
    one.publish(files[:1])
    two.load()
    two.publish(files[:2])

    for _ in range(2):
        with pytest.raises(NameTakenError, match="--server-name"):
            one.publish(files[:3])


@pytest.mark.parametrize(
    ("path", "tenant"),
    [
        ("../../etc/passwd", "lab"),
        ("data/lab/chunk/day=2027-01-15/hour=08/../../../../../x.parquet", "lab"),
        ("data/other/chunk/day=2027-01-15/hour=08/" + "0" * 32 + ".parquet", "lab"),
    ],
)
def test_a_catalog_that_names_a_file_wrongly_is_refused(
    tmp_path: Path, path: str, tenant: str
) -> None:
    entry = {
        "path": path, "tenant": tenant, "name": "chunk", "day": "2027-01-15", "hour": 8,
        "min_ns": 0, "max_ns": 1, "row_count": 1, "size_bytes": 1, "level": 0,
    }  # fmt: skip
    name = f"server=a/catalog/{1:012d}-{'0' * 32}-all.json.gz"
    bucket = Bucket(f"file://{tmp_path}")
    bucket.put(gzip.compress(json.dumps({"version": 1, "added": [entry]}).encode()), name)

    with pytest.raises(BucketError, match="names a file wrongly"):
        Published(bucket, "a").refresh()
    bucket.put(b"none", name)
    with pytest.raises(BucketError, match="cannot be read"):
        Published(bucket, "a").refresh()


@pytest.mark.parametrize(
    "uri",
    ["s3://key:secret@bucket/x", "s3://bucket?access_key=x", "/folder", "https://x/y", "s3://"],
)
def test_addresses_that_are_none_or_hold_passwords_are_refused(uri: str) -> None:
    with pytest.raises(UsageError) as refused:
        Bucket(uri)
    assert "secret" not in str(refused.value)


def _entry(**changes: object) -> dict[str, object]:
    found: dict[str, object] = {
        "tenant": "lab", "name": "chunk", "day": "2027-01-15", "hour": 8,
        "min_ns": 0, "max_ns": 1, "row_count": 1, "size_bytes": 1, "level": 0, **changes,
    }  # fmt: skip
    hour = int(str(found["hour"]))
    place = f"data/lab/chunk/day={found['day']}/hour={hour:02d}/{'0' * 32}.parquet"
    return {"path": place, **found}


def _packed(*entries: dict[str, object]) -> bytes:
    return gzip.compress(json.dumps({"version": 1, "added": entries}).encode())


DAMAGED = {
    "deflate": gzip.compress(b"x" * 99)[:12] + b"\xff" * 40,
    "deep": gzip.compress(b'{"version":1,"x":' + b"[" * 200_000),
    "ns": _packed(_entry(min_ns=1 << 64)),
    "size": _packed(_entry(size_bytes=-1)),
    "rows": _packed(_entry(row_count=1 << 40)),
    "day": _packed(_entry(day="2026-99-99")),
    "hour": _packed(_entry(hour=24)),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_catalog_is_an_error_and_what_was_known_stays(
    tmp_path: Path, content: bytes
) -> None:
    bucket = Bucket(f"file://{tmp_path}")
    bucket.put(_packed(_entry()), f"server=a/catalog/{1:012d}-{'0' * 32}-all.json.gz")
    view = Published(bucket, "a")
    view.refresh()
    before = view.files, view.last
    assert len(view.files) == 1

    bucket.put(content, f"server=a/catalog/{2:012d}-{'0' * 32}-all.json.gz")
    with pytest.raises(BucketError):
        view.refresh()
    shutil.rmtree(tmp_path / "server=a/catalog")
    bucket.put(_packed(), f"server=a/catalog/{4:012d}-{'0' * 32}-changes.json.gz")
    with pytest.raises(BucketError, match="incomplete"):
        view.refresh()
    assert (view.files, view.last) == before


def test_damaged_files_of_the_bucket_stop_no_start(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    first, other = (Place(tmp_path / name, bucket, name) for name in ("a", "b"))
    write(first.folder, range(3))
    write(other.folder, range(3, 6))
    first.flush()
    other.flush()
    for server, content in (("a", b"none"), ("b", b"PAR1" + bytes(40) + b"PAR1")):
        (path,) = published(bucket, server=server)
        path.write_bytes(content)

    again = Place(tmp_path / "again", bucket)
    write(again.folder, range(6, 9))
    assert again.flush() == 3
    assert again.catalog.counters()["bucket_failures"] == 2


def test_a_restarted_server_with_nothing_new_notices_another_of_its_name(tmp_path: Path) -> None:
    place = Place(tmp_path / "store", tmp_path / "bucket")
    write(place.folder, range(1))
    place.flush()
    bucket = Bucket(f"file://{tmp_path / 'other'}")
    files = place.catalog.files()
    Publisher(bucket, "a").publish(files[:1])
    again, two = Publisher(bucket, "a"), Publisher(bucket, "a")
    again.load()
    assert again.publish(files[:1]) == 0
    two.load()
    two.publish(files[:2])

    with pytest.raises(NameTakenError):
        again.publish(files[:3])
    with pytest.raises(NameTakenError):
        again.load()


def test_a_store_keeps_its_name_in_the_bucket(tmp_path: Path) -> None:
    keep_server_name(tmp_path, "a")
    keep_server_name(tmp_path, "a")
    with pytest.raises(UsageError, match=r"is 'a' in its bucket.*--server-name a"):
        keep_server_name(tmp_path, "b")
    assert [path.name for path in tmp_path.iterdir()] == ["server-name"]


def test_a_path_that_two_servers_list_is_one_file(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    place = Place(tmp_path / "store", bucket)
    write(place.folder, range(3))
    place.flush()
    shutil.copytree(bucket / "server=a", bucket / "server=b")

    service = Service(tmp_path / "store", flushes=False, bucket=place.settings)
    assert service.shared
    while service.shared.age_s < 0:
        time.sleep(0.01)
    try:
        assert len(service.shared.files("lab", "chunk", 0, 1 << 62)) == 1
        assert len(service._files_of("lab", "chunk", 0, 1 << 62)) == 1
    finally:
        service.close()
    assert len(in_bucket(place.settings.uri, "lab", 0, 1 << 62)["chunk"]) == 1
    with pytest.raises(UsageError, match="--server-name a"):
        Service(
            tmp_path / "store",
            flushes=False,
            bucket=BucketSettings(place.settings.uri, "c", LARGE),
        )
