# SPDX-License-Identifier: Apache-2.0
"""Endpoints that mean harm, over real sockets: what they cost, and where a credential goes."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import contextmanager

import pytest

from sonde import http_client
from sonde.errors import UsageError
from sonde.fleet.provision import _Authority
from sonde.resolve.pods import MAX_NAME, Pods, parse
from sonde.sinks import prometheus
from sonde.sinks.otlp import OtlpPusher, endpoint_of
from sonde.sinks.prometheus import PrometheusServer

DEADLINE_S = 1.0
OK = b"HTTP/1.1 200 OK\r\n"
MIB = 1 << 20


@contextmanager
def server(answer):
    """(port, requests' first 64 KiB); `answer(connection)` does what it likes."""
    listener, requests = socket.create_server(("127.0.0.1", 0)), []

    def one(connection):
        with connection:
            try:
                connection.settimeout(20)
                requests.append(connection.recv(65_536))
                answer(connection)
            except OSError:
                pass  # the other side had enough

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=one, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()[1], requests
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def sends(*parts):
    def answer(connection):
        for part in parts:
            connection.sendall(part)

    return answer


def drips(first, piece, pause_s=0.05):
    def answer(connection):
        connection.sendall(first)
        for _ in range(400):
            connection.sendall(piece)
            time.sleep(pause_s)

    return answer


def pours(first, piece=bytes(MIB), times=1200):
    def answer(connection):
        connection.sendall(first)
        for _ in range(times):
            connection.sendall(piece)

    return answer


def ask(port, **more):
    given = {"deadline_s": DEADLINE_S, "max_bytes": 1000, **more}
    return http_client.request("GET", f"http://127.0.0.1:{port}/", **given)


CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
HARM = {
    "an answer that claims 1.2 GB": pours(OK + b"Content-Length: 1258291200\r\n\r\n"),
    "an answer without end": pours(OK + b"\r\n"),
    "chunks without end": pours(CHUNKED, b"100000\r\n" + bytes(MIB) + b"\r\n"),
    "tiny chunks": pours(CHUNKED, b"1\r\nx\r\n" * 100_000),
    "a chunk's size without end": pours(CHUNKED, b"0" * MIB),
    "trailers without end": pours(CHUNKED + b"0\r\n", b"x: y\r\n" * 100_000),
    "a header without end": pours(OK + b"x: "),
    "headers without end": pours(OK, b"x: y\r\n" * 100_000),
    "interim answers without end": pours(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 40_000),
    "a status line that drips": drips(b"", b"H"),
    "headers that drip": drips(OK + b"x: ", b"y"),
    "a body that drips": drips(OK + b"Content-Length: 900\r\n\r\n", b"z"),
    "chunks that drip": drips(CHUNKED, b"1\r\nx\r\n"),
    "silence": lambda connection: time.sleep(20),
    "an answer cut short": sends(OK + b"Content-Length: 90\r\n\r\nshort"),
    "no HTTP": sends(b"220 smtp ready\r\n\r\n"),
    "a bomb of gzip": sends(
        OK + b"Content-Encoding: gzip\r\nConnection: close\r\n\r\n" + gzip.compress(bytes(64 * MIB))
    ),
}


@pytest.mark.parametrize("answer", HARM.values(), ids=HARM)
def test_no_answer_takes_longer_than_its_deadline_or_is_taken_beyond_its_size(answer):
    with server(answer) as (port, _):
        began_s = time.monotonic()
        with pytest.raises(OSError):
            ask(port)
        assert time.monotonic() - began_s < DEADLINE_S + 1


def test_who_takes_nothing_of_a_request_does_not_hold_its_sender():
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # accepts in the kernel, never reads
        began_s = time.monotonic()
        with pytest.raises(TimeoutError):
            ask(deaf.getsockname()[1], body=bytes(64 * MIB))
        assert time.monotonic() - began_s < DEADLINE_S + 1


def test_a_handshake_that_drips_ends_at_the_deadline():
    with server(drips(b"\x16\x03\x03\x40\x00", b"\x02")) as (port, _):
        began_s = time.monotonic()
        with pytest.raises(OSError):
            http_client.request(
                "GET", f"https://127.0.0.1:{port}/", deadline_s=DEADLINE_S, max_bytes=10
            )
        assert time.monotonic() - began_s < DEADLINE_S + 1


def test_a_resolver_that_hangs_is_left_behind_and_few_of_its_kind(monkeypatch):
    real, release = socket.getaddrinfo, threading.Event()

    def hangs(host, *args, flags=0, **more):
        if not flags:
            release.wait(20)
        return real(host, *args, flags=flags, **more)

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    try:
        for number in range(6):
            began_s = time.monotonic()
            with pytest.raises(OSError, match="longer" if number < 4 else "hang"):
                http_client.request("GET", "http://localhost:1/", deadline_s=0.1, max_bytes=10)
            assert time.monotonic() - began_s < 1
    finally:
        release.set()


PUSH = """
import resource, sys, time
from sonde.sinks import otlp
otlp.PUSH_S = 2.0
push = otlp.OtlpPusher(sys.argv[1], 3600, list, {})
push.push()  # what it needs anyway
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.monotonic()
push.push()
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(push.failed, time.monotonic() - began, (after - before) / 1024)
"""


@pytest.mark.parametrize("kind", ["an answer that claims 1.2 GB", "an answer without end"])
def test_an_answer_of_a_gigabyte_costs_a_push_no_memory(kind):
    with server(HARM[kind]) as (port, _):
        done = subprocess.run(
            [sys.executable, "-c", PUSH, f"http://127.0.0.1:{port}"],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
    failed, wall_s, grown_mib = map(float, done.stdout.split())
    assert failed == 2
    assert wall_s < 3
    assert grown_mib < 8


def test_a_collector_that_drips_holds_up_one_push_and_not_the_next(monkeypatch):
    monkeypatch.setattr("sonde.sinks.otlp.PUSH_S", 0.5)
    with server(HARM["a body that drips"]) as (port, _):
        pusher = OtlpPusher(f"http://127.0.0.1:{port}", 0.1, list, {})
        pusher.start()
        time.sleep(2.2)
        pusher.close()
    assert pusher.failed >= 3
    assert "longer" in pusher.error


# --- where what is sent goes ----------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed_with_or_without_a_credential(tmp_path, status):
    (tmp_path / "token").write_text("s3cret\n")
    with server(sends(OK + b"Content-Length: 0\r\n\r\n")) as (other, stolen):
        there = f"HTTP/1.1 {status} X\r\nLocation: http://localhost:{other}/x\r\n"
        redirect = sends(there.encode() + b"Content-Length: 0\r\nConnection: close\r\n\r\n")
        with server(redirect) as (port, requests):
            pods = Pods(f"http://127.0.0.1:{port}", tmp_path / "token")
            pods.request("x")
            end_s = time.monotonic() + 5
            while not pods.failures and time.monotonic() < end_s:
                time.sleep(0.01)
            pods.close()
            pusher = OtlpPusher(f"http://127.0.0.1:{port}", 3600, list, {})
            pusher.push()
        time.sleep(0.1)
    assert b"Bearer s3cret" in requests[0]
    assert (pods.last_failure, pusher.error) == (f"HTTP status {status}",) * 2
    assert stolen == []


def test_no_proxy_of_the_environment_sees_a_request(monkeypatch):
    with server(sends(OK + b"Content-Length: 0\r\n\r\n")) as (proxy, stolen):
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy}")
        monkeypatch.delenv("no_proxy", raising=False)
        with server(sends(OK + b"Content-Length: 2\r\n\r\nok")) as (port, requests):
            assert ask(port, headers={"Authorization": "Bearer s3cret"}).body == b"ok"
        assert len(requests) == 1
    assert stolen == []


def test_a_certificate_that_nobody_vouches_for_ends_it_before_the_credential_is_sent(tmp_path):
    certificate, key = _Authority().issue("localhost")
    (tmp_path / "crt").write_bytes(certificate)
    (tmp_path / "key").write_bytes(key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "crt", tmp_path / "key")
    read = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        connection, _ = listener.accept()
        try:
            with context.wrap_socket(connection, server_side=True) as tls:
                read.append(tls.recv(100))
        except OSError:
            pass

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(ssl.SSLCertVerificationError):
        http_client.request(
            "GET", f"https://127.0.0.1:{listener.getsockname()[1]}/", deadline_s=5, max_bytes=10,
            headers={"Authorization": "Bearer s3cret"},
        )  # fmt: skip
    thread.join(10)
    listener.close()
    assert read in ([], [b""])


@pytest.mark.parametrize("value", ["a\r\nX-Evil: 1", "a\nb", "a\x00", "ä"])
def test_no_value_begins_a_header_of_its_own_and_none_is_shown(value):
    with server(sends(OK + b"\r\n")) as (port, requests):
        with pytest.raises(OSError) as refused:
            ask(port, headers={"Authorization": f"Bearer s3cret{value}"})
        assert "s3cret" not in str(refused.value)
        assert requests == []


@pytest.mark.parametrize(
    "url",
    ["http://user:s3cret@h:1/", "http://h:1/a b", "http://h:1/\r\nX: y", "http://h:port/?s3cret",
     "ftp://s3cret@h", "http://", "s3cret", "http://[::1/?s3cret"],
)  # fmt: skip
def test_a_url_that_is_refused_is_shown_without_its_secrets(url):
    for what in (endpoint_of, Pods):
        with pytest.raises(UsageError) as refused:
            what(url)
        assert "s3cret" not in str(refused.value) or url == "s3cret"
        assert "\n" not in str(refused.value)


def test_a_token_goes_nowhere_in_the_clear_but_to_this_machine(tmp_path):
    with pytest.raises(UsageError, match="unencrypted"):
        Pods("http://192.0.2.1:10255", tmp_path / "token")


# --- what an answer of the kubelet may hold -------------------------------------------------------

PARSE = """
import resource, sys
from sonde.resolve.pods import parse
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
answer = b'{"items":[' + eval(sys.argv[1]) + b']}'
try:
    parse(answer); print("parsed", end=" ")
except ValueError:
    print("refused", end=" ")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("b'[],' * 8_000_000 + b'1'", "refused"),
        ("b'[' * 200_000 + b']' * 200_000", "refused"),
        ('b\'{"a":\' * 200_000 + b"1" + b"}" * 200_000', "refused"),
        ("b'1' * 30_000_000", "refused"),
        ("b'\"' + b\"x\" * 30_000_000 + b'\"'", "parsed"),
    ],
    ids=["many", "deep lists", "deep objects", "a long number", "a long string"],
)
def test_a_hostile_list_of_pods_costs_little_more_than_its_bytes(text, verdict):
    done = subprocess.run(
        [sys.executable, "-c", PARSE, text], capture_output=True, text=True, timeout=60, check=True
    )
    found, grown_mib = done.stdout.split()
    assert found == verdict
    assert float(grown_mib) < 200


def test_deep_json_ends_neither_the_thread_nor_the_next_question():
    deep = b'{"items":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    head = OK + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(deep)
    with server(sends(head, deep)) as (port, _):
        pods = Pods(f"http://127.0.0.1:{port}")
        pods.request("x")
        end_s = time.monotonic() + 10
        while pods.failures < 2 and time.monotonic() < end_s:
            time.sleep(0.02)
        assert pods.failures >= 2
        assert "deep" in pods.last_failure
        pods.close()


def test_names_of_a_pod_are_text_of_a_bounded_length():
    pod = {
        "metadata": {"uid": "u", "name": "n" * 10_000, "namespace": {"a": 1}},
        "status": {"containerStatuses": [{"containerID": "x://c", "name": ["list"]}]},
    }
    found = parse(json.dumps({"items": [pod]}).encode())["u"]
    assert (found.name, found.namespace) == ("n" * MAX_NAME, "")
    assert found.containers == {"c": ""}


# --- who scrapes ----------------------------------------------------------------------------------


@pytest.fixture
def scraped():
    lost = Counter()
    page = "sonde_up 1\n" * 20_000
    server = PrometheusServer("127.0.0.1:0", lambda: page, lambda name, n: lost.update({name: n}))
    server.start()
    yield server, lost, page
    server.close()


def scrape(server, timeout_s=10):
    """(seconds, body)."""
    began_s = time.monotonic()
    with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=timeout_s) as answer:
        body = answer.read().decode()
    return time.monotonic() - began_s, body


def connect(server, sent=b""):
    host, _, port = server.address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=10)
    sock.sendall(sent)
    return sock


def dripping(server, count, stop):
    """`count` sockets that send a header byte by byte, and come again when hung up on."""
    socks = [connect(server, b"GET /metrics HTTP/1.1\r\nx: ") for _ in range(count)]

    def drip():
        while not stop.wait(0.2):
            for at, sock in enumerate(socks):
                try:
                    sock.send(b"y")
                except OSError:
                    sock.close()
                    with contextlib.suppress(OSError):
                        socks[at] = connect(server, b"GET /metrics HTTP/1.1\r\nx: ")
        for sock in socks:
            sock.close()

    thread = threading.Thread(target=drip)
    thread.start()
    return thread


@pytest.mark.parametrize("count", [200, 600])
def test_dripping_sockets_shut_no_scrape_out(scraped, count):
    server, lost, page = scraped
    stop = threading.Event()
    thread = dripping(server, count, stop)
    try:
        for _ in range(10):
            took_s, body = scrape(server)
            assert took_s < 1
            assert body == page
            time.sleep(0.1)
    finally:
        stop.set()
        thread.join()
    if count > 256:
        assert lost["scrapes evicted"] > 0


def test_a_request_that_drips_and_one_that_never_comes_end_in_good_time(scraped, monkeypatch):
    monkeypatch.setattr(prometheus, "REQUEST_S", 0.5)
    server, lost, _ = scraped
    silent, slow = connect(server), connect(server, b"GET ")
    began_s = time.monotonic()
    with contextlib.suppress(OSError):
        while time.monotonic() - began_s < 5:
            slow.send(b"/")
            time.sleep(0.05)
    assert time.monotonic() - began_s < 3
    assert silent.recv(10) == b""
    assert lost["scrapes too slow"] == 2


def test_a_request_without_end_is_refused_at_its_limit(scraped):
    server, _, _ = scraped
    with connect(server) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(b"GET /metrics HTTP/1.1\r\nx: " + b"y" * 5_000_000)
        with contextlib.suppress(ConnectionResetError):
            assert b" 431 " in (sock.recv(100) or b" 431 ")
    assert scrape(server)[0] < 1


def test_who_takes_no_answer_holds_few_pages_and_no_scrape():
    big = "x" * (8 * MIB)
    lost = Counter()
    server = PrometheusServer("127.0.0.1:0", lambda: big, lambda name, n: lost.update({name: n}))
    server.start()
    ask = b"GET /metrics HTTP/1.1\r\n\r\n"
    socks = [connect(server, ask) for _ in range(60)]
    took_s, body = scrape(server)
    assert (len(body), took_s < 1) == (len(big), True)
    assert lost["scrapes too slow"] >= 60 - prometheus.MAX_ANSWERING - 1
    for sock in socks:
        sock.close()
    server.close()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /metrics?x=1 HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", 421),
        (b"GET /metrics HTTP/1.0\n\n", 200),
        (b"GET /../etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"\x00\xff\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
    ],
)
def test_a_request_is_answered_as_it_asks(scraped, sent, status):
    with connect(scraped[0], sent) as sock:
        assert sock.recv(12) == b"HTTP/1.1 %d" % status


def test_a_page_that_fails_is_an_answer_and_a_count():
    lost = Counter()

    def page():
        raise ZeroDivisionError

    server = PrometheusServer("127.0.0.1:0", page, lambda name, n: lost.update({name: n}))
    server.start()
    for _ in range(2):
        with pytest.raises(urllib.error.HTTPError, match="500"):
            scrape(server)
    assert lost["scrapes failed"] >= 1
    server.close()


def test_a_flood_of_requests_is_given_few_pages():
    made = []
    server = PrometheusServer("127.0.0.1:0", lambda: made.append(1) or "x 1\n")
    server.start()
    began_s = time.monotonic()
    while time.monotonic() - began_s < 1:
        scrape(server)
    assert 2 <= len(made) <= 12
    server.close()
