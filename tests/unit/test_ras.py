# SPDX-License-Identifier: Apache-2.0
"""Answers of NCCL RAS: as NCCL 2.28.9 served them on two H100 while a rank slept (tests/data/ras),
as its sources and its guide write others, and hostile ones. The server is a stub that replays."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from pathlib import Path

import pytest

from sonde.agent.job_finder import listens_at
from sonde.agent.ras_client import MAX_BYTES, ask
from sonde.diagnose import ras

FOLDER = Path(__file__).parents[1] / "data" / "ras"
GREETING = b"SERVER PROTOCOL 2\nOK\nOK\n"
MISSING = b"""{"nccl_version": "2.28.9", "communicators": [{"hash": "0x1", "size": 2,
  "ranks": [{"rank": 0, "pid": 7, "collective_counts": {"AllReduce": 5}}],
  "missing_ranks": [
        {
          "rank": 1,
          "host": "192.0.2.2",
          "pid": 8,
          "cuda_dev": 1,
          "nvml_dev": 1
          "status": {
            "unresponsive": true,
            "considered_dead": false
          }
        }
  ]}]}"""
GUIDE = b"""NCCL version 2.24.3 compiled with CUDA 12.6
Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  26 ranks have launched up to operation 6650
  2 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210
  Rank 2 -- GPU 2 managed by process 483074 on node 172.16.64.210
"""
INCOMPLETE = b"""NCCL version 2.26.2 compiled with CUDA 12.8
Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 2 ranks
  Rank 4 -- GPU 5 managed by process 3487984 on node 172.16.64.213
  Rank 21 -- [process information not found]
