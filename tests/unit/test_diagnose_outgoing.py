# SPDX-License-Identifier: Apache-2.0
"""Incidents that go out: their forms, what a hostile endpoint can do, and what a server stores."""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec
import pytest

from served import Server
from sonde.cli.incident_exporters import IncidentExporters, add_arguments, row_of
from sonde.diagnose.incident import Candidate, FaultCause, Incident, Offender, Verdict
from sonde.diagnose.outgoing import alerts, document, otlp_log
from sonde.errors import UsageError
from sonde.http_client import Response
from sonde.notify.poster import MAX_BYTES, MAX_QUEUED, Poster
from sonde.notify.texts import MAX_TEXT, encoded
from sonde.query.capture import read
from sonde.sinks.capture import HEADER
from sonde.sinks.incidents import chunk_of

WALL_NS = 1_700_000_000 * 10**9
PATIENCE_S = 20.0


def incident(name="train.py", evidence=("ready: 0.5 s more of each second",)) -> Incident:
    who = Offender(7, "burner", "job 9", "its CPU time rose by 0.9 CPUs", 0.8)
    first = Candidate(FaultCause.CPU_CONTENTION, 0.9, evidence, (), who, "Give it separate CPUs.")
    verdict = Verdict((first,), 1.9, {"ready": 0.5})
    times = (10**9, 2 * 10**9, 3 * 10**9)
    return Incident(5, name, "job 8", *times, ("ready",), verdict)


@contextmanager
def endpoint(*statuses: int, location: str = "") -> Iterator[tuple[str, list]]:
    """An HTTP server that answers so, the last answer again and again; what it got."""
    got: list = []
    answers = list(statuses)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.path, json.loads(body)))
            self.send_response(answers.pop(0) if len(answers) > 1 else answers[0])
            if location:
                self.send_header("Location", location)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", got
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def until(condition) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.01)
    assert condition()


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_an_incident_goes_to_each_url_in_its_form():
    with endpoint(200) as (url, got):
        exporters = IncidentExporters(
            arguments("--webhook", f"{url}/hook", "--alertmanager", url, "--otlp", url)
        )
        exporters.take(incident())
        until(lambda: len(got) == 3)
        exporters.close()
        assert not any(exporters.losses.values())
    bodies = dict(got)
    assert bodies["/hook"]["cause"] == "cpu-contention"
    assert bodies["/hook"]["candidates"][0]["offender"]["pid"] == 7
    (alert,) = bodies["/api/v2/alerts"]
    assert alert["labels"]["alertname"] == "SondeIncident"
    assert alert["startsAt"] < alert["endsAt"]
    (record,) = bodies["/v1/logs"]["resourceLogs"][0]["scopeLogs"][0]["logRecords"]
    assert record["severityNumber"] == 13
    assert record["body"]["stringValue"] == "train.py (5) is slower: cpu-contention, by burner (7)"


def test_nothing_goes_out_unless_asked_for(monkeypatch):
    from sonde import http_client

    monkeypatch.setattr(http_client, "request", lambda *_, **__: pytest.fail("went out"))
    exporters = IncidentExporters(arguments())
    exporters.take(incident())
    exporters.close()


def test_what_others_chose_is_printable_and_bounded():
    hostile = incident("\x1b[31m\ud800" + "x" * 10**5, tuple("y" * 10**4 for _ in range(1000)))
    huge = msgspec.structs.replace(hostile, began_ns=1 << 200, explained_ns=-5)
    for one in (hostile, huge):
        for body in (document(one, "h", WALL_NS), alerts(one, "h", WALL_NS)):
            raw = encoded(body)
            assert len(raw) < MAX_BYTES
            json.loads(raw)
        otlp = json.loads(encoded(otlp_log(one, "h", WALL_NS, {})))
        (record,) = otlp["resourceLogs"][0]["scopeLogs"][0]["logRecords"]
        texts = [it["value"].get("stringValue", "") for it in record["attributes"]]
        assert max(map(len, texts)) <= MAX_TEXT
        assert all(text.isprintable() for text in texts)


def test_a_server_that_is_busy_is_asked_again_and_one_that_refuses_is_not():
    with endpoint(503, 200) as (url, got):
        poster = Poster(url)
        poster.post(b"{}")
        until(lambda: poster.posted == 1)
        poster.close()
        assert (len(got), poster.left_out) == (2, 0)
    logged: list[str] = []
    with endpoint(403) as (url, got):
        poster = Poster(f"{url}/services/T0/secret-path?key=secret-key", log=logged.append)
        poster.post(b"{}")
        until(lambda: poster.left_out == 1)
        poster.post(b"{}")
        until(lambda: poster.left_out == 2)
        poster.close()
    assert len(got) == 2
    # Of failures in a row the first one, without the secrets of a webhook's path and query.
    assert logged == [f"{url} does not take what is posted: HTTP status 403"]


def test_a_redirect_leads_nowhere():
    with endpoint(200) as (elsewhere, taken), endpoint(307, location=elsewhere) as (url, got):
        poster = Poster(url)
        poster.post(b"{}")
        until(lambda: poster.left_out == 1)
        poster.close()
    assert (len(got), taken) == (1, [])


def test_who_posts_never_waits_and_what_found_no_room_is_counted(monkeypatch):
    waits = threading.Event()
    answer = Response(200, b"")
    slow = lambda *_, **__: waits.wait(PATIENCE_S) and answer  # noqa: E731
    monkeypatch.setattr("sonde.http_client.request", slow)
    monkeypatch.setattr("sonde.notify.poster.CLOSE_S", 0.01)
    poster = Poster("http://127.0.0.1:9")
    began_s = time.monotonic()
    for _ in range(MAX_QUEUED + 10):
        poster.post(b"{}")
    poster.post(b" " * (MAX_BYTES + 1))
    assert time.monotonic() - began_s < PATIENCE_S / 2
    poster.close()
    waits.set()
    assert poster.left_out >= MAX_QUEUED + 9


@pytest.mark.parametrize(
    "url",
    ["ftp://x", "http://user:secret@x/", "http://", "nonsense", "https://x/secret\u2028",
     "hooks.example/services/secret", "https:/hooks.example/secret", "https://u:se/secret@x/",
     "https://x\\secret", "https://x/secret path"],
)  # fmt: skip
def test_what_is_no_url_is_refused_without_showing_secrets(url):
    with pytest.raises(UsageError) as caught:
        Poster(url)
    assert "secret" not in str(caught.value)


def test_an_incident_is_a_chunk_that_a_server_takes(tmp_path):
    """A real server, which knows nothing of incidents."""
    row = row_of(incident(), "host", WALL_NS)
    raw = chunk_of(row, 10**9, 3 * 10**9, WALL_NS, "0" * 32, 0)
    with Server(tmp_path / "store") as server:
        status, answer = server.send("node-1", raw)
        assert status == 200, answer
        (node,) = server.wait_for(1)
    assert node["chunks"] == 1
    path = tmp_path / "one.sonde"
    path.write_bytes(HEADER + raw)
    (row,) = read(path).tables["event"].to_pylist()
    assert (row["kind"], row["name"], row["pid"]) == ("notice", "incident", 5)
    assert json.loads(row["text"])["cause"] == "cpu-contention"
