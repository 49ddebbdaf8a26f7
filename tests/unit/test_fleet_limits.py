# SPDX-License-Identifier: Apache-2.0
"""Weak keys, invalid tasks, and limits on the resources of strangers."""

import asyncio
import gzip
import http.client
import json
import socket
import threading
from dataclasses import replace

import numpy as np
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from leader import CREDENTIALS, listening
from sonde._fleet import signed_by, unfit_keys
from sonde.cli import fleet_collect
from sonde.cli.main import main
from sonde.errors import SinkError, UsageError
from sonde.fleet import collector, request_body, service
from sonde.fleet.aggregator import HelperUnavailable, Refused
from sonde.fleet.evaluation import attacks, forecast
from sonde.fleet.evaluation.attack_results import AttackResult
from sonde.fleet.evaluation.local_deployment import START_S, LocalDeployment, small_task
from sonde.fleet.evaluation.population import Population
from sonde.fleet.refusals import FINAL_FOR_RELEASE
from sonde.fleet.roster import Identity, Roster
from sonde.fleet.service import HelperClient
from sonde.fleet.wire import Malformed, length_prefixed, split_length_prefixed

# The eight points of small order (Chalkias, Garillot, Nikolaenko 2020, table 1), least first.
SMALL_ORDER = [
    "0100000000000000000000000000000000000000000000000000000000000000",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000080",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
]
OTHER_ENCODINGS = [  # of the same points: a coordinate not reduced, a sign of zero
    "0100000000000000000000000000000000000000000000000000000000000080",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
]
NOBODYS = bytes.fromhex(SMALL_ORDER[0]) + bytes(32)
"""A signature made without any key."""


def verifies(key: Ed25519PublicKey, message: bytes) -> bool:
    try:
        key.verify(NOBODYS, message)
    except InvalidSignature:
        return False
    return True


def test_a_key_under_which_anyone_can_sign_is_refused(tmp_path):
    path = tmp_path / "roster.json"
    for text in SMALL_ORDER:
        key = bytes.fromhex(text)
        lenient = Ed25519PublicKey.from_public_bytes(key)  # OpenSSL takes it
        assert any(verifies(lenient, bytes([n])) for n in range(256)), text
        assert not any(signed_by(key, NOBODYS, bytes([n])) for n in range(256)), text
    for text in SMALL_ORDER + OTHER_ENCODINGS + ["02" + "00" * 31, "00" * 31]:
        Roster({Identity().public: "a", bytes.fromhex(text): "b"}).save(path)
        with pytest.raises(UsageError, match=rf"1 of 2 keys .* {text}"):
            Roster.load(path)


def test_a_signature_is_of_one_message_and_one_key():
    node, other = Identity(), Identity()
    signature = node.sign(b"message")
    assert signed_by(node.public, signature, b"message")
    assert not signed_by(node.public, signature, b"massage")
    assert not signed_by(other.public, signature, b"message")
    for place in range(0, 64, 7):
        forged = bytearray(signature)
        forged[place] ^= 1
        assert not signed_by(node.public, bytes(forged), b"message")
    for key, other_signature in (
        (node.public[:-1], signature),
        (b"", b""),
        (node.public, signature[:-1]),
    ):
        assert not signed_by(key, other_signature, b"message")


