# SPDX-License-Identifier: Apache-2.0
"""A verdict names how long single waits are, and what waits as regular as a delayed
acknowledgement may be."""

from __future__ import annotations

import random

import pytest

from captures import Writer
from sonde.analyze.bound import explain
from sonde.analyze.wait_facts import wait_facts
from sonde.model.causes import Cause
from sonde.recording.timelines import open_timeline

PID = 42
ASK = ("ask", "[python]", "shop.py", 19, "python", "program")
ONE = ("BaseHTTPRequestHandler.handle_one_request", "[python]", "http/server.py", 408, "python")
THREAD = ("ThreadingMixIn.process_request_thread", "[python]", "socketserver.py", 691, "python")
READ = ("SocketIO.readinto", "[python]", "socket.py", 706, "python")
RECV = ("recv", "libc.so.6")
TCP = (("tcp_recvmsg", "[kernel]"), ("schedule", "[kernel]"))
UNIX = (("unix_stream_recvmsg", "[kernel]"), ("schedule", "[kernel]"))
HINT = "delayed acknowledgement of TCP"


@pytest.fixture
def writer():
    return Writer(seconds=10)


@pytest.fixture
def facts(writer, tmp_path):
    def found(cause=Cause.IO):
        timeline = open_timeline([writer.write(tmp_path / "a.sonde")])
        return [*wait_facts(timeline, timeline.totals).get(cause, ())]

    return found


def waits(writer, lengths_ms, reason="socket", stack=(ASK, RECV, *TCP), others=0, call="recvfrom"):
    """A thread that waits as often as there are lengths, and `others` times for 1 ms."""
    known = {(row["pid"]) for row in writer.rows["process"]}
    key = {"pid": PID, "start_ns": PID * 10_000_000}
    if PID not in known:
        key = writer.process(PID, "shop")
    number = writer.stack(*stack)
    writer.single_waits(key, PID, reason, lengths_ms, stack=number, call=call)
    seconds = (sum(lengths_ms) + others) / 1000
    writer.wait(
        *(key, PID, reason, seconds), count=len(lengths_ms) + others, stack=number, call=call
    )
    return key


def around_44(count, spread=2.0):
    rng = random.Random(1)
    return [rng.uniform(44 - spread, 44 + spread) for _ in range(count)]


def test_single_waits_have_their_number_and_length_and_the_hint(writer, facts):
    waits(writer, around_44(100), others=500)
    length, hint = facts()
    assert length.startswith("socket: 100 × 44.")
    assert "(42." in length and "–45." in length and length.endswith(" ms)")
    assert hint.startswith("these are as regular as a delayed acknowledgement of TCP (40 ms): poss")
    assert "TCP_NODELAY" in hint


def test_the_verdict_states_it(writer, tmp_path):
    waits(writer, around_44(100))
    verdict = explain(open_timeline([writer.write(tmp_path / "a.sonde")])).verdicts[0]
    io = next(one for one in verdict.causes if one.key == Cause.IO)
    assert any(HINT in fact for fact in io.facts)
    assert any(HINT in line for line in verdict.evidence)


def test_short_waits_have_their_mean_beside_it(writer, facts):
    waits(writer, [20.0] * 50, others=600)
    assert facts() == ["socket: 50 × 20.0 ms, others: 600 × mean 1.00 ms"]


def test_where_single_waits_are_not_kept_nothing_is_made_up(writer, facts):
    waits(writer, [], others=600)
    assert facts() == []


@pytest.mark.parametrize(
    ("lengths", "stack", "reason"),
    [
        (around_44(100), (ASK, RECV, *UNIX), "socket"),
        (around_44(100, spread=12.0), (ASK, RECV, *TCP), "socket"),
        ([60.0] * 100, (ASK, RECV, *TCP), "socket"),
        (around_44(9), (ASK, RECV, *TCP), "socket"),
        (around_44(20) + [80.0] * 80, (ASK, RECV, *TCP), "socket"),
        (around_44(100), (ASK, RECV, *TCP), "sync to disk"),
    ],
    ids=["unix socket", "irregular", "longer", "few", "a small part", "no socket"],
)
def test_other_waits_get_no_hint(writer, facts, lengths, stack, reason):
    waits(writer, lengths, reason, stack)
    assert len(facts()) == 1


@pytest.mark.parametrize(("address", "hinted"), [("10.0.0.7:5432", True), ("/run/db:1", False)])
def test_in_poll_the_other_end_shows_whether_it_is_tcp(writer, facts, address, hinted):
    key = waits(writer, around_44(100), "poll", (ASK, ("poll", "libc.so.6")), call="poll")
    peer = {"kind": "peer", "name": address, "api": "tcp", "op": "db", "waker_pid": 0}
    writer.add("activity", key, tid=PID, count=3, **peer)
    assert any(HINT in fact for fact in facts()) == hinted


def test_waits_for_the_next_request_are_not_those_for_an_answer(writer, tmp_path):
    """How many short waits each had is not known, and so they have no mean."""
    waits(writer, [200.0] * 20, stack=(THREAD, ONE, READ, RECV, *TCP), others=900)
    waits(writer, [25.0] * 40, stack=(THREAD, ONE, ASK, RECV, *TCP), others=900)
    verdict = explain(open_timeline([writer.write(tmp_path / "a.sonde")])).verdicts[0]
    io = next(one for one in verdict.causes if one.key == Cause.IO)
    assert "socket: 40 × 25.0 ms" in io.facts


def test_a_wait_without_a_stack_is_like_the_others_where_those_are_alike(writer, facts):
    key = waits(writer, [20.0] * 10)
    writer.single_waits(key, PID, "socket", [20.0] * 5, call="recvfrom")
    writer.wait(key, PID, "socket", 0.1, count=5, call="recvfrom")
    assert facts() == ["socket: 15 × 20.0 ms"]
