# SPDX-License-Identifier: Apache-2.0
"""What strangers, dishonest parties and failing disks do to a fleet, tried for real."""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import threading
from dataclasses import replace

import pytest

from sonde.errors import SondeError, UsageError
from sonde.fleet import provision, service
from sonde.fleet.aggregator import Refused
from sonde.fleet.budget import ledger_of
from sonde.fleet.clock import PartyClock
from sonde.fleet.connections import ConnectionLimiter
from sonde.fleet.evaluation.local_deployment import START_S, LocalDeployment, small_task
from sonde.fleet.evaluation.simulated_nodes import overstated_report
from sonde.fleet.node import sign
from sonde.fleet.page import render
from sonde.fleet.result import make_result, to_csv, to_table
from sonde.fleet.service import Service
from sonde.fleet.task import Task
from sonde.fleet.wire import (
    Item,
    Malformed,
    Reply,
    Report,
    decode_job,
    decode_replies,
    encode_job,
    encode_replies,
)
from sonde.http_client import Connection


class Credentials:
    token = operator_token = "secret"


@pytest.fixture
def fleet(tmp_path):
    made = LocalDeployment(tmp_path, small_task(), ["a"] * 8)
    yield made
    made.close()


# --- connections ----------------------------------------------------------------------------------


class Listening:
    """The leader behind TLS, in a thread, with room for few connections."""

    def __init__(self, fleet, home, limit):
        self.fleet, self.home, self.limit = fleet, home, limit
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = self.listener.getsockname()[1]
        self.ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.thread.start()
        assert self.ready.wait(10)

    async def _run(self):
        self.loop, self.over = asyncio.get_running_loop(), asyncio.Event()
        runner = service.runner_of(Service(self.fleet.leader, Credentials()))
        await runner.setup()
        tls = provision.Credentials.load(self.home / "leader").server_tls()
        note = self.fleet.leader.store.note_refusals
        task = asyncio.create_task(
            ConnectionLimiter(runner.server, tls, note, self.limit).accept(self.listener)
        )
        self.ready.set()
        await self.over.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await runner.cleanup()

    def stop(self):
        self.loop.call_soon_threadsafe(self.over.set)
        self.thread.join(30)

    def client(self):
        return Connection("127.0.0.1", self.port, provision.client_tls(self.home / "leader"))


@pytest.fixture
def listening(fleet, tmp_path):
    provision.provision(tmp_path / "tls", small_task(), ["a"])
    made = Listening(fleet, tmp_path / "tls", 40)
    yield made
    made.stop()


@pytest.mark.parametrize("first", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["silent", "dripping"])
def test_two_hundred_dripping_sockets_keep_no_node_out(fleet, listening, first):
    stop = threading.Event()

    def again():
        sock = socket.create_connection(("127.0.0.1", listening.port))
        sock.sendall(first)
        return sock

    socks = [again() for _ in range(200)]

    def drip():
        while not stop.wait(0.2):
            for at, sock in enumerate(socks):
                try:
                    if first:
                        sock.send(b"\x00")
                    elif sock.recv(1, socket.MSG_DONTWAIT) == b"":
                        raise OSError
                except BlockingIOError:
                    pass
                except OSError:
                    sock.close()
                    with contextlib.suppress(OSError):
                        socks[at] = again()

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        path = f"/tasks/{fleet.task.id.hex()}/reports"
        for number in range(4):
            client = listening.client()
            body = fleet.report(number, [1]).encode()
            answer = client.request("POST", path, body, deadline_s=10, max_bytes=1000)
            client.close()
            assert (answer.status, answer.body) == (201, b"")
        assert fleet.leader.store.refusals()["evicted"] > 0
    finally:
        stop.set()
        thread.join()
        for sock in socks:
            sock.close()


# --- dishonest nodes and parties ------------------------------------------------------------------


def test_the_same_report_counts_once_however_it_comes_again(fleet):
    report = fleet.report(0, [1])
    other = fleet.report(0, [2])  # of the same node and period
    assert fleet.send(report, report, other) == ["", "replayed", "quota"]
    assert fleet.send(report) == ["replayed"]
    fleet.close()
    fleet.open()
    assert fleet.send(other, report) == ["quota", "replayed"]
    moved = replace(report, time_s=report.time_s + 3600)
    assert fleet.send(moved) == ["early"]
    assert fleet.send(replace(report, id=os.urandom(16))) == ["forged"]
    assert sum(fleet.exact_sums()) == 1


