# SPDX-License-Identifier: Apache-2.0
"""A real server process: what it acknowledged survives; what is hostile is refused."""

from __future__ import annotations

import gzip
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import killed_service
from otlp_requests import request
from served import Server
from sonde import http_client
from stored_chunks import as_of, recorded, rows_of, with_meta

CHUNKS = recorded()
KILLS = 3


def counted(nodes: list[dict]) -> tuple[int, int]:
    return sum(one["chunks"] for one in nodes), sum(one["sample_rows"] for one in nodes)


def made_token(store: Path, tenant: str, *scopes: str) -> tuple[str, str]:
    store.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "sonde", "token", "make", "--store", str(store)]
    command += ["--tenant", tenant]
    for scope in scopes:
        command += ["--scope", scope]
    name, token = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return name, token


def test_killed_again_and_again_nothing_acknowledged_is_lost_or_doubled(tmp_path: Path) -> None:
    server = Server(tmp_path / "store")
    acknowledged: dict[int, int] = {}
    seq = 0
    starts_s = []
    for _ in range(KILLS):
        starts_s.append(server.start())
        killer = threading.Timer(0.4, server.kill)
        killer.start()
        sent = seq
        while True:
            body = as_of(CHUNKS[sent % len(CHUNKS)], "one", sent, time.time_ns())
            try:
                status, _ = server.send("one", body)
            except OSError:
                break
            assert status == 200
            acknowledged[sent] = rows_of(body, "sample")
            sent += 1
        killer.join()
        seq = sent + 1  # what was in flight may be there or not
    server.start()
    assert max(starts_s) < 5 + 4 * starts_s[0]  # the first had nothing to recover
    unsure = KILLS
    nodes = server.wait_for(len(acknowledged))
    time.sleep(3)  # nothing more may come
    chunks, rows = counted(server.ask("nodes", **{"from": 0}))
    server.stop()

    assert acknowledged
    assert len(acknowledged) <= chunks <= len(acknowledged) + unsure
    assert rows >= sum(acknowledged.values())
    assert nodes


