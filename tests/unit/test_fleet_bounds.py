# SPDX-License-Identifier: Apache-2.0
"""Bounds on what one party can make another hold, by oversized answers or jobs."""

import asyncio
import os
import socket
import struct
import threading
import time
import tracemalloc
from dataclasses import replace

import pytest

from leader import listening
from sonde.fleet import service
from sonde.fleet.aggregator import HelperUnavailable
from sonde.fleet.aggregator_request import max_answer_bytes
from sonde.fleet.evaluation.local_deployment import LocalDeployment, small_task
from sonde.fleet.service import HelperClient
from sonde.fleet.wire import (
    JOB_REPORTS,
    Item,
    Reply,
    WrongCount,
    decode_job,
    decode_replies,
    encode_job,
    encode_replies,
)

ITEM = Item(bytes(16), 0, bytes(32), bytes(32), b"", b"", bytes(64), b"")


@pytest.fixture
def fleet(tmp_path):
    made = LocalDeployment(tmp_path, small_task(), ["a"] * 8)
    yield made
    made.close()


def taken(decode):
    """(seconds of this thread, bytes) that a decoder takes until it refuses."""
    tracemalloc.start()
    start_s = time.thread_time()
    with pytest.raises(WrongCount):
        decode()
    spent_s = time.thread_time() - start_s
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return spent_s, peak_bytes


def test_an_answer_of_millions_of_refusals_is_refused_before_it_is_decoded():
    count = (8 << 20) // 5
    answer = struct.pack(">I", count) + bytes(5) * count
    spent_s, peak_bytes = taken(lambda: decode_replies(answer, JOB_REPORTS))
    assert spent_s < 0.1
    assert peak_bytes < 100_000
    with pytest.raises(WrongCount):
        decode_replies(encode_replies([Reply(b"")]), 2)


def test_a_job_of_too_many_reports_is_refused_before_it_is_decoded():
    most = encode_job(bytes(16), [ITEM] * JOB_REPORTS)
    assert len(decode_job(most)[1]) == JOB_REPORTS
    job = encode_job(bytes(16), [ITEM] * 50_000)
    spent_s, peak_bytes = taken(lambda: decode_job(job))
    assert spent_s < 0.1
    assert peak_bytes < 100_000


def test_a_helper_with_a_wrong_number_of_replies_costs_one_job_only(tmp_path):
    def wrap(post):
        def lying(path, body):
            answer = post(path, body)
            return encode_replies([Reply(None)] * 100_000) if path == "jobs" else answer

        return lying

    fleet = LocalDeployment(tmp_path, small_task(), ["a"] * 4, wrap)
    assert fleet.send(*(fleet.report(n, [n]) for n in range(4))) == [""] * 4
    assert fleet.leader.store.refusals() == {"mismatch": 4}
    assert fleet.leader.store.waiting == 0
    fleet.close()


@pytest.mark.parametrize("has_length_header", [True, False], ids=["by its header", "by its bytes"])
def test_a_helpers_answer_is_read_only_up_to_the_length_of_its_job(fleet, has_length_header):
    server = socket.create_server(("127.0.0.1", 0))
    sent = []

    def serve():
        connection, _ = server.accept()
        with connection:
            connection.settimeout(10)
            connection.recv(65536)
            length = f"Content-Length: {64 << 20}\r\n" if has_length_header else ""
            sent.append(0)
            try:
                connection.sendall(f"HTTP/1.1 200 OK\r\n{length}\r\n".encode())
                while sent[0] < 64 << 20:
                    sent[0] += connection.send(bytes(4096))
            except OSError:
                pass

    thread = threading.Thread(target=serve)
    thread.start()
    url = f"https://127.0.0.1:{server.getsockname()[1]}"
    client = HelperClient(replace(fleet.task, helper_url=url), "token", None)
    with pytest.raises(HelperUnavailable, match="too long"):
        client.post("jobs", b"job")
    thread.join()
    server.close()
    assert sent[0] < 16 << 20  # what the sockets hold, not 64 MiB


@pytest.mark.parametrize(
    ("kind", "buckets", "samples"),
    [("histogram", 1, 1), ("histogram", 4096, 1), ("l1boundsum", 64, 9), ("sumvec", 64, 9)],
)
def test_an_honest_job_and_its_answer_are_within_their_bounds(tmp_path, kind, buckets, samples):
    sizes = []

    def wrap(post):
        def seen(path, body):
            answer = post(path, body)
            sizes.append((path, body, len(answer)))
            return answer

        return seen

    task = small_task(buckets=buckets, kind=kind, max_samples=samples, budget=1e6)
    fleet = LocalDeployment(tmp_path, task, ["a"] * 2, wrap)
    assert fleet.send(*(fleet.report(n, [0]) for n in range(2))) == ["", ""]
    fleet.close_batch()
    fleet.collect()
    assert [path for path, _, _ in sizes] == ["jobs", "releases"]
    for path, body, answer in sizes:
        assert answer <= max_answer_bytes(fleet.task, body)
        if path == "jobs":
            assert answer < len(body) <= fleet.task.max_job_bytes
    fleet.close()


