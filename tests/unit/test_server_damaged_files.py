# SPDX-License-Identifier: Apache-2.0
"""A damaged file of the store costs its own rows: others are served, and the answer reports it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from sonde.errors import CaptureError
from sonde.query.stored_session import UnreadableStoreError
from sonde.server import answers, damaged_files
from sonde.server.app import Api
from sonde.server.left_out import FILES
from sonde.server.parameters import parse
from sonde.server.selfmetrics import exposition
from sonde.server.service import ServerLimits, Service
from sonde.store.flush import Flusher
from sonde.store.record import Record, digest_of
from sonde.store.wal import Wal
from stored_chunks import as_of, recorded, rows_of

CHUNKS = recorded()
PATIENT = ServerLimits(query_s=120)


def store(service: Service, numbers: range) -> int:
    """Store chunks, a file a table for each; returns their rows of `sample`."""
    now_ns = time.time_ns()
    for seq in numbers:
        body = as_of(CHUNKS[seq], "r", seq, now_ns)
        wal = Wal(service.folder / "wal")
        wal.append(Record("lab", "n", digest_of("lab", "n", body), now_ns, body)).result(10)
        wal.close()
        Flusher(service.folder, service.catalog).flush()
    return sum(rows_of(CHUNKS[seq], "sample") for seq in numbers)


def changed(content: bytes) -> bytes:
    """All but the ends, which name it as a file of Parquet."""
    draw = random.Random(1)
    return content[:4] + draw.randbytes(len(content) - 12) + content[-8:]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut": lambda content: content[: len(content) // 2],
    "zeros at its end": lambda content: content[:-64] + bytes(64),
    "zeros": lambda content: bytes(len(content)),
    "other bytes": changed,
}


@pytest.mark.parametrize("name", ["sample", "chunk", "stack", "frame"])
@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_costs_its_own_rows(tmp_path: Path, name: str, how: str) -> None:
    service = Service(tmp_path / "store", PATIENT, open_tenant="lab", flushes=False)
    rows = store(service, range(3))
    first = service.catalog.files("lab", name)[0]
    path = service.folder / first.path
    whole = path.read_bytes()
    path.write_bytes(DAMAGE[how](whole))
    client = TestClient(Api(service).app(), base_url="http://127.0.0.1")

    def ask(question: str) -> tuple[object, str | None]:
        answer = client.get(f"/v1/{question}", params={"from": 0, "kind": "cpu"})
        assert answer.status_code == 200, answer.text
        return json.loads(answer.content), answer.headers.get(FILES)

    question = "nodes" if name == "chunk" else "flamegraph"
    for _ in range(2):
        found, left_out = ask(question)
        assert left_out == "1"
    if name == "chunk":
        assert isinstance(found, list)
        assert found[0]["chunks"] == 2
        # In whichever order the three files are listed, one chunk is missing.
        assert rows - found[0]["sample_rows"] in {rows_of(one, "sample") for one in CHUNKS[:3]}
    assert "sonde_server_damaged_files 1\n" in exposition(service, {})

    path.unlink()
    path.write_bytes(whole)
    assert ask(question)[1] is None, "once it is whole again"
    assert "sonde_server_damaged_files 0\n" in exposition(service, {})
    service.close()


def test_what_was_removed_is_not_counted_and_no_more_are_kept_than_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(damaged_files, "MAX_DAMAGED", 3)
    paths = [tmp_path / f"{number}.parquet" for number in range(5)]
    for path in paths:
        path.write_bytes(b"")
    damaged = damaged_files.DamagedFiles()
    assert (damaged.look(paths), len(damaged)) == (5, 3)
    assert damaged.among(paths) == set(paths[2:])
    paths[4].unlink()  # as compaction does
    assert len(damaged) == 2


def test_a_question_that_no_damage_explains_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(tmp_path / "store", PATIENT, open_tenant="lab", flushes=False)
    store(service, range(1))
    asked = []

    def fails(*_: object) -> None:
        asked.append(1)
        raise UnreadableStoreError("the store cannot answer this: why", "try again")

    caller = service.caller("")
    assert caller
    question = answers.Question("", fails)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="why"):
        answers.ask(service, caller, question, parse([("from", "0")]))
    assert len(asked) == 1 and len(service.damaged) == 0
    service.close()
