# SPDX-License-Identifier: Apache-2.0
"""Samples and waits of traced requests, of real servers that know nothing of the recorder; callers
are instrumented with OpenTelemetry's SDK."""

from __future__ import annotations

import http.client
import json
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.propagate import inject
from opentelemetry.sdk.trace import TracerProvider

from conftest import Record, Recorder
from served import Server
from sonde.query.capture import Capture
from sonde.server.upload import upload

PROGRAMS = Path(__file__).parents[1] / "programs"
TRACER = TracerProvider().get_tracer("test")
pytestmark = [pytest.mark.bpf]


@contextmanager
def served(program: str) -> Iterator[tuple[int, int]]:
    """(pid, port) of a server."""
    process = subprocess.Popen(
        [sys.executable, str(PROGRAMS / program)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    try:
        yield process.pid, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def call(port: int, path: str, headers: dict[str, str] | None = None) -> tuple[str, str, str]:
    """Ask as OpenTelemetry's instrumentation of a client does: (trace id, span id, answer)."""
    with TRACER.start_as_current_span("call", kind=trace.SpanKind.CLIENT) as span:
        if headers is None:
            headers = {}
            inject(headers)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", path, headers=headers)
        body = connection.getresponse().read().decode()
        connection.close()
        context = span.get_span_context()
        return f"{context.trace_id:032x}", f"{context.span_id:016x}", body


def sums(recorder: Recorder, trace_id: str) -> dict[str, float]:
    """Seconds of a trace by kind."""
    rows = recorder.rows(
        "SELECT kind, sum(weight_ns) FROM traced WHERE trace_id = ? GROUP BY kind", trace_id
    )
    return {kind: ns / 1e9 for kind, ns in rows}


def functions(capture: Capture, trace_id: str) -> set[str]:
    """Of the on-CPU samples of a trace."""
    traced, stack, frame = (capture.tables[name] for name in ("traced", "stack", "frame"))
    stacks = {
        row["stack_id"]
        for row in traced.to_pylist()
        if row["trace_id"] == trace_id and row["kind"] == "cpu"
    }
    frames = {
        one for row in stack.to_pylist() if row["stack_id"] in stacks for one in row["frame_ids"]
    }
    return {row["function"] for row in frame.to_pylist() if row["frame_id"] in frames}


def test_a_slow_request_has_its_own_samples_and_waits(record: Record) -> None:
    with (
        served("traced_server.py") as (pid, port),
        record("-p", str(pid), "-F", "199", "--traces") as recorder,
    ):
        plain = call(port, "/spin/0.5", {})  # no header
        spun = call(port, "/spin/1.5")
        slept = call(port, "/sleep/1.5")
        after = call(port, "/after")
        time.sleep(1)  # it computes on, behind its answer
        call(port, "/quick")
    found = sums(recorder, spun[0])
    every = recorder.rows("SELECT count(DISTINCT trace_id) FROM traced")[0][0]
    assert spun[2] == spun[0] and slept[2] == slept[0]  # the server's own span is of this trace
    assert found["cpu"] == pytest.approx(1.5, rel=0.2)
    assert not sums(recorder, slept[0]).get("cpu", 0.0) > 0.3
    assert sums(recorder, after[0]).get("cpu", 0.0) < 0.1  # of the 0.5 s behind its answer
    assert every <= 4 and not sums(recorder, plain[0])
    (span_ids,) = recorder.rows(
        "SELECT list(DISTINCT span_id) FROM traced WHERE trace_id = ?", spun[0]
    )
    assert span_ids == ([spun[1]],)  # the caller's span, the parent of the server's
    assert "spin_for_request" in functions(recorder.capture, spun[0])
    # `traced` repeats what `sample` has, and takes nothing from it.
    whole = recorder.rows("SELECT sum(weight_ns) / 1e9 FROM sample WHERE kind = 'cpu'")[0][0]
    assert whole == pytest.approx(found["cpu"] + 1.0, abs=0.4)  # no header, and behind an answer


def test_a_trace_opens_its_flame_graph_at_a_server(record: Record, tmp_path: Path) -> None:
    with (
        served("traced_server.py") as (pid, port),
        record("-p", str(pid), "-F", "199", "--traces") as recorder,
    ):
        call(port, "/spin/0.5")
        trace_id, _, _ = call(port, "/spin/1")
        call(port, "/sleep/0.3")
    expected = sums(recorder, trace_id)
    (tmp_path / "store").mkdir(mode=0o700)
    with Server(tmp_path / "store") as server:
        upload(recorder.path, f"http://127.0.0.1:{server.port}", "n")
        server.wait_for(1)
        chosen = {"trace": trace_id, "from": 0}
        tree = server.ask("flametree", **chosen)
        every = server.ask("flametree", **{"from": 0})
        listed = server.ask("traces", **{"from": 0})
        top = server.ask("top", **chosen)
        refused = server.get("/v1/charts", **chosen), server.get("/v1/top", trace="x")
        nobody = server.ask("totals", **{"trace": "ab" * 16, "from": 0})
    assert tree["total"] == pytest.approx(expected["cpu"] * 1e9)
    assert tree["total"] < every["total"]
    assert "spin_for_request" in json.dumps(tree["root"])
    assert listed[0]["trace_id"] == trace_id
    assert listed[0]["cpu_ns"] == pytest.approx(expected["cpu"] * 1e9)
    assert sum(row["own_ns"] for row in top) == pytest.approx(tree["total"])
    assert all(row["function"] for row in top)
    assert [status for status, _ in refused] == [400, 400] and nobody["n"] == 0


def test_an_event_loop_counts_for_no_request(record: Record) -> None:
    with (
        served("traced_loop.py") as (pid, port),
        record("-p", str(pid), "-F", "199", "--traces") as recorder,
    ):
        alone = call(port, "/")
        threads = [threading.Thread(target=call, args=(port, "/")) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        again = call(port, "/")
    for one in (alone, again):
        assert sums(recorder, one[0])["cpu"] == pytest.approx(0.4, rel=0.4)
    mixed = recorder.rows(
        "SELECT coalesce(sum(weight_ns), 0) / 1e9 FROM traced WHERE kind = 'cpu'"
        " AND trace_id NOT IN (?, ?)",
        alone[0],
        again[0],
    )[0][0]
    assert mixed < 0.6  # of 2.4 s: the first of the six, until the second came, and the last
    assert recorder.losses()["traces.several_requests"] >= 1


def test_waits_of_requests_are_those_of_their_thread(record: Record) -> None:
    with (
        served("traced_server.py") as (pid, port),
        record("-p", str(pid), "-F", "19", "--traces") as recorder,
    ):
        asked = [call(port, "/sleep/0.1")[0] for _ in range(20)]
    found = [sums(recorder, one).get("blocked", 0.0) for one in asked]
    assert sum(found) > 0  # which waits have a stack is drawn where the machine has many
    # None is of another thread, or of another time than that of the requests.
    strange = recorder.rows(
        "SELECT count(*) FROM traced t LEFT JOIN sample s ON t.tid = s.tid AND t.stack = s.stack"
        " AND t.kind = s.kind WHERE s.tid IS NULL"
    )
    assert strange == [(0,)]
    traced_ns, sampled_ns = (
        recorder.rows(f"SELECT sum(weight_ns) FROM {table} WHERE kind = 'blocked'")[0][0]
        for table in ("traced", "sample")
    )
    assert traced_ns <= sampled_ns


def test_headers_that_are_no_trace_count_for_none(record: Record) -> None:
    with (
        served("traced_server.py") as (pid, port),
        record("-p", str(pid), "-F", "199", "--traces") as recorder,
    ):
        number, span = secrets.token_hex(16), secrets.token_hex(8)
        for value in (
            f"00-{'0' * 32}-{span}-01",
            f"00-{number}-{'0' * 16}-01",
            f"ff-{number}-{span}-01",
            f"00-{number.upper()}Z-{span}-01",
            f"00-{number}-{span}",
            "00-" + "é" * 20,
            "",
        ):
            call(port, "/spin/0.2", {"traceparent": value.encode("utf-8").decode("latin-1")})
        padding = {f"X-{at}": "x" * 200 for at in range(25)}
        call(port, "/spin/0.2", padding | {"traceparent": f"00-{number}-{span}-01"})  # too far
        assert recorder.process.poll() is None
        late = call(
            port, "/spin/0.5", {"X-Long": "y" * 2000, "TraceParent": f"00-{number}-{span}-00"}
        )
    assert {row[0] for row in recorder.rows("SELECT DISTINCT trace_id FROM traced")} == {number}
    assert sums(recorder, number)["cpu"] == pytest.approx(0.5, rel=0.4), late


def test_without_the_option_nothing_is_followed(record: Record) -> None:
    with (
        served("traced_server.py") as (pid, port),
        record("-p", str(pid), "-F", "199") as recorder,
    ):
        call(port, "/spin/0.3")
    assert recorder.rows("SELECT count(*) FROM traced")[0][0] == 0


FLOOD = """
import resource, socket, sys, threading, time
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
threading.stack_size(65536)
requests, nappers = int(sys.argv[1]), int(sys.argv[2])
server = socket.create_server(("127.0.0.1", 0), backlog=64)
held = []
def nap(peer):
    peer.recv(256)
    while True: time.sleep(0.002)
for at in range(nappers + requests):
    client = socket.create_connection(server.getsockname())
    peer, _ = server.accept()
    held += [client, peer]
    if at < nappers:
        parent = f"traceparent: 00-{at + 1:032x}-00f067aa0ba902b7-01"
        client.sendall(f"GET / HTTP/1.1\\r\\n{parent}\\r\\n\\r\\n".encode())
        threading.Thread(target=nap, args=(peer,), daemon=True).start()
    else:
        client.sendall(b"GET / HT")
        peer.recv(64)
print("ready", flush=True)
sys.stdin.readline()
"""
FLOODER = 48_125
"""A user without other processes."""
MOST_REQUESTS, MOST_ROWS = 2_048, 512
"""Of a user in bpf/traces.bpf.c, and in bpf/trace_context.h in 1.07 s; a wait has two rows."""


def test_a_user_has_a_part_of_the_requests_and_of_their_samples(record: Record) -> None:
    with (
        served("traced_server.py") as (pid, port),
        record("-F", "199", "--traces") as recorder,
        subprocess.Popen(
            ["/usr/bin/python3", "-I", "-c", FLOOD, "2200", "150"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", user=FLOODER, group=FLOODER,
            extra_groups=[],
        ) as flood,
    ):  # fmt: skip
        try:
            assert flood.stdout and flood.stdout.readline()
            spun = call(port, "/spin/1.5")
        finally:
            flood.kill()
    losses = recorder.losses()
    assert losses["traces.traced"] >= 2200 + 150 - MOST_REQUESTS
    assert losses["waits.traced"] > 0
    of_flood = recorder.rows("SELECT count(*) FROM traced WHERE pid = ?", flood.pid)[0][0]
    assert 0 < of_flood <= 2 * MOST_ROWS * (recorder.info.duration_ns / 1.07e9 + 1)
    assert sums(recorder, spun[0])["cpu"] > 0.3
    assert pid


PASSING = """
import socket, sys, threading
threading.stack_size(65536)
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
peer, _ = server.accept()
def answer():
    peer.recv(256)
    peer.sendall(b"x")
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(sys.argv[1])):
    client.sendall(b"GET / HTTP/1.1")
    thread = threading.Thread(target=answer)
    thread.start()
    thread.join()
    client.recv(1)
print("done", flush=True)
sys.stdin.readline()
"""
"""A thread for each of many requests, one after the other."""
THREADS = 20_000
"""More than twice as many as are followed at a time."""


@contextmanager
def flooder(source: str, *arguments: int) -> Iterator[subprocess.Popen[str]]:
    """A user's program, once it has printed a line."""
    process = subprocess.Popen(
        ["/usr/bin/python3", "-I", "-c", source, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
        user=FLOODER, group=FLOODER, extra_groups=[],
    )  # fmt: skip
    try:
        assert process.stdout and process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def test_threads_that_had_requests_take_nobody_elses(record: Record) -> None:
    with (
        served("traced_server.py") as (pid, port),
        flooder(PASSING, THREADS) as passing,
        # A thread that is looked at while it waits would be the last that loses its request.
        record("-F", "199", "--traces", tick_s=60, chunk_s=60) as recorder,
    ):
        asked: list[tuple[str, str, str]] = []
        held = threading.Thread(target=lambda: asked.append(call(port, "/held")))
        held.start()
        time.sleep(1)
        assert passing.stdin and passing.stdout
        passing.stdin.write("\n")
        passing.stdin.flush()
        assert passing.stdout.readline()
        call(port, "/go")
        held.join()
    assert pid
    assert sums(recorder, asked[0][0])["cpu"] == pytest.approx(1, rel=0.3)
    assert "traces.traced" not in recorder.losses()


def test_requests_of_a_program_that_ended_leave_their_room(record: Record) -> None:
    with record("-F", "199", "--traces") as recorder:
        with flooder(FLOOD, 2200, 0):
            pass
        with flooder(FLOOD, 0, 20) as later:
            time.sleep(1)
    traced = recorder.rows("SELECT count(DISTINCT tid) FROM traced WHERE pid = ?", later.pid)
    assert recorder.losses()["traces.traced"] < 2200
    assert traced[0][0] >= 10


def test_each_request_of_a_connection_has_its_own(record: Record) -> None:
    with (
        served("traced_server.py") as (pid, port),
        record("-p", str(pid), "-F", "199", "--traces") as recorder,
    ):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        traces = [secrets.token_hex(16) for _ in range(3)]
        for trace_id in traces:
            parent = f"00-{trace_id}-{secrets.token_hex(8)}-01"
            connection.request("GET", "/spin/0.5", headers={"traceparent": parent})
            connection.getresponse().read()
        connection.close()
    for trace_id in traces:
        assert sums(recorder, trace_id)["cpu"] == pytest.approx(0.5, rel=0.4)
    assert "traces.several_requests" not in recorder.losses()
