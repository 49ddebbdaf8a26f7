# SPDX-License-Identifier: Apache-2.0
"""Chunks on their way to a server that fails, refuses, vanishes, or is slow."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sonde.errors import SinkError, UsageError
from sonde.server.service import ServerLimits
from sonde.sinks import server as sending
from sonde.sinks.server import ServerSink, backoff_s, quiet_s
from sonde.sinks.spool import Spool


class Stub:
    """A server that answers as it is set to, and keeps what it took."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.tokens: list[str] = []
        self.status: Callable[[bytes], int] = lambda _body: 200
        self.retry_after = ""
        self.answer = b"{}"
        self.asked = 0
        self.states: list[str] = []
        """What agents reported they do when they asked."""
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                stub.tokens.append(self.headers.get("Authorization", ""))
                status = stub.status(body)
                if status == 200:
                    stub.taken.append(body)
                self._send(status)

            def do_GET(self) -> None:
                stub.asked += 1
                stub.states.append(self.headers["X-Sonde-State"])
                stub.tokens.append(self.headers.get("Authorization", ""))
                self._send(401 if stub.tokens[-1] == "Bearer old" else 200)

            def _send(self, status: int) -> None:
                answer = stub.answer
                self.send_response(status)
                if stub.retry_after:
                    self.send_header("Retry-After", stub.retry_after)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = Stub()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(sending, "MAX_WAIT_S", 0.05)


def until(done: Callable[[], bool]) -> None:
    ends = time.monotonic() + 10
    while not done():
        assert time.monotonic() < ends
        time.sleep(0.005)


def test_chunks_arrive_in_order_and_leave_the_spool(stub: Stub, tmp_path: Path) -> None:
    sink = ServerSink(stub.url, "one", Spool(tmp_path / "spool"))
    for number in range(10):
        sink.write(b"<%d>" % number)
    sink.close()

    assert b"".join(stub.taken) == b"".join(b"<%d>" % number for number in range(10))
    assert not list((tmp_path / "spool").glob("*.chunk"))
    assert sink.metrics()["sonde.agent.chunks_sent"] == 10


def test_a_server_that_fails_gets_everything_later(stub: Stub, tmp_path: Path) -> None:
    stub.status = lambda _body: 503
    sink = ServerSink(stub.url, "one", Spool(tmp_path / "spool"))
    for number in range(5):
        sink.write(b"<%d>" % number)
    until(lambda: sink.failures > 3)
    assert len(list((tmp_path / "spool").glob("*.chunk"))) == 5
    stub.status = lambda _body: 200
    until(lambda: sink.sent == 5)
    sink.close()

    assert b"".join(stub.taken) == b"<0><1><2><3><4>"


def test_a_busy_server_is_left_alone_as_long_as_it_asks(stub: Stub, tmp_path: Path) -> None:
    stub.status, stub.retry_after = lambda _body: 429, "1"
    started_s = time.monotonic()
    sink = ServerSink(stub.url, "one", Spool(tmp_path / "spool"))
    sink.write(b"chunk")
    until(lambda: sink.failures == 1)
    stub.status = lambda _body: 200
    until(lambda: sink.sent == 1)
    took_s = time.monotonic() - started_s
    sink.close()

    assert took_s >= 1
    assert sink.failures == 1


def test_an_operator_pauses_collection_and_resumes_it(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "SWITCH_S", 0.02)
    stub.answer = b'{"collect": false}'
    switched: list[bool] = []
    sink = ServerSink(stub.url, "one", Spool(tmp_path / "spool"))
    sink.on_switch(switched.append)
    sink.write(b"chunk")
    until(lambda: stub.asked > 3)
    assert switched == [False]
    for nonsense in (b"", b"[" * 60_000, b"null", b"\xff"):
        stub.answer = nonsense
        asked = stub.asked
        until(lambda asked=asked: stub.asked > asked)
    stub.answer = b'{"collect": true}'
    until(lambda: sink.collects)
    asked = stub.asked
    sink.close()

    assert switched == [False, True]
    assert stub.asked == asked


def test_an_order_reaches_an_agent_that_a_busy_server_keeps_away(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "SWITCH_S", 0.02)
    switched: list[bool] = []
    stub.status, stub.retry_after = lambda _body: 503, "300"
    sink = ServerSink(stub.url, "one", Spool(tmp_path / "spool"))
    sink.on_switch(switched.append)
    sink.write(b"chunk")
    until(lambda: sink.failures == 1)
    sink.write(b"another")  # what is new does not come sooner
    stub.answer = b'{"collect": false}'
    until(lambda: switched == [False])
    until(lambda: stub.states[-1] == "paused")  # it lives
    assert sink.metrics()["sonde.agent.paused"] == 1
    stub.answer = b'{"collect": true}'
    until(lambda: switched == [False, True])
    sink.close()

    assert stub.states[0] == "collecting"
    assert sink.failures == 1
    assert len(list((tmp_path / "spool").glob("*.chunk"))) == 2


def test_agents_that_were_refused_together_do_not_come_back_together() -> None:
    waits = {round(quiet_s(10), 3) for _ in range(200)}

    assert 10 <= min(waits) < max(waits) <= 15
    assert len(waits) > 100


