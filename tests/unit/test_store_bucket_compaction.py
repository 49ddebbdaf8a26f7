# SPDX-License-Identifier: Apache-2.0
"""Two servers share a bucket, without leases: each compacts what it has written, and nobody else
does. One that is killed while it does so costs nothing, doubles nothing and holds nobody up."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from test_store_bucket import LARGE, Place, record

from sonde.store.bucket import Bucket
from sonde.store.compaction import COMPACTED_FROM, compact
from sonde.store.published import Published
from sonde.store.readable_files import in_bucket
from sonde.store.wal import Wal
from stored_chunks import rows_of

EACH = COMPACTED_FROM + 1
KILLED = """
import os, sys
from pathlib import Path
from sonde.store import bucket, catalog, compaction, published, storage
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
elif step == "replace": catalog.Catalog.replace = die
elif step == "publish": bucket.Bucket.put = die
elif step == "published":
    whole = published.Publisher.publish
    published.Publisher.publish = lambda self, files: (whole(self, files), die())
compaction.compact(folder, kept, here)
"""


def flush_singly(place: Place, numbers: range) -> None:
    """A file a table for each chunk."""
    for seq in numbers:
        wal = Wal(place.folder / "wal")
        wal.append(record(seq)).result(10)
        wal.close()
        place.flush()


def read(uri: str) -> tuple[Counter[int], int]:
    """(how often each chunk is in the bucket, rows of `sample`), as any reader sees it."""
    found = in_bucket(uri, "lab", 0, LARGE << 24)
    paths = {name: [one.removeprefix("file://") for one in some] for name, some in found.items()}
    chunks = Counter(
        seq
        for path in paths["chunk"]
        for seq in pq.read_table(path, columns=["seq"])["seq"].to_pylist()
    )
    return chunks, sum(pq.read_metadata(path).num_rows for path in paths["sample"])


@pytest.mark.parametrize(
    ("step", "at"),
    [("upload", 0), ("upload", 4), ("replace", 0), ("publish", 0), ("published", 0)],
)
def test_a_server_killed_in_compaction_costs_nothing_and_holds_nobody_up(
    tmp_path: Path, step: str, at: int
) -> None:
    bucket = tmp_path / "bucket"
    first, second = (Place(tmp_path / name, bucket, name) for name in ("a", "b"))
    flush_singly(first, range(EACH))
    flush_singly(second, range(EACH, 2 * EACH))
    numbers = range(2 * EACH)
    expected = (
        Counter(dict.fromkeys(numbers, 1)),
        sum(rows_of(record(seq).body, "sample") for seq in numbers),
    )
    uri = first.settings.uri
    assert read(uri) == expected

    arguments = [step, str(at), str(first.folder), uri]
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False)
    assert killed.returncode == -9
    assert read(uri) == expected

    assert compact(second.folder, second.catalog, second.storage).gone >= EACH
    assert read(uri) == expected

    again = Place(first.folder, bucket, "a")
    again.storage.join()
    compact(again.folder, again.catalog, again.storage)
    assert read(uri) == expected
    assert len([one for one in again.catalog.files() if one.name == "sample"]) == 1
    for server in ("a", "b"):
        view = Published(Bucket(uri), server)
        view.refresh()
        there = {
            str(path.relative_to(bucket / f"server={server}"))
            for path in (bucket / f"server={server}").rglob("*.parquet")
        }
        kept = set((again if server == "a" else second).catalog.removed(1 << 62))
        assert there - kept == set(view.files), "nothing is left that nobody lists"