def test_a_leader_has_no_more_jobs_read_at_a_time_than_it_drives(fleet, monkeypatch):
    monkeypatch.setattr(service, "_JOB_SLOTS", 2)
    job = encode_job(os.urandom(16), [replace(ITEM, id=os.urandom(16))])
    head = (
        f"POST /tasks/{fleet.task.id.hex()}/jobs HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer secret\r\nContent-Length: {len(job)}\r\n\r\n"
    ).encode()

    async def ask():
        runner, port = await listening(fleet.helper)
        held = []
        for _ in range(2):
            held.append(await asyncio.open_connection("127.0.0.1", port))
            held[-1][1].write(head + job[:-1])
        await asyncio.sleep(0.1)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + job)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readline(), 0.3)
        held[0][1].write(job[-1:])
        statuses = [await asyncio.wait_for(one.readline(), 5) for one in (held[0][0], reader)]
        for _, one in (*held, (reader, writer)):
            one.close()
        await runner.cleanup()
        return statuses

    assert all(status.startswith(b"HTTP/1.1 200 ") for status in asyncio.run(ask()))


ODD = [
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\n" + b"X: a\r\n" * 20_000 + b"\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n",
    b"POST /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
]


def test_invalid_http_is_counted_and_not_logged(fleet, caplog):
    async def ask():
        runner, port = await listening(fleet.leader)
        for odd in ODD * 3:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(odd)
            assert (await reader.readline()).split()[1] in (b"400", b"404")
            writer.close()
        await runner.cleanup()

    asyncio.run(ask())
    assert [record for record in caplog.records if record.exc_info] == []
    assert fleet.leader.store.refusals()["bad request"] >= 12


def test_a_helper_that_hangs_stops_no_upload(fleet):
    """However many wait for it: jobs, releases, and what expires behind them."""
    hanging = threading.Event()

    def hang(*_):
        hanging.wait(20)
        raise HelperUnavailable("hangs")

    fleet.leader.process_job = fleet.leader.release = hang
    body = fleet.report(0, [1]).encode()
    prefix = f"POST /tasks/{fleet.task.id.hex()}/"
    release = f"{prefix}releases HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
    upload = f"{prefix}reports HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"

    async def ask():
        runner, port = await listening(fleet.leader)
        held = []
        for _ in range(40):
            held.append(await asyncio.open_connection("127.0.0.1", port))
            held[-1][1].write(f"{release}Content-Length: 16\r\n\r\n".encode() + bytes(16))
        await asyncio.sleep(0.3)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(upload.encode() + body)
        try:
            return await asyncio.wait_for(reader.readline(), 5)
        finally:
            hanging.set()
            for _, one in (*held, (reader, writer)):
                one.close()
            await runner.cleanup()

    assert asyncio.run(ask()).startswith(b"HTTP/1.1 201 ")


@pytest.mark.parametrize("answer", [b"malformedHTTP/1.1 400", b"lateHTTP/1.1 410"])
def test_a_connection_of_a_stranger_has_one_upload_looked_at_in_a_while_and_holds_no_slot(
    fleet, monkeypatch, answer
):
    monkeypatch.setattr(service, "_STRANGER_DELAY_S", 1.0, raising=False)
    monkeypatch.setattr(service, "_REPORT_SLOTS", 1)
    prefix = f"POST /tasks/{fleet.task.id.hex()}/reports HTTP/1.1\r\nHost: x\r\nContent-Length: "
    body = fleet.report(0, [1]).encode()
    unsigned = replace(fleet.report(0, [1]), time_s=0, signature=bytes(64)).encode()
    sent = b"x" if answer.startswith(b"malformed") else unsigned
    junk = f"{prefix}{len(sent)}\r\n\r\n".encode() + sent

    async def ask():
        runner, port = await listening(fleet.leader)
        began_s = time.monotonic()
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * 8)]
        for _, writer in held:
            writer.write(junk * 2)
        held.append(await asyncio.open_connection("127.0.0.1", port))
        held[-1][1].write(f"{prefix}{len(body)}\r\n\r\n".encode() + body)
        try:
            accepted = await asyncio.wait_for(held[-1][0].readline(), 10)
            refused = await asyncio.wait_for(held[0][0].readuntil(answer), 10)
            return accepted + refused, time.monotonic() - began_s
        finally:
            for _, one in held:
                one.close()
            await runner.cleanup()

    answers, took_s = asyncio.run(ask())
    assert answers.startswith(b"HTTP/1.1 201 ")
    assert took_s >= 2.0