def test_honest_keys_are_enrolled(tmp_path):
    keys = [Identity().public for _ in range(200)]
    assert unfit_keys(keys) == []
    assert not any(signed_by(key, NOBODYS, b"x") for key in keys)
    Roster(dict.fromkeys(keys, "a")).save(tmp_path / "roster.json")
    assert len(Roster.load(tmp_path / "roster.json")) == 200


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"period_s": 0}, "period_s"),
        ({"min_batch": 0}, "min_batch"),
        ({"grace_s": -1}, "grace_s"),
        ({"keep_s": 0}, "keep_s"),
        ({"buckets": "many"}, "buckets"),
        ({"leader_url": "https://host:port"}, "leader_url"),
        ({"helper_url": "http://127.0.0.1:1"}, "helper_url"),
        ({"collector_key": "ab"}, "collector_key"),
        ({"privacy": {"scale": 0.0}}, "scale"),
        ({"privacy": {"scale": float("nan")}}, "scale"),
        ({"privacy": {"delta": 0.0}}, "delta"),
        ({"privacy": {"budget": float("inf")}}, "budget"),
        ({"privacy": {"unit": "planet"}}, "unit"),
        ({"privacy": {"mechanism": "hope"}}, "noise"),
        ({"privacy": {"tenant_cap": 0}}, "tenant_cap"),
    ],
)
def test_a_task_that_makes_no_sense_is_refused_when_it_is_read(tmp_path, changes, words):
    fields = json.loads(small_task().to_json())
    fields["privacy"].update(changes.pop("privacy", {}))
    (tmp_path / "task.json").write_text(json.dumps({**fields, **changes}))
    with pytest.raises(UsageError, match=words):
        type(small_task()).load(tmp_path / "task.json")


def test_a_request_of_a_million_empty_parts_is_refused_before_it_is_decoded():
    assert len(split_length_prefixed(length_prefixed(b"") * 3, 3)) == 3
    with pytest.raises(Malformed, match="too many"):
        split_length_prefixed(length_prefixed(b"") * 1_000_000, 1024)


@pytest.fixture
def fleet(tmp_path):
    made = LocalDeployment(tmp_path, small_task(), ["a"] * 4)
    yield made
    made.close()


def test_idle_uploads_do_not_block_a_relay(fleet):
    path = f"POST /tasks/{fleet.task.id.hex()}/reports/batch HTTP/1.1\r\nHost: x\r\n"
    body = length_prefixed(fleet.report(0, [1]).encode())

    async def send():
        runner, port = await listening(fleet.leader)
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(60)]
        for _, writer in silent:
            writer.write(f"{path}Content-Length: 2000\r\n\r\n".encode())
        await asyncio.sleep(0.2)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{path}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status = await asyncio.wait_for(reader.readline(), 5)
        for _, one in (*silent, (None, writer)):
            one.close()
        await runner.cleanup()
        return status

    assert asyncio.run(send()).startswith(b"HTTP/1.1 200 ")


def test_a_batch_that_comes_too_slowly_loses_its_slot(fleet, monkeypatch):
    monkeypatch.setattr(request_body, "PROGRESS_INTERVAL_S", 0.2)

    async def send():
        runner, port = await listening(fleet.leader)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            f"POST /tasks/{fleet.task.id.hex()}/reports/batch HTTP/1.1\r\nHost: x\r\n"
            f"Content-Length: {1 << 20}\r\n\r\n"
        )
        writer.write(head.encode() + bytes(request_body.FIRST_BYTES))
        status = await asyncio.wait_for(reader.readline(), 5)
        writer.close()
        await runner.cleanup()
        return status

    assert asyncio.run(send()).startswith(b"HTTP/1.1 408 ")


def test_a_body_is_not_decompressed(fleet):
    body = gzip.compress(fleet.report(0, [1]).encode())

    async def send():
        runner, port = await listening(fleet.leader)
        head = (
            f"POST /tasks/{fleet.task.id.hex()}/reports HTTP/1.1\r\nHost: x\r\n"
            f"Content-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        status = await reader.readline()
        writer.close()
        await runner.cleanup()
        return status

    assert asyncio.run(send()).startswith(b"HTTP/1.1 400 ")
    assert fleet.leader.store.refusals() == {"malformed": 1}


@pytest.mark.parametrize("request_head", [b"", b"POST /tasks/x/reports HTTP/1.1\r\nHost: x\r\n"])
def test_a_connection_without_a_request_is_closed(fleet, monkeypatch, request_head):
    monkeypatch.setattr(service, "_IDLE_S", 0.2)

    async def idle():
        runner, port = await listening(fleet.leader)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_head)
        async with asyncio.timeout(20):  # an hour, if it were left to the library
            rest = await reader.read()
        writer.close()
        await runner.cleanup()
        return rest

    assert asyncio.run(idle()) == b""


