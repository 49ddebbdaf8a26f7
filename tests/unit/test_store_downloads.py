# SPDX-License-Identifier: Apache-2.0
"""What comes from a bucket: in size, number, disk and time bounded, and counted where it is not."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sonde.errors import CaptureError
from sonde.query.stored_session import QueryTimedOutError
from sonde.store.bucket import Bucket, DamagedObjectError
from sonde.store.catalog import Catalog, StoredFile
from sonde.store.compaction import COMPACTED_FROM, compact
from sonde.store.downloads import AT_ONCE, DRAFT_S, Downloads, remove_drafts
from sonde.store.published import Publisher
from sonde.store.shared import SharedStore
from sonde.store.storage import BucketSettings, BucketStorage

LARGE = 1 << 40
PATIENCE_S = 20.0


def stored(number: int, size_bytes: int, name: str = "chunk", tenant: str = "lab") -> StoredFile:
    path = f"data/{tenant}/{name}/day=2027-01-15/hour=08/{number:032x}.parquet"
    return StoredFile(path, tenant, name, "2027-01-15", 8, number, number + 10, 1, size_bytes, 0)


class Place:
    """A bucket with files of the server `a`, and the directory of another one."""

    def __init__(self, folder: Path) -> None:
        self.at = folder / "bucket"
        self.folder = folder / "store"
        self.folder.mkdir()
        self.bucket = Bucket(f"file://{self.at}")
        self.settings = BucketSettings(self.bucket.uri, "b", LARGE)

    def put(self, number: int, content: bytes = b"x" * 100) -> StoredFile:
        one = stored(number, len(content))
        self.bucket.put(content, f"server=a/{one.path}")
        return one

    def left(self) -> list[str]:
        """Files in the directory, drafts too."""
        return [path.name for path in self.folder.rglob("*") if path.is_file()]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize("states", [0, 99, 101, 1 << 40])
def test_an_object_of_another_size_than_its_catalog_states_is_refused(
    place: Place, states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Downloads, "_free_bytes", lambda _: 1 << 50)
    downloads = Downloads(place.folder, place.bucket, LARGE)
    with pytest.raises(DamagedObjectError, match=f"has 100 bytes, not {states:,}"):
        downloads.file("a", replace(place.put(1), size_bytes=states))
    assert place.left() == [] and downloads.refused == {"size": 1}


def test_a_file_that_a_loss_of_power_cut_comes_again(place: Place) -> None:
    downloads = Downloads(place.folder, place.bucket, LARGE)
    one = place.put(1)
    path = downloads.file("a", one)
    assert (path.read_bytes(), downloads.fetched_files) == (b"x" * 100, 1)
    path.write_bytes(b"")
    assert downloads.file("a", one).read_bytes() == b"x" * 100
    downloads.file("a", one)
    assert downloads.fetched_files == 2


class SlowBucket:
    """A bucket whose objects come when they are let."""

    def __init__(self) -> None:
        self.lets_pass = threading.Event()
        self.running: list[int] = []
        """Sizes of those that come now."""
        self.most: list[int] = []
        self.most_bytes: list[int] = []
        """How many and how large they were together, as each began."""

    def fetch(self, _name: str, path: Path, size_bytes: int) -> None:
        self.running.append(size_bytes)
        self.most.append(len(self.running))
        self.most_bytes.append(sum(self.running))
        assert self.lets_pass.wait(PATIENCE_S)
        path.write_bytes(b"x" * size_bytes)
        self.running.remove(size_bytes)


def until(what: Callable[[], object]) -> None:
    ends_s = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < ends_s
        time.sleep(0.005)


def test_all_questions_together_have_so_many_downloads_and_bytes_at_a_time(place: Place) -> None:
    slow = SlowBucket()
    downloads = Downloads(place.folder, slow, 1_000)  # type: ignore[arg-type]
    many = [stored(number, 10) for number in range(3 * AT_ONCE)]
    large = [stored(1_000 + number, 700) for number in range(3)]
    with ThreadPoolExecutor(60) as pool:
        done = [pool.submit(downloads.file, "a", one) for one in [*many, *large]]
        until(lambda: len(slow.running) == AT_ONCE)
        with pytest.raises(TimeoutError):
            downloads.file("a", stored(5_000, 1), time.monotonic() + 0.05)
        slow.lets_pass.set()
        assert [one.result().stat().st_size for one in done] == [10] * len(many) + [700] * 3
    assert max(slow.most) == AT_ONCE and max(slow.most_bytes) <= 1_000
    assert downloads.refused == {"time": 1}
    # One that is larger than all that may come at a time comes alone.
    assert downloads.file("a", stored(9_000, 2_000)).stat().st_size == 2_000


def test_the_disk_keeps_room_for_the_log(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedStore(place.folder, replace(place.settings, cache_bytes=1 << 60))
    found = os.statvfs(place.folder)
    free = found.f_bavail * found.f_frsize
    with pytest.raises(CaptureError, match="do not fit the disk"):
        shared.paths([stored(1, free)], time.monotonic() + PATIENCE_S)
    assert shared.downloads.refused == {"disk": 1}
    with pytest.raises(OSError, match="do not fit") as full:
        shared.downloads.file("a", stored(1, free))
    assert full.value.errno == errno.ENOSPC
    one = place.put(2)

    def late(*_: object) -> Path:
        raise TimeoutError

    monkeypatch.setattr(shared.downloads, "file", late)
    with pytest.raises(QueryTimedOutError, match="1 of 1 files"):
        shared.paths([one], time.monotonic() + PATIENCE_S)
    shared.close()


def test_drafts_of_the_dead_are_removed_and_those_of_the_living_stay(place: Place) -> None:
    cache = place.folder / "cache" / "lab" / "chunk" / "day=2027-01-15" / "hour=08"
    ours = place.at / "server=b" / "data" / "lab" / "chunk" / "day=2027-01-15" / "hour=08"
    others = place.at / "server=a" / "catalog"
    for folder in (cache, ours, others):
        folder.mkdir(parents=True)
        (folder / f".{'0' * 32}.part").write_bytes(b"dead")
    (cache / f".{'1' * 32}.part").write_bytes(b"alive")
    os.utime(cache / f".{'0' * 32}.part", (1, time.time() - DRAFT_S - 60))
    catalog = Catalog(place.folder)
    storage = BucketStorage(place.folder, catalog, place.settings)
    storage.join()
    storage.shrink_cache()

    assert catalog.counters()["drafts_removed"] == 2
    assert [path.name for path in cache.iterdir()] == [f".{'1' * 32}.part"]
    assert list(ours.iterdir()) == [] and len(list(others.iterdir())) == 1
    assert remove_drafts(place.folder) == 0


def test_a_damaged_object_keeps_no_other_table_from_compaction(place: Place) -> None:
    place.settings = replace(place.settings, server="a")
    content = pa.BufferOutputStream()
    table = pa.table({"time_ns": [1], "start_ns": [1], "node": ["n"]})
    pq.write_table(table, content)
    raw = content.getvalue().to_pybytes()
    catalog = Catalog(place.folder)
    files = [
        stored(number, len(raw), name)
        for name in ("chunk", "metric")
        for number in range(COMPACTED_FROM)
    ]
    for one in files:
        place.bucket.put(raw, f"server=a/{one.path}")
    place.bucket.put(b"other", f"server=a/{files[3].path}")
    catalog.replace(files, [], 1)
    for name in ("chunk", "metric"):
        (place.folder / files[0].path.replace("chunk", name)).parent.mkdir(parents=True)
    done = compact(place.folder, catalog, BucketStorage(place.folder, catalog, place.settings))

    assert (done.failed, done.gone) == (1, COMPACTED_FROM)
    assert len(catalog.files("lab", "metric")) == 1


def test_what_servers_list_is_sorted_again_only_where_it_changed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sonde.store.shared.LOOK_S", 0.01)
    mine = [stored(number, 1, name) for name in ("chunk", "sample") for number in range(50)]
    other = [stored(100 + number, 1, tenant="else") for number in range(5)]
    twice = stored(30, 1)
    first, second = Publisher(place.bucket, "a"), Publisher(place.bucket, "c")
    first.publish(mine)
    second.publish([*other, twice])
    shared = SharedStore(place.folder, place.settings)
    until(
        lambda: shared.files("lab", "chunk", 0, LARGE) and shared.files("else", "chunk", 0, LARGE)
    )

    # A file lasts for 10.
    found = shared.files("lab", "chunk", 25, 40)
    assert sorted(one.min_ns for one in found) == list(range(15, 40)), (
        "a path of two servers is there once"
    )
    assert shared.files("lab", "metric", 0, LARGE) == shared.files("none", "chunk", 0, LARGE) == []
    before = dict(shared._others)
    second.publish([*other, twice, stored(7, 1, "span")])
    until(lambda: shared.files("lab", "span", 0, LARGE))
    assert shared._others["a"] is before["a"] and shared._others["c"] is not before["c"]
    assert shared._server_of(stored(7, 1, "span").path) == "c"
    shared.close()


def test_a_disk_without_room_loses_what_the_bucket_has_and_files_come_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far below the size of the cache: the disk is full of something else."""
    place.settings = replace(place.settings, server="a")
    old, used, new = (place.put(number) for number in range(3))
    catalog = Catalog(place.folder)
    copies = BucketStorage(place.folder, catalog, place.settings)
    paths = [copies.local(one) for one in (old, used)]
    os.utime(paths[0], (1, 1))

    def free(_: object) -> int:  # room for two files
        return 200 - sum(path.stat().st_size for path in place.folder.rglob("*.parquet"))

    monkeypatch.setattr("sonde.store.downloads.free_bytes", free)
    assert copies.local(new).read_bytes() == b"x" * 100
    assert [path.exists() for path in paths] == [False, True], "used a moment ago"
    with pytest.raises(OSError, match="do not fit"):
        copies.local(old)
    os.utime(paths[1], (1, 1))
    with pytest.raises(OSError, match="do not fit"):
        copies.local(stored(9, LARGE))
    assert paths[1].exists(), "all together would not do"
    monkeypatch.setattr("sonde.store.downloads.free_bytes", lambda _: -1)
    assert copies.shrink_cache() == 1 and not paths[1].exists()
    assert catalog.counters()["downloads_refused"] == 3