def test_whichever_is_killed_what_was_spooled_is_stored_once(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    found = killed_service.run(tmp_path, kills=4, seed=7)

    assert found.lost == found.doubled == []
    assert found.stored >= found.noted > 10
    assert found.sample_rows_stored == found.sample_rows_expected
    assert max(found.accepting_s) < 5 + 4 * found.accepting_s[0]  # the first had nothing to recover


def answer(accepted: int, duplicates: int) -> dict[str, object]:
    return {"accepted": accepted, "duplicates": duplicates, "collect": True}


def test_the_same_chunk_is_stored_once_across_restarts(tmp_path: Path) -> None:
    body = as_of(CHUNKS[0], "one", 0, time.time_ns())
    server = Server(tmp_path / "store")
    server.start()
    assert server.send("one", body)[1] == answer(1, 0)
    assert server.send("one", body)[1] == answer(0, 1)
    server.kill()
    server.start()
    server.send("one", body)
    server.wait_for(1)
    time.sleep(4)
    assert server.send("one", body)[1] == answer(0, 1)

    assert counted(server.ask("nodes", **{"from": 0})) == (1, rows_of(body, "sample"))
    server.stop()


def test_two_servers_share_a_directory_and_one_is_killed(tmp_path: Path) -> None:
    first, second = Server(tmp_path / "store"), Server(tmp_path / "store")
    first.start()
    second.start()
    now = time.time_ns()
    for seq in range(12):
        body = as_of(CHUNKS[seq], "one", seq, now)
        first.send("one", body)
        second.send("one", body)
    first.kill()
    second.wait_for(12)
    time.sleep(4)
    expected = sum(rows_of(chunk, "sample") for chunk in CHUNKS[:12])

    assert counted(second.ask("nodes", **{"from": 0})) == (12, expected)
    second.stop()


def unmount(disk: Path) -> None:
    """Unmount; a profiler of somebody else on this machine may hold a file of it for a moment."""
    ends = time.monotonic() + 10
    while (done := subprocess.run(["umount", str(disk)], capture_output=True)).returncode:
        assert time.monotonic() < ends, done.stderr
        time.sleep(0.1)


def test_a_full_disk_refuses_and_answers_and_recovers(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m,mode=700", "none", str(disk)])
    if mounted.returncode:
        pytest.skip("needs root to mount a small file system")
    ballast = disk / "ballast"
    try:
        with Server(disk) as server:
            server.send("one", as_of(CHUNKS[0], "one", 0, time.time_ns()))
            server.wait_for(1)
            acknowledged = 1
            ballast.write_bytes(bytes(8 << 20))
            with pytest.raises(AssertionError, match="503"):
                for seq in range(1, 400):
                    body = as_of(CHUNKS[seq % len(CHUNKS)], "one", seq, time.time_ns())
                    status, answer = server.send("one", body)
                    assert status == 200, f"{status} {answer}"
                    acknowledged += 1
            assert b"No space left" in server.get("/readyz")[1]
            assert counted(server.ask("nodes", **{"from": 0}))[0] >= 1
            ballast.unlink()
            status, _ = server.send("one", as_of(CHUNKS[0], "two", 0, time.time_ns()))
            assert status == 200
            chunks, _ = counted(server.wait_for(acknowledged + 1))
            assert chunks == acknowledged + 1
    finally:
        unmount(disk)


def test_tokens_separate_tenants_and_scopes_and_are_revoked_at_once(tmp_path: Path) -> None:
    store = tmp_path / "store"
    name, writes = made_token(store, "lab", "ingest")
    _, reads = made_token(store, "lab", "read")
    _, other = made_token(store, "other", "read")
    body = as_of(CHUNKS[0], "one", 0, time.time_ns())
    with Server(store, "--keep-days", "0", token=writes) as server:
        assert server.send("one", body)[0] == 200
        assert server.get("/v1/nodes")[0] == 403
        server.token = reads
        assert server.send("one", body)[0] == 403
        assert len(server.wait_for(1)) == 1
        server.token = other
        assert server.ask("nodes", **{"from": 0}) == []
        server.token = "sonde_guessed"
        assert server.get("/v1/nodes")[0] == 401
        subprocess.run(
            [sys.executable, "-m", "sonde", "token", "revoke", name, "--store", str(store)],
            check=True,
            capture_output=True,
        )
        server.token = writes
        assert server.send("one", body)[0] == 401


def test_a_client_that_sends_too_much_gets_the_answer(tmp_path: Path) -> None:
    """A connection that is closed while its client sends is reset, and the client would try again
    for ever."""
    with Server(tmp_path / "store") as server:
        url = f"http://127.0.0.1:{server.port}/v1/chunks"
        for size in (17 << 20, 40 << 20):
            answer = http_client.request(
                "POST", url, body=bytes(size), headers={"X-Sonde-Node": "one"},
                deadline_s=30, max_bytes=1 << 20,
            )  # fmt: skip
            assert answer.status == 413


def test_hostile_requests_are_refused_and_others_served(tmp_path: Path) -> None:
    good = as_of(CHUNKS[0], "one", 0, time.time_ns())
    bomb = with_meta(CHUNKS[0], {**_meta(CHUNKS[0]), "raw_len": 10 << 30})
    flipped = bytearray(good)
    flipped[-5] ^= 1
    with Server(tmp_path / "store") as server:
        slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
        for one in slow:
            one.sendall(b"POST /v1/chunks HTTP/1.1\r\nX-Slow: ")
        assert server.send("one", bomb)[0] in (400, 413)
        assert server.send("one", bytes(flipped))[0] == 400
        assert server.send("one", b"")[0] == 400
        assert server.send("", good)[0] == 400
        assert server.send("one", good, Content_Encoding="gzip")[0] == 415
        huge = socket.create_connection(("127.0.0.1", server.port))
        huge.sendall(
            b"POST /v1/chunks HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000000000\r\n\r\n"
        )
        assert b" 413 " in huge.recv(200)
        assert server.send("one", good)[0] == 200
        server.wait_for(1)
        for text in ("' OR 1=1 --", '"; DROP TABLE sample; --', "\x00", "x" * 4000):
            for place in ("node", "name", "user", "series", "kind"):
                status, _ = server.get("/v1/top", **{"from": 0, place: text})
                assert status in (200, 400)
        assert server.get("/v1/top", limit="1; DROP")[0] == 400
        assert server.get("/v1/top", **{"no'such": 1})[0] == 400
        assert counted(server.ask("nodes", **{"from": 0}))[0] == 1
        for one in (*slow, huge):
            one.close()


def _meta(chunk: bytes) -> dict:
    import stored_chunks

    return stored_chunks.meta_of(chunk)


def test_profiles_of_another_agent_are_taken_over_http(tmp_path: Path) -> None:
    body = request(start_ns=time.time_ns() - 10**9).SerializeToString()
    kind = {"Content-Type": "application/x-protobuf"}
    path = "/v1development/profiles"
    with Server(tmp_path / "store") as server:
        for _ in range(2):
            packed = gzip.compress(body, mtime=0)
            headers = {**kind, "Content-Encoding": "gzip"}
            assert server.post(path, packed, headers) == (200, b"")
        assert server.post(path, body[:-3], kind)[0] == 400
        assert server.post(path, body, {"Content-Type": "application/json"})[0] == 415
        server.wait_for(1)
        assert [one["node"] for one in server.ask("nodes", **{"from": 0})] == ["pod-7"]
        assert server.ask("totals", **{"from": 0})["rows"] == 10


def test_many_senders_and_a_recount(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.service", "--agents", "100", "--seconds", "3"]
    command += ["--period", "1", "--store", str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    found = json.loads(done.stdout)

    assert done.returncode == 0, done.stdout
    assert found["stored"] == found["chunks"] >= 200
    assert found["sample_rows_stored"] == found["sample_rows_sent"]
    assert found["not_acknowledged"] == 0


def test_upload_sends_a_recording_once(tmp_path: Path) -> None:
    capture = Path(__file__).parents[1] / "data" / "h200_training.sonde"
    with Server(tmp_path / "store") as server:
        command = [sys.executable, "-m", "sonde", "upload", str(capture), "--node", "gpu"]
        command += ["--server", f"http://127.0.0.1:{server.port}"]
        outputs = [
            subprocess.run(command, check=True, capture_output=True, text=True).stdout
            for _ in range(2)
        ]
        server.wait_for(3)
        wanted = {"from": 0, "kind": "cpu"}
        totals = server.ask("totals", **wanted)
        flame = server.ask("flamegraph", **wanted)

    from sonde.model.profile import ProfileKind
    from sonde.query import queries
    from sonde.query.capture import read
    from sonde.query.session import Session

    direct = queries.profile(Session(read(capture)), ProfileKind.ON_CPU)
    assert outputs[0].startswith("3 chunks sent, 0 were there")
    assert outputs[1].startswith("0 chunks sent, 3 were there")
    assert totals["n"] == pytest.approx(direct.total_events)
    assert totals["ns"] == pytest.approx(direct.total_ns, rel=1e-6)
    assert sum(one["ns"] for one in flame["stacks"]) == pytest.approx(totals["ns"])
    assert any(frame["function"] for frame in flame["frames"])
