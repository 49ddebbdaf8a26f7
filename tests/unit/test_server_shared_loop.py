# SPDX-License-Identifier: Apache-2.0
"""What one tenant sends or asks holds up no other, and takes a bounded part of the memory."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from captures import chunk, scene
from sonde import interpreter
from sonde.query.chunk_metadata import MAX_VALUES, DamagedChunkError, chunk_meta
from sonde.server import agent_list, children, chunk_bodies, listen, opened
from sonde.server.answers import Answer
from sonde.server.app import Api
from sonde.server.children import BusyError, Children
from sonde.server.client import ServerClient
from sonde.server.opened import FILES_KEY, Opener
from sonde.server.service import RefusedRequestError, ServerLimits, Service
from sonde.server.tokens import Caller, Scope
from sonde.server.unsent import Unsent
from stored_chunks import with_meta

EVIL = Caller("e", "evil", frozenset(Scope))
LONG_NAME = '"' * 248


@contextmanager
def listening(folder: Path, **limits: Any) -> Iterator[tuple[Service, int]]:
    """A server with tokens, and the port where it listens."""
    most = ServerLimits(**limits)
    service = Service(folder, most, flushes=False)
    config = uvicorn.Config(
        Api(service).app(), log_config=None, lifespan="off", http=listen.protocol_with(most)
    )
    server = uvicorn.Server(config)
    taken = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]})
    thread.start()
    try:
        yield service, taken.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
        taken.close()
        service.close()


def described(**changes: Any) -> bytes:
    """A chunk's metadata."""
    meta: dict[str, Any] = dict.fromkeys(("start_ns", "end_ns", "wall_offset_ns", "raw_len"), 0)
    meta |= {"seq": 0, "tables": [], "capture": {"id": "x", "host": {}}} | changes
    return json.dumps(meta).encode()


def many(number: int, **changes: Any) -> bytes:
    """A body of chunks that differ by their metadata."""
    one = chunk({})
    return b"".join(
        with_meta(one, json.loads(described(**changes, seq=at))) for at in range(number)
    )


# What agents do


def test_a_list_of_agents_is_cut_and_names_how_many_are_left(tmp_path: Path) -> None:
    with listening(tmp_path / "store") as (service, port):
        token = service.tokens.make("evil", {Scope.READ})[1]
        caller = Caller("e", "evil", frozenset(Scope))
        for at in range(3_000):
            service.note_agent(caller, f"{at:05d}{LONG_NAME}", "collecting")
        client = ServerClient(f"http://127.0.0.1:{port}", token=token)
        names: list[str] = []
        left = -1
        while left:
            found = client.ask("agents", {"after": names[-1]} if names else {})
            assert len(json.dumps(found["agents"])) < 1.2 * agent_list.LIST_BYTES
            names += [one["node"] for one in found["agents"]]
            left = found["not_shown"]
            assert len(names) + left == 3_000
        assert names == sorted(set(names))


def test_ten_thousand_agents_of_usual_names_are_in_one_answer(tmp_path: Path) -> None:
    service = Service(tmp_path / "store", flushes=False)
    with closing(service):
        for at in range(10_000):
            service.note_agent(EVIL, f"gpu-node-{at:05d}.cluster.lab", "paused")
        found = json.loads(agent_list.listed(service.agents.of("evil"), []))
    assert len(found["agents"]) == 10_000
    assert found["not_shown"] == 0
    assert found["paused"] == []


def test_lists_of_agents_that_are_not_read_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_list, "LIST_BYTES", 8 << 20)
    with listening(tmp_path / "store", unsent_bytes=8 << 20) as (service, port):
        token = service.tokens.make("evil", {Scope.READ})[1]
        for at in range(9_000):
            service.note_agent(EVIL, f"{at:05d}{LONG_NAME}", "collecting")
        head = f"GET /v1/agents HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {token}\r\n\r\n"
        assert unread(port, head, 3) == [b"200", b"503", b"503"]


# Metadata of chunks