def test_a_question_has_room_made_for_its_files(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = SharedStore(place.folder, replace(place.settings, server="a"))
    old, used, new = (place.put(number) for number in range(3))
    ends_s = time.monotonic() + PATIENCE_S
    paths = shared.paths([old, used], ends_s)
    own = place.folder / "data/lab/chunk/day=2027-01-15/hour=08/own.parquet"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"x" * 100)
    for path in (paths[0], own):
        os.utime(path, (1, 1))

    def free(_: object) -> int:  # room for three files
        return 300 - sum(path.stat().st_size for path in place.folder.rglob("*.parquet"))

    monkeypatch.setattr("sonde.store.downloads.free_bytes", free)
    (path,) = shared.paths([new], ends_s)
    assert path.read_bytes() == b"x" * 100
    assert [path.exists() for path in (*paths, own)] == [False, True, True]
    with pytest.raises(CaptureError, match="do not fit the disk"):
        shared.paths([old], ends_s)
    shared.close()


def test_refusals_are_all_counted_and_logged_once_a_minute(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    downloads = Downloads(place.folder, place.bucket, LARGE)
    is_held: list[bool] = []
    held = downloads._changed._is_owned  # type: ignore[attr-defined]
    monkeypatch.setattr(Downloads, "_free_bytes", lambda _: -1)
    monkeypatch.setattr("sonde.store.downloads.LOG.filters", [lambda _: not is_held.append(held())])
    for number in range(50):
        with pytest.raises(OSError, match="do not fit"):
            downloads.file("a", stored(number, 100))
    assert downloads.refused == {"disk": 50}
    assert is_held == [False] and len(caplog.records) == 1