def test_a_job_that_the_leader_sends_again_or_in_another_order_counts_once(fleet):
    jobs = []
    fleet.close()
    fleet._wrap = lambda post: lambda path, body: jobs.append((path, body)) or post(path, body)
    fleet.open()
    fleet.send(*(fleet.report(n, [n]) for n in range(4)))
    (_, body) = jobs[0]
    job, items = decode_job(body)
    before = fleet.helper.store.counts()
    first = fleet.helper.process_job(body)
    assert (
        fleet.helper.process_job(encode_job(job, reversed(items))) == first
    )  # the answer of that job
    answer = fleet.helper.process_job(encode_job(os.urandom(16), reversed(items)))
    again = decode_replies(answer, len(items))
    assert {reply.reason for reply in again} == {"replayed"}
    assert fleet.helper.store.counts() == before


@pytest.mark.parametrize(
    "lie",
    [
        lambda replies: [Reply(None, "forged") for _ in replies],
        lambda replies: [Reply(reply.message and bytes(len(reply.message))) for reply in replies],
        lambda replies: [Reply(b"") for _ in replies],
        lambda replies: replies[::-1],
        lambda replies: [Reply(None, "x" * 40), *replies[1:]],
    ],
    ids=["refuses all", "zeros", "empty", "reordered", "an invented reason"],
)
def test_parties_that_disagree_release_nothing_and_spend_nothing(tmp_path, lie):
    def wrap(post):
        def lying(path, body):
            answer = post(path, body)
            if path != "jobs":
                return answer
            return encode_replies(lie(decode_replies(answer, len(decode_job(body)[1]))))

        return lying

    fleet = LocalDeployment(tmp_path, small_task(), ["a"] * 4, wrap)
    fleet.send(*(fleet.report(n, [n]) for n in range(4)))
    fleet.close_batch()
    with pytest.raises(Refused) as refused:
        fleet.collect()
    assert refused.value.reason in ("too few", "mismatch")
    assert fleet.helper.store.ledger() == fleet.leader.store.ledger() == []
    assert all(len(reason) < 40 for reason in fleet.leader.store.refusals())
    fleet.close()


def test_shares_that_are_damaged_anywhere_count_for_neither_party(fleet):
    good = fleet.report(0, [1])
    lie = overstated_report(fleet.task, fleet.nodes[1], fleet.report(1, [1]))
    assert fleet.send(good, lie) == ["", ""]
    for number, field in enumerate(("public", "leader", "helper"), 2):
        report = fleet.report(number, [1])
        whole = getattr(report, field)
        for damaged in (whole[:-1], whole + b"x", b"", bytes([whole[0] ^ 1]) + whole[1:]):
            odd = sign(fleet.nodes[number], replace(report, id=os.urandom(16), **{field: damaged}))
            assert fleet.send(odd)[0] in ("", "malformed", "quota")
    counts = [party.store.counts() for party in (fleet.leader, fleet.helper)]
    assert counts == [{START_S: 1}] * 2
    assert sum(fleet.exact_sums()) == 1