def test_a_paused_agent_reads_an_exchanged_token_again(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "SWITCH_S", 0.02)
    token = tmp_path / "token"
    token.write_text("old\n")
    sink = ServerSink(stub.url, "one", Spool(tmp_path / "spool"), token)
    until(lambda: stub.asked > 1)
    token.write_text("new\n")
    until(lambda: "Bearer new" in stub.tokens)
    sink.close()


def test_another_token_and_bound_are_taken_without_a_restart(stub: Stub, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("one\n")
    second.write_text("two\n")
    spool = Spool(tmp_path / "spool")
    sink = ServerSink(stub.url, "one", spool, first)
    with pytest.raises(SinkError, match="cannot be read"):
        sink.reconfigure(tmp_path / "none", 1 << 20)
    sink.reconfigure(second, 1 << 20)
    sink.write(b"chunk")
    until(lambda: sink.sent == 1)
    sink.close()

    assert stub.tokens[-1] == "Bearer two"
    assert spool.most_bytes == 1 << 20


def test_what_waits_is_sent_after_a_restart(stub: Stub, tmp_path: Path) -> None:
    sink = ServerSink("http://127.0.0.1:9", "one", Spool(tmp_path / "spool"))
    sink.write(b"before")
    sink.close()
    again = ServerSink(stub.url, "one", Spool(tmp_path / "spool"))
    until(lambda: again.sent == 1)
    again.close()

    assert stub.taken == [b"before"]


def test_one_refused_chunk_does_not_hold_up_the_others(stub: Stub, tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    for content in (b"good", b"BAD", b"fine"):
        spool.add(content)
    stub.status = lambda body: 400 if b"BAD" in body else 200
    sink = ServerSink(stub.url, "one", spool)
    until(lambda: sink.sent == 2)
    sink.close()

    assert stub.taken == [b"good", b"fine"]
    assert sink.losses() == {"server.chunks_dropped": 0, "server.chunks_refused": 1}


def test_a_chunk_that_no_server_takes_does_not_hold_up_the_others(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent of before may have left one in its spool. Its request ends without an answer."""
    monkeypatch.setattr(sending, "MAX_CHUNK_BYTES", 1_000)
    spool = Spool(tmp_path / "spool")
    for content in (bytes(2_000), b"good", b"fine"):
        spool.add(content)
    sink = ServerSink(stub.url, "one", spool)
    until(lambda: sink.sent == 2)
    sink.close()

    assert stub.taken == [b"goodfine"] or stub.taken == [b"good", b"fine"]
    assert sink.losses() == {"server.chunks_dropped": 0, "server.chunks_refused": 1}


def test_what_is_not_sent_is_what_a_server_does_not_take() -> None:
    assert ServerLimits().body_bytes == sending.MAX_CHUNK_BYTES


def test_a_slow_server_never_delays_who_observes(stub: Stub, tmp_path: Path) -> None:
    gate = threading.Event()

    def slow(_body: bytes) -> int:
        gate.wait(10)
        return 200

    stub.status = slow
    sink = ServerSink(stub.url, "one", Spool(tmp_path / "spool"))
    longest = 0.0
    for _ in range(200):
        started = time.monotonic()
        sink.write(bytes(10_000))
        longest = max(longest, time.monotonic() - started)
    dropped = sink.losses()["server.chunks_dropped"]
    gate.set()
    until(lambda: sink.sent + dropped == 200)
    sink.close()

    assert longest < 0.5
    assert dropped == 200 - sink.sent


def test_a_token_that_was_exchanged_is_read_again(stub: Stub, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old\n")
    stub.status = lambda _body: 200 if stub.tokens[-1] == "Bearer new" else 401
    sink = ServerSink(stub.url, "one", Spool(tmp_path / "spool"), token)
    sink.write(b"chunk")
    until(lambda: sink.failures > 0)
    token.write_text("new\n")
    until(lambda: sink.sent == 1)
    sink.close()

    assert stub.taken == [b"chunk"]


def test_a_token_does_not_cross_the_network_in_the_clear(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    with pytest.raises(UsageError, match="in the clear"):
        ServerSink("http://192.0.2.1:1", "one", Spool(tmp_path / "a"), token)
    with pytest.raises(UsageError, match="in the clear"):
        ServerSink("http://127.example.org:1", "one", Spool(tmp_path / "e"), token)
    with pytest.raises(SinkError, match="cannot be read"):
        ServerSink("http://127.0.0.1:1", "one", Spool(tmp_path / "b"), tmp_path / "none")
    with pytest.raises(UsageError, match="no server's URL"):
        ServerSink("ftp://x", "one", Spool(tmp_path / "c"))
    with pytest.raises(UsageError, match="--node"):
        ServerSink("http://127.0.0.1:1", "a\nb", Spool(tmp_path / "d"))


def test_waits_grow_and_are_spread() -> None:
    most = [backoff_s(attempt, lambda _low, high: high) for attempt in range(1, 12)]

    assert most == sorted(most)
    assert most[-1] == sending.MAX_WAIT_S
    assert all(backoff_s(3) <= most[2] for _ in range(100))


def test_the_agent_loads_nothing_of_the_server() -> None:
    program = (
        "import sys, sonde.agent, sonde.sinks.server, sonde.http_client\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules}"
        " & {'starlette', 'uvicorn', 'numpy', 'pyarrow', 'duckdb', 'cryptography'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