@pytest.mark.parametrize(
    "values",
    [
        ["[" * 13 + "]" * 13] * 2_000,
        ["{}"] * 20_000,
        ["1"] * 30_000,
        ['"\\""', '"\\\\"', *["[]"] * 20_000],
    ],
)
def test_metadata_of_too_many_values_is_refused_before_it_is_decoded(
    values: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = described(capture={"host": {}, "x": ["VALUES"]})
    raw = raw.replace(b'"VALUES"', ",".join(values).encode())
    json.loads(raw)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(json, "loads", fail)
    with pytest.raises(DamagedChunkError, match="too many values"):
        chunk_meta(raw)


def test_metadata_in_another_encoding_is_none() -> None:
    """Quotes are looked for in UTF-8: `json` takes UTF-16, too."""
    text = described(capture={"host": {}, "x": ['"', *[[]] * 20]}).decode()
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        with pytest.raises(DamagedChunkError):
            chunk_meta(text.encode(encoding))


def test_texts_in_metadata_may_have_brackets_and_commas() -> None:
    shell = 'for x in "${@}"; do a[1,2]=\\; done # ' * 900
    raw = described(capture={"id": "x", "host": {"command": shell}})
    assert raw.count(b"[") + raw.count(b",") > 1_000 < MAX_VALUES
    raw = raw.replace(b'"x"', json.dumps("[{,\\" * 3_000).encode())
    assert chunk_meta(raw)["capture"]["host"] == {"command": shell}


def test_the_metadata_of_one_request_is_bounded(tmp_path: Path) -> None:
    with closing(Service(tmp_path / "store", flushes=False)) as service:
        padded = many(30, padding="x" * 60_000)
        with pytest.raises(RefusedRequestError, match="bytes of metadata") as refused:
            service.take(EVIL, "n", padded)
        assert refused.value.status == 413
        assert refused.value.remedy == "send fewer chunks at once"
        assert len(service.take(EVIL, "n", many(16, padding="x" * 60_000))) == 16


def test_equal_metadata_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []

    def counted(raw: bytes) -> dict[str, Any]:
        decoded.append(raw)
        return chunk_meta(raw)

    monkeypatch.setattr(chunk_bodies, "chunk_meta", counted)
    with closing(Service(tmp_path / "store", flushes=False)) as service:
        taken = service.take(EVIL, "n", many(1) * 40)
    assert len(taken) == 40
    assert sum(is_new for _, is_new in taken) == 1
    assert len(decoded) == 1


def test_much_metadata_is_decoded_beside_the_loop_and_little_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    unpacked_bytes = chunk_bodies.unpacked_bytes

    def noted(*given: Any) -> int:
        threads.append(threading.current_thread().name)
        return unpacked_bytes(*given)

    monkeypatch.setattr(chunk_bodies, "unpacked_bytes", noted)
    with listening(tmp_path / "store") as (service, port):
        token = service.tokens.make("evil", {Scope.INGEST})[1]
        values = {"capture": {"id": "x", "host": {}, "x": [1] * 1_000}}
        for body in (many(1), many(64), many(1, **values), many(2, padding="x" * 5_000)):
            assert posted(port, token, body)[0] == 200
    assert ["metadata" in one for one in threads] == [False, True, True, True]


def test_others_are_acknowledged_while_metadata_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes."""
    unpacked_bytes = chunk_bodies.unpacked_bytes
    begun, go_on = threading.Event(), threading.Event()

    def slowly(chunks: Any, limits: Any) -> int:
        if len(chunks) > 1:
            begun.set()
            assert go_on.wait(30)
        return unpacked_bytes(chunks, limits)

    monkeypatch.setattr(chunk_bodies, "unpacked_bytes", slowly)
    with listening(tmp_path / "store") as (service, port):
        evil = service.tokens.make("evil", {Scope.INGEST})[1]
        good = service.tokens.make("good", {Scope.INGEST})[1]
        statuses: list[int] = []
        thread = threading.Thread(target=lambda: statuses.append(posted(port, evil, many(64))[0]))
        thread.start()
        try:
            assert begun.wait(20)
            assert posted(port, good, many(1))[0] == 200
        finally:
            go_on.set()
            thread.join(30)
    assert statuses == [200]


def posted(port: int, token: str, body: bytes) -> tuple[int, bytes]:
    """(status, answer) of a request with chunks."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        headers = {"Authorization": f"Bearer {token}", "X-Sonde-Node": "n"}
        connection.request("POST", "/v1/chunks", body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


# Children


def test_a_tenant_s_file_and_its_question_leave_a_child_to_another() -> None:
    some = Children()
    with some.place("evil", 1, is_file=True):
        with pytest.raises(BusyError), some.place("evil", 0.05):
            pass
        with pytest.raises(BusyError), some.place("other", 0.05, is_file=True):
            pass
        with some.place("good", 1):
            pass


def opened_by(opener: Opener, tenant: str, room_bytes: Callable[[], int] | None = None) -> Any:
    async def parts() -> AsyncIterator[bytes]:
        yield scene().bytes()

    return opener.open(tenant, 0, parts(), *([room_bytes] if room_bytes else []))


def test_files_are_keyed_by_tenant_unless_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[tuple[str, bool]] = []

    class Noted(Children):
        @contextmanager
        def place(self, key: str, wait_s: float, *, is_file: bool = False) -> Iterator[None]:
            keys.append((key, is_file))
            with super().place(key, wait_s, is_file=is_file):
                yield

        def output_of(self, *_: object, **__: object) -> tuple[bytes, bool]:
            return b"+{}", False

    for key in ("", FILES_KEY):
        asyncio.run(opened_by(Opener(tmp_path, Noted(), key), "lab"))
    assert keys == [("lab", True), (FILES_KEY, True)]
    with closing(Service(tmp_path / "open", open_tenant="default", flushes=False)) as service:
        assert Api(service)._opener._files_key == FILES_KEY
    with closing(Service(tmp_path / "tokens", flushes=False)) as service:
        assert Api(service)._opener._files_key == ""


def test_a_file_that_takes_long_gives_way_to_who_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "SHARED_READ_S", 0.3)
    monkeypatch.setattr(children, "AT_ONCE", 1)
    with closing(Children()) as some:
        sleeping = ["-c", "import time; time.sleep(60)"]
        monkeypatch.setattr(
            some._forked, "output_of", lambda *_, **__: None
        )  # a child that is started, of this program:
        monkeypatch.setattr(interpreter, "command", lambda *_: [sys.executable, *sleeping])

        async def beside() -> tuple[RefusedRequestError, float]:
            file = asyncio.create_task(opened_by(Opener(tmp_path, some), "evil"))
            await asyncio.sleep(1)
            assert not file.done(), "nobody else waits"
            begun_s = time.monotonic()
            await asyncio.to_thread(waits, some, "good")
            waited_s = time.monotonic() - begun_s
            with pytest.raises(RefusedRequestError) as refused:
                await file
            return refused.value, waited_s

        def waits(some: Children, tenant: str) -> None:
            with some.place(tenant, 30):
                pass

        refused, waited_s = asyncio.run(beside())
    assert waited_s < 10
    assert refused.status == 503
    assert "others wait" in refused.cause


def test_a_forked_child_gives_way(tmp_path: Path) -> None:
    """Also before it has written anything."""
    (tmp_path / "file").write_bytes(scene().bytes())
    with closing(Children()) as some, (tmp_path / "file").open("rb") as file:
        given = [str(1 << 30), "20", str(1 << 20)]
        asked: list[float] = []

        def is_over() -> bool:
            asked.append(time.monotonic())
            return len(asked) > 1

        ours, theirs = socket.socketpair()
        with ours, theirs:  # a file that never ends
            begun_s = time.monotonic()
            content, _ = some.output_of(
                "sonde.server.question_child", given, 60, 1 << 20,
                stdin=theirs.fileno(), is_over=is_over,
            )  # fmt: skip
        assert content == b""
        assert time.monotonic() - begun_s < 30
        assert len(asked) == 2
        arguments = "sonde.server.open_recording", given, 60.0, 1 << 20
        assert some.output_of(*arguments, stdin=file.fileno())[0][:1] == b"+"


# Answers that are not read


def test_a_document_larger_than_the_room_is_refused_by_the_child(tmp_path: Path) -> None:
    with closing(Children()) as some:
        opener = Opener(tmp_path, some)
        with pytest.raises(RefusedRequestError, match=r"more than 0\.0 MB") as refused:
            asyncio.run(opened_by(opener, "lab", lambda: 2_000))
        assert refused.value.status == 422
        assert "read answers" in refused.value.remedy
        assert asyncio.run(opened_by(opener, "lab", lambda: 1 << 20)).content


def test_an_answer_has_room_or_is_refused_once_it_is_made() -> None:
    refusals: list[str] = []
    unsent = Unsent(1_000, refusals.append)
    unsent.check("lab", 1_000)
    with pytest.raises(RefusedRequestError, match="more than") as refused:
        unsent.check("lab", 1_001)
    assert refused.value.status == 413
    with unsent.held("lab", 600):
        assert unsent.room_bytes("lab") == 400
        unsent.check("lab")
        unsent.check("neighbour", 1_000)
        with pytest.raises(RefusedRequestError, match="not read") as refused:
            unsent.check("lab", 401)
        assert refused.value.status == 503
    assert unsent.room_bytes("lab") == 1_000
    assert refusals == ["unread", "unread"]


def test_a_second_file_whose_answer_has_no_room_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is read there seems to be room, and the first answer is not read."""

    async def document(*_: object) -> Answer:
        return Answer(bytes(8 << 20), "application/octet-stream")

    monkeypatch.setattr(Opener, "open", document)
    with listening(tmp_path / "store", unsent_bytes=12 << 20) as (service, port):
        token = service.tokens.make("evil", {Scope.READ})[1]
        head = (
            "POST /v1/open HTTP/1.1\r\nHost: a\r\nContent-Type: application/octet-stream\r\n"
            f"Content-Length: 0\r\nAuthorization: Bearer {token}\r\n\r\n"
        )
        assert unread(port, head, 2) == [b"200", b"503"]


def unread(port: int, head: str, times: int) -> list[bytes]:
    """The statuses of requests whose answers are not read further."""
    statuses = []
    with contextlib.ExitStack() as stack:
        for _ in range(times):
            one = stack.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.settimeout(30)
            one.connect(("127.0.0.1", port))
            one.sendall(head.encode())
            statuses.append(one.recv(12)[9:])
    return statuses
