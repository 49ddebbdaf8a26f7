# SPDX-License-Identifier: Apache-2.0
"""`sonde serve --bucket` over the S3 protocol: kills, a bucket that is away, a second server."""

from __future__ import annotations

import io
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from object_store import BUCKET, CREDENTIALS, ObjectStore
from served import Server
from sonde.store.bucket import Bucket
from sonde.store.published import Published
from stored_chunks import as_of, recorded, rows_of

CHUNKS = recorded()


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with ObjectStore() as found:
        yield found


def body(seq: int) -> bytes:
    return as_of(CHUNKS[seq % len(CHUNKS)], "replayed", seq, time.time_ns())


def send(server: Server, bodies: list[bytes]) -> None:
    for one in bodies:
        assert server.send("one", one)[0] == 200


def published(objects: ObjectStore, prefix: str, server: str) -> Published:
    view = Published(Bucket(objects.uri(prefix)), server)
    view.refresh()
    return view


def stored(objects: ObjectStore, prefix: str, server: str) -> Counter[int]:
    """How often each chunk is in the bucket, by its number."""
    found: Counter[int] = Counter()
    for one in published(objects, prefix, server).files.values():
        if one.name == "chunk":
            at = f"{BUCKET}/{prefix}/server={server}/{one.path}"
            with objects.files.open_input_file(at) as file:
                table = pq.read_table(io.BytesIO(file.read()), columns=["seq"])
            found.update(table["seq"].to_pylist())
    return found


def wait_until(what: object, seconds: float = 40) -> None:
    ends = time.monotonic() + seconds
    while not what():  # type: ignore[operator]
        assert time.monotonic() < ends
        time.sleep(0.1)


def metric(server: Server, name: str) -> float:
    for line in server.get("/metrics")[1].decode().splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    return 0.0


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_kill_in_an_upload_and_a_bucket_that_is_away(
    objects: ObjectStore, tmp_path: Path
) -> None:
    def place(name: str) -> Server:
        flags = ("--open", "--bucket", objects.uri("lab"), "--server-name", name)
        return Server(tmp_path / name, *flags)

    bodies = [body(seq) for seq in range(30)]
    one = place("one")
    one.start()
    send(one, bodies[:10])
    wait_until(lambda: len(stored(objects, "lab", "one")) == 10)

    # Killed with an upload on its way, and the flusher with it.
    objects.hold()
    send(one, bodies[10:20])
    assert objects.held.wait(40)
    assert one.process
    flushers = children(one.process.pid)
    one.kill()
    for pid in flushers:
        os.kill(pid, signal.SIGKILL)
    objects.let_pass()

    # The bucket is away when it comes back: chunks are taken, and asked for is what was there.
    objects.stop()
    one.start()
    send(one, bodies[18:30])
    wait_until(lambda: metric(one, "sonde_server_bucket_refuses") == 1)
    assert one.get("/readyz")[0] == 200
    assert metric(one, "sonde_server_log_waiting_bytes") > 0
    assert sum(node["chunks"] for node in one.ask("nodes", **{"from": 0})) == 10

    objects.start()
    every = Counter(dict.fromkeys(range(30), 1))
    wait_until(lambda: stored(objects, "lab", "one") == every)
    listed = {name for name in objects.names("lab/server=one/data") if name.endswith(".parquet")}
    files = published(objects, "lab", "one").files
    wait_until(lambda: metric(one, "sonde_server_bucket_refuses") == 0)
    assert {f"data/{name}" for name in listed} >= set(files)

    # A second server, and a first one whose disk is gone, have all of it from the bucket.
    two = place("two")
    with two:
        send(two, [body(100)])
        answers = [two.wait_for(31)]
        answers.append(one.wait_for(31))
        one.stop()
        (tmp_path / "one").rename(tmp_path / "lost")
        one.start()
        send(one, bodies[25:30])  # what it has already
        answers.append(one.wait_for(31))
        wait_until(lambda: metric(one, "sonde_store_files_adopted_total") > 0)
        expected = 0.0
        for server in (one, two):
            totals = server.ask("totals", **{"from": 0, "kind": "cpu"})
            expected = expected or totals["rows"]
            assert totals["rows"] == expected > 0
        one.stop()
    assert [sum(node["chunks"] for node in nodes) for nodes in answers] == [31, 31, 31]
    assert stored(objects, "lab", "one") == every
    samples = sum(rows_of(one, "sample") for one in [*bodies, body(100)])
    rows = [
        one.row_count
        for name in ("one", "two")
        for one in published(objects, "lab", name).files.values()
        if one.name == "sample"
    ]
    assert sum(rows) == samples
    log = (tmp_path / "serve.log").read_text()
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in log
    assert CREDENTIALS["AWS_ACCESS_KEY_ID"] not in log