def test_a_request_is_repeated_if_the_helper_closed_the_idle_connection(fleet, monkeypatch):
    """One answer a connection: each request but the first finds its connection gone."""
    monkeypatch.setattr(
        http.client,
        "HTTPSConnection",
        lambda host, port, context, timeout: http.client.HTTPConnection(
            host, port, timeout=timeout
        ),
    )
    server = socket.create_server(("127.0.0.1", 0))

    def serve(answers):
        for answer in answers:
            connection, _ = server.accept()
            with connection:
                text = b""
                while not text.endswith(b"body"):
                    text += connection.recv(4096)
                if answer is not None:
                    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\n\r\n"
                    connection.sendall(head.encode() + answer)

    thread = threading.Thread(target=serve, args=([b"one", b"two", b"three", None],))
    thread.start()
    url = f"https://127.0.0.1:{server.getsockname()[1]}"
    client = HelperClient(replace(fleet.task, helper_url=url), "token", None)
    assert [client.post("jobs", b"body") for _ in range(3)] == [b"one", b"two", b"three"]
    with pytest.raises(HelperUnavailable):  # who does not answer on a new connection is away
        client.post("jobs", b"body")
    thread.join()
    server.close()


class Delaying:
    """Passes connections on to a port; while `is_delaying`, only the first kilobyte of each."""

    def __init__(self):
        self.is_delaying, self.port = True, 0

    async def pass_on(self, reader, writer):
        there_reader, there = await asyncio.open_connection("127.0.0.1", self.port)

        async def forward():
            is_first = True
            while part := await reader.read(1024):
                if is_first or not self.is_delaying:
                    there.write(part)
                is_first = False

        forwarding = asyncio.create_task(forward())
        while part := await there_reader.read(65536):
            writer.write(part)
        forwarding.cancel()
        for one in (there, writer):
            one.close()


def test_a_delay_on_the_way_to_the_helper_destroys_no_report(tmp_path, monkeypatch):
    monkeypatch.setattr(service, "_JOB_S", 0.3)
    posts = []
    fleet = LocalDeployment(tmp_path, small_task(), ["a"] * 4, lambda _: lambda *of: posts[0](*of))
    relay = Delaying()

    async def exchange():
        runner, relay.port = await listening(fleet.helper)
        between = await asyncio.start_server(relay.pass_on, "127.0.0.1", 0)
        url = f"https://127.0.0.1:{between.sockets[0].getsockname()[1]}"
        client = HelperClient(replace(fleet.task, helper_url=url), CREDENTIALS.token, None)
        client._task = fleet.task  # whose id is in the path: an address changes it
        posts.append(client.post)
        try:
            assert fleet.leader.admit([fleet.report(n, [1]).encode() for n in range(4)]) == [""] * 4
            with pytest.raises(HelperUnavailable, match="too slow"):
                await asyncio.to_thread(fleet.leader.process_job)
            assert (fleet.leader.store.waiting, fleet.leader.store.refusals()) == (4, {})
            relay.is_delaying = False
            assert await asyncio.to_thread(fleet.leader.process_job) == 4
        finally:
            between.close()
            await runner.cleanup()

    asyncio.run(exchange())
    assert fleet.exact_sums()[1] == 4
    assert fleet.leader.store.refusals() == {}
    fleet.close()