def test_every_cut_of_a_message_is_malformed_and_nothing_else(fleet):
    report = fleet.report(0, [1])
    job = encode_job(bytes(16), [Item.of(report, b"message")])
    replies = encode_replies([Reply(b"yes"), Reply(None, "no")])
    messages = (
        (report.encode(), Report.decode),
        (job, decode_job),
        (replies, lambda data: decode_replies(data, 2)),
    )
    for whole, decode in messages:
        for size in {*range(0, len(whole), max(1, len(whole) // 300)), len(whole) - 1}:
            with pytest.raises(Malformed):
                decode(whole[:size])
        with pytest.raises(Malformed):
            decode(whole + b"\x00")
    with pytest.raises(Malformed):
        decode_job(bytes(16) + b"\xff" * 4)  # four billion items in twenty bytes


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["../../etc/x", "/etc/passwd", "a\nb", "a\x00b", "a\u2028b", "<script>", "x" * 9999, [1]],
)
def test_a_tasks_name_is_no_path_and_no_second_line(fleet, name):
    try:
        named = Task.from_json(json.dumps({**json.loads(fleet.task.to_json()), "name": name}))
    except UsageError:
        assert not isinstance(name, str) or not name.isprintable() or len(name) > 200
        return
    result = make_result(named, START_S, [1] * 16, {"gpu": 1.0, "tenant": None})
    assert to_csv(result).split("\n")[1].startswith("bucket,")
    assert to_table(result).split("\n")[1].startswith("privacy:")
    assert "<script>" not in render(result, ledger_of(named, []))


# --- disks ----------------------------------------------------------------------------------------


def test_a_state_whose_log_is_torn_at_any_byte_holds_what_was_acknowledged_or_reports_it(
    tmp_path,
):
    home = tmp_path / "whole"
    home.mkdir()
    fleet = LocalDeployment(home, small_task(), ["a"] * 4)
    fleet.send(fleet.report(0, [1]))
    fleet.leader.store._database.erase_log()
    fleet.send(fleet.report(1, [1]))
    shutil.copytree(home, tmp_path / "killed")  # as kill -9 leaves it
    fleet.close()
    size = (tmp_path / "killed/leader.sqlite-wal").stat().st_size
    assert size > 10_000
    states = set()
    for cut in sorted({0, 1, 31, 32, 33, *range(0, size, size // 60), size - 1, size}):
        torn = tmp_path / f"torn-{cut}"
        shutil.copytree(tmp_path / "killed", torn)
        os.truncate(torn / "leader.sqlite-wal", cut)
        fleet._directory = torn
        fleet.open()
        with fleet.leader.store._database.reading() as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        states.add(sum(fleet.leader.store.counts().values()) + fleet.leader.store.waiting)
        fleet.close()
        shutil.rmtree(torn)
    assert states <= {0, 1, 2}
    assert 2 in states


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")
def test_a_full_disk_refuses_and_nothing_is_counted_twice_when_there_is_room_again(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1200k,mode=700", "none", disk], check=True)
    try:
        fleet = LocalDeployment(disk, small_task(), ["a"] * 8)
        clock = PartyClock(disk)
        assert fleet.send(fleet.report(0, [1])) == [""]
        filler = disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        taken = []
        for number in range(1, 8):
            try:
                taken += fleet.send(fleet.report(number, [1]))
            except (SondeError, sqlite3.Error):
                break
        else:
            pytest.fail("a full disk took everything")
        assert clock() > 0
        filler.unlink()
        assert fleet.send(fleet.report(7, [1]))[0] in ("", "quota")
        while fleet.leader.process_job():
            pass
        counts = [party.store.counts() for party in (fleet.leader, fleet.helper)]
        assert counts[0] == counts[1]
        assert counts[0][START_S] >= 2
        fleet.close_batch()
        fleet.collect()
        fleet.close()
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


# --- what is logged -------------------------------------------------------------------------------


def test_no_token_or_key_is_shown_by_the_errors_of_its_own_file(tmp_path):
    provision.provision(tmp_path / "t", small_task(), ["a"])
    keys = tmp_path / "t/leader/keys.json"
    bundle = provision.Credentials.load(keys.parent)
    secrets = [bundle.token, bundle.helper_token, bundle.hpke_private, bundle.verify_key]
    whole = keys.read_text()
    for size in range(0, len(whole), 7):
        keys.write_text(whole[:size])
        with pytest.raises(UsageError) as refused:
            provision.Credentials.load(keys.parent)
        assert not any(secret in str(refused.value) for secret in secrets)
    keys.write_text(whole.replace(bundle.hpke_private, bundle.hpke_private[:-2] + "zz"))
    with pytest.raises(UsageError) as refused:
        provision.Credentials.load(keys.parent)
    assert bundle.hpke_private[:-2] not in str(refused.value)
    keys.write_text("[" * 100_000)
    with pytest.raises(UsageError):
        provision.Credentials.load(keys.parent)
    assert bundle.token not in repr(bundle)