"""


def answer(name: str) -> bytes:
    return (FOLDER / name).read_bytes().removeprefix(GREETING)


@pytest.mark.parametrize("name", ["ras_sleep_json.txt", "ras_sleep_text.txt"])
def test_the_rank_that_slept_is_behind(name):
    (comm,) = ras.parse(answer(name)).communicators
    assert ras.behind(comm) == {1: "launched AllReduce 4,009 of 4,010"}
    assert {one.rank: one.pid for one in comm.ranks} == {0: 663, 1: 664}


def test_a_job_that_goes_on_has_nobody_behind():
    report = ras.parse(answer("ras_running_json.txt"))
    assert (report.version, len(report.communicators)) == ("2.28.9", 1)
    assert ras.behind(report.communicators[0]) == {}


def test_a_rank_that_does_not_answer_in_json_without_a_comma():
    (comm,) = ras.parse(MISSING).communicators
    assert ras.behind(comm) == {1: "does not answer"}


def test_texts_of_other_versions():
    (comm,) = ras.parse(GUIDE).communicators
    assert ras.behind(comm) == dict.fromkeys((0, 2), "launched collective 6,649 of 6,650")
    (comm,) = ras.parse(INCOMPLETE).communicators
    assert ras.behind(comm) == {4: "considered dead", 21: "does not answer"}


@pytest.mark.parametrize(
    "raw",
    [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"{", b"{" * 100_000, b"[" * 100_000, b"\xff\xfe"],
)
def test_what_is_no_answer_is_refused(raw):
    with pytest.raises(ValueError, match="it is no"):
        ras.parse(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"communicators": 7}',
        b'{"communicators": [7, {"ranks": [7, {"rank": "x", "pid": -1, "collective_counts": 3}]}]}',
        b'{"communicators": [{"ranks": [{"rank": 1e300}]}]}',
        b'{"communicators": [{"missing_ranks": [{"rank": 99999999999999999999}]}]}',
        b"NCCL version 2.28\n#0-0 (ff) INCOMPLETE\n  The missing ranks: 0-99999999,5-1,7\n",
        b"NCCL version 2.28\n#0-0 (ff) INCOMPLETE\n  The missing ranks: " + b"9" * 300 + b"\n",
        b"NCCL version 2.28\n" + b"#0-0 (ff) MISMATCH\n  Rank 1 -- GPU 0\n" * 50_000,
    ],
)
def test_hostile_answers_are_bounded(raw):
    began_s = time.thread_time()
    report = ras.parse(raw)
    assert sum(len(comm.ranks) for comm in report.communicators) <= 2 * ras.RANKS
    assert time.thread_time() - began_s < 5


def _missing_lists():
    lines = [b"NCCL version 2.28"]
    for at in range(256):
        lines.append(b"#0-0 (%x) INCOMPLETE" % at)
        lines += [b"  The missing ranks: %d-9999999" % (n << 12) for n in range(100)]
    return b"\n".join(lines)


def _wide_json():
    ranks = b'"ranks": [' + b",".join([b"{}"] * 1000) + b"]"
    missing = b'"missing_ranks": [' + b",".join([b"{}"] * 1000) + b"]"
    return b'{"communicators": [' + b",".join([b"{%s,%s}" % (ranks, missing)] * 100) + b"]}"


def _many_functions():
    lines = [b"NCCL version 2.28", b"#0-0 (ff) MISMATCH"]
    for at in range(16_000):
        lines.append(b"  Communicator ranks have different F%d operation counts" % at)
        lines.append(b"  Rank 1 -- GPU 0 managed by process 7 on node a")
    return b"\n".join(lines)


@pytest.mark.parametrize("make", [_missing_lists, _wide_json, _many_functions])
def test_all_communicators_share_one_bound(make):
    raw, began_s = make(), time.thread_time()
    report = ras.parse(raw)
    assert 0 < sum(len(comm.ranks) for comm in report.communicators) <= ras.ALL_RANKS
    assert max(len(comm.ranks) for comm in report.communicators) <= ras.RANKS
    counts = [len(rank.counts) for comm in report.communicators for rank in comm.ranks]
    assert max(counts) <= ras.FUNCTIONS
    assert time.thread_time() - began_s < 5


class Stub:
    """Listens on a free port of this process and answers each line, or does what `rest` does."""

    def __init__(self, rest, greeting=b"SERVER PROTOCOL 2\n"):
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        self.rest, self.greeting, self.lines = rest, greeting, []
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self):
        link, _ = self.server.accept()
        with link, link.makefile("rb") as lines:
            try:
                for line in lines:
                    self.lines.append(line)
                    if line == b"VERBOSE STATUS\n":
                        self.rest(link)
                        return
                    link.sendall(self.greeting if line.startswith(b"CLIENT") else b"OK\n")
            except OSError:
                return

    def close(self):
        self.server.close()
        self.thread.join(5)


def asked(rest, deadline_s=3.0, **more):
    stub = Stub(rest, **more)
    try:
        return ask([os.getpid()], deadline_s, stub.port), stub
    finally:
        stub.close()


def test_the_protocol():
    report, stub = asked(lambda link: link.sendall(answer("ras_sleep_json.txt")))
    assert (report.failed, report.version) == ("", "2.28.9")
    assert stub.lines == [
        b"CLIENT PROTOCOL 2\n", b"TIMEOUT 1\n", b"SET FORMAT JSON\n", b"VERBOSE STATUS\n",
    ]  # fmt: skip


def _drips(link):
    while True:
        link.sendall(b"x")
        time.sleep(0.05)


def _floods(link):
    for _ in range(MAX_BYTES // 65536 + 2):
        link.sendall(b"x" * 65536)


@pytest.mark.parametrize(
    ("rest", "greeting", "why"),
    [
        (_drips, b"SERVER PROTOCOL 2\n", "in time|timed out"),
        (lambda _: time.sleep(1), b"SERVER PROTOCOL 2\n", "in time|timed out"),
        (_floods, b"SERVER PROTOCOL 2\n", "larger than"),
        (lambda link: link.sendall(b"\0" * 99), b"SERVER PROTOCOL 2\n", "no answer"),
        (lambda _: None, b"220 smtp\n", "no NCCL RAS"),
        (lambda _: None, b"x" * 70_000, "no end of a line"),
        (lambda _: None, b"SERVER PROTOCOL " + b"2" * 30_000 + b"\n", "no end of a line"),
    ],
)
def test_a_hostile_server_costs_a_deadline_and_no_more(rest, greeting, why):
    began_s = time.monotonic()
    floods = rest is _floods
    report, _ = asked(rest, 5.0 if floods else 0.5, greeting=greeting)

    assert re.search(why, report.failed)
    assert time.monotonic() - began_s < 6


def test_a_socket_of_another_process_is_not_asked():
    stub = Stub(lambda link: link.sendall(b"no"))
    try:
        assert listens_at(os.getpid(), stub.port) == "127.0.0.1"
        assert ask([os.getppid()], 1.0, stub.port) is None
        assert stub.lines == []
    finally:
        socket.create_connection(("127.0.0.1", stub.port)).close()
        stub.close()