@pytest.mark.parametrize(
    ("path", "status", "text", "raised"),
    [
        ("jobs", 400, "malformed: a job", Refused),
        ("jobs", 413, "oversized", Refused),
        ("jobs", 408, "too slow", HelperUnavailable),
        ("jobs", 408, "hung up", HelperUnavailable),
        ("jobs", 429, "slow down", HelperUnavailable),
        ("jobs", 401, "unauthorised", HelperUnavailable),
        ("jobs", 404, "unknown task", HelperUnavailable),
        ("jobs", 503, "busy", HelperUnavailable),
        ("jobs", 503, "malformed", HelperUnavailable),
        ("jobs", 302, "malformed", HelperUnavailable),
        ("releases", 409, "mismatch", Refused),
        ("releases", 429, "budget spent: by others", Refused),
        ("releases", 425, "still open", Refused),
        ("releases", 408, "too slow", HelperUnavailable),
        ("releases", 400, "<html>", HelperUnavailable),
    ],
)
def test_only_a_refusal_of_the_content_is_final(fleet, monkeypatch, path, status, text, raised):
    client = HelperClient(replace(fleet.task, helper_url="https://127.0.0.1:1"), "token", None)
    monkeypatch.setattr(client, "_post", lambda *_: (status, text.encode()))
    with pytest.raises(raised) as caught:
        client.post(path, b"body")
    if raised is Refused:
        assert caught.value.reason == text.partition(":")[0]
    else:
        assert "<" not in str(caught.value)


def test_shares_that_do_not_belong_together_are_refused(fleet):
    fleet.send(fleet.report(0, [1]), fleet.report(1, [1]))
    fleet.close_batch()
    shares = fleet.collected_shares(START_S)
    assert collector.combine_shares(fleet.task, START_S, shares).rows
    with pytest.raises(SinkError, match="do not belong together"):
        collector.combine_shares(fleet.task, START_S, [shares[0], fleet.task.aggregation().zero()])
    with pytest.raises(SinkError, match="fit no sum"):
        collector.combine_shares(fleet.task, START_S, [shares[0], shares[1][:-1]])


@pytest.mark.parametrize(
    "reason",
    ["still open", "too slow", "hung up", "busy", "unauthorised", "unknown task", "<html>"],
)
def test_follow_asks_again_for_a_batch_that_is_not_refused_for_good(
    fleet, tmp_path, monkeypatch, capsys, reason
):
    (tmp_path / "task.json").write_text(fleet.task.to_json())
    fleet.send(fleet.report(0, [1]), fleet.report(1, [1]))
    fleet.close_batch()
    released = fleet.collect()
    answers = [collector.ReleaseDenied(reason, "a detail"), released]
    asked = []

    def collect(state, start_s):
        asked.append(start_s)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(collector, "collect", collect)
    monkeypatch.setattr(fleet_collect.time, "sleep", lambda seconds: None)
    batch = ("--batch", str(START_S - 24 * 365 * 3600), "--releases", "1", "--format", "csv")
    out = ("--state", str(tmp_path), "--follow", "-o", str(tmp_path / "out"))
    assert main(["fleet", "collect", *out, *batch]) == 0
    assert len(asked) == 2
    assert asked[0] == asked[1]
    assert f"{reason} (a detail)" in (shown := capsys.readouterr().err)
    assert "; retrying" in shown


@pytest.mark.parametrize("reason", sorted(FINAL_FOR_RELEASE))
def test_follow_skips_a_batch_that_is_refused_for_good(tmp_path, monkeypatch, capsys, reason):
    (tmp_path / "task.json").write_text(small_task().to_json())
    asked = []

    def collect(state, start_s):
        asked.append(start_s)
        raise collector.ReleaseDenied(reason, "")

    monkeypatch.setattr(collector, "collect", collect)
    monkeypatch.setattr(fleet_collect.time, "sleep", lambda seconds: None)
    batch = ("--batch", str(START_S - 24 * 365 * 3600), "--releases", "2", "--format", "csv")
    out = ("--state", str(tmp_path), "--follow", "-o", str(tmp_path / "out"))
    assert main(["fleet", "collect", *out, *batch]) == 0
    assert [one - asked[0] for one in asked] == [0, 3600]
    assert "retrying" not in capsys.readouterr().err


def test_an_attack_that_succeeds_fails_the_command(monkeypatch, capsys):
    broken = AttackResult("a leak", "all", "nothing", False, "")
    monkeypatch.setattr(attacks, "run_all", lambda seed: [broken])
    args = ["fleet", "simulate", "--nodes", "50", "--buckets", "16", "--tenants", "5", "--attacks"]
    assert main(args) == 1
    output = capsys.readouterr()
    assert "BROKEN" in output.out
    assert "a leak" in output.err


def test_the_error_of_releases_per_tenant_is_forecast_before_any_is_made(tmp_path, capsys):
    fleet = tmp_path / "t"
    made = ["--nodes", "40", "--tenants", "20", "--unit", "tenant", "--epsilon", "1"]
    assert main(["fleet", "aggregate", "--new", str(fleet), *made]) == 0
    output = capsys.readouterr().out
    assert "40 nodes of 20 tenants" in output
    assert "NOT within 10%" in output
    simulate = ["fleet", "simulate", "--nodes", "50", "--buckets", "16", "--roster"]
    for path in (fleet / "leader", fleet / "leader" / "roster.json"):
        assert main([*simulate, str(path)]) == 0
        assert capsys.readouterr().out.startswith("per tenant, ε = ")
    assert main([*simulate, str(tmp_path / "none")]) == 2
    assert "no roster" in capsys.readouterr().err


def test_a_forecast_matches_the_table_of_the_docs():
    rng = np.random.default_rng(2)
    drawn = Population.draw(100_000, 64, 5000, rng)
    sizes = [int(size) for size in np.bincount(drawn.tenant) if size]
    forecast_of_day = forecast.forecast_of_a_day(sizes, 1.0, rng)
    assert forecast_of_day.errors[0.0] < 0.07
    assert forecast_of_day.errors[0.0] < forecast_of_day.errors[0.3] < forecast_of_day.errors[0.7]
    assert forecast_of_day.errors[0.7] > 0.1
    assert "within 10% only" in forecast_of_day.summary()
    with pytest.raises(UsageError):
        forecast.forecast_of_a_day([], 1.0, rng)


def test_wrong_values_are_refused_by_name(tmp_path, capsys):
    new = ["fleet", "aggregate", "--new", str(tmp_path / "x")]
    for args, words in (
        ([*new, "--release-hours", "1.5"], "whole hours"),
        ([*new, "--port", "70000"], "port"),
        ([*new, "--tenant-cap", "0"], "cap"),
        ([*new, "--min-batch", "0"], "batch"),
        (["fleet", "simulate", "--dropouts", "1.5"], "--dropouts"),
        (["fleet", "simulate", "--epsilon", "0"], "epsilon above 0"),
        (["fleet", "simulate", "-o", "x.txt"], "x.txt"),
    ):
        assert main(args) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda leader: (leader / "tls.key").unlink(), "put tls.crt and tls.key there"),
        (lambda leader: (leader / "keys.json").write_text("{}"), "keys.json back"),
        (lambda leader: (leader / "ca.crt").write_text(""), "put the certificate there"),
        (lambda leader: (leader / "roster.json").write_text('{"a": 1}'), "write public keys"),
        (lambda leader: (leader / "task.json").write_text("[1]"), "task.json back"),
        (lambda leader: (leader / "state.sqlite").write_text("garbage"), "older copy"),
        (lambda leader: leader.rename(leader.parent / "collector"), "belongs to a leader"),
    ],
)
def test_a_damaged_party_names_the_remedy(tmp_path, capsys, harm, words):
    made = ["fleet", "aggregate", "--new", str(tmp_path / "t"), "--nodes", "2"]
    assert main(made) == 0
    leader = tmp_path / "t" / "leader"
    if "belongs" in words:
        (tmp_path / "t" / "collector").rename(tmp_path / "t" / "old")
        harm(leader)
        args = ["fleet", "collect", "--state", str(tmp_path / "t" / "collector")]
    else:
        harm(leader)
        args = ["fleet", "aggregate", "--state", str(leader)]
    assert main(args) in (1, 2)
    output = capsys.readouterr().err
    assert words in output
    assert len(output.splitlines()) == 2  # cause and remedy
