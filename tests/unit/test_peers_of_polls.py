# SPDX-License-Identifier: Apache-2.0
"""Whom a thread waits for that waits for any of several descriptors, of real sockets; and how looks
are shared between users and containers."""

from __future__ import annotations

import itertools
import os
import select
import socket
import struct
import time

import pytest

from sonde import procfs
from sonde.collect import awaited_sockets, look_turns
from sonde.collect.awaited_sockets import Awaited
from sonde.collect.look_turns import LookTurns
from sonde.collect.peers import CANDIDATE, CLIENT, PEER, PeerLooks
from waiting_sockets import blocked, rows_found, waiting

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="reads others' system calls: needs root")

CALLS = {
    "poll": "poll",
    "select": "select",
    "epoll": "epoll_wait",
    "timeout": "poll",
    "asyncio": "epoll_wait",
}


@pytest.fixture
def servers():
    """Two servers of this process."""
    with (
        socket.create_server(("127.0.0.1", 0)) as first,
        socket.create_server(("127.0.0.1", 0)) as second,
    ):
        yield first, second


@pytest.mark.parametrize("call", CALLS)
def test_the_one_socket_that_is_polled_leads_to_the_peer(servers, call):
    address = servers[0].getsockname()
    with waiting("AF_INET", address, call=call) as pid, servers[0].accept()[0]:
        rows = rows_found(PeerLooks(), blocked(pid, CALLS[call]))
    assert {(row[1], row[2], row[14]) for row in rows} == {
        (PEER, f"127.0.0.1:{address[1]}", os.getpid())
    }


def test_a_unix_socket_that_is_polled_too(tmp_path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "a.sock"))
        server.listen()
        with (
            waiting("AF_UNIX", str(tmp_path / "a.sock"), call="epoll") as pid,
            server.accept()[0],
        ):
            rows = rows_found(PeerLooks(), blocked(pid, "epoll_wait"))
    assert {(row[1], row[2], row[14]) for row in rows} == {(PEER, "a.sock", os.getpid())}


def test_connections_to_one_process_are_one_peer(servers):
    """A pool of connections: whichever answers, it is the same process."""
    addresses = [one.getsockname() for one in (servers[0], servers[0], servers[1])]
    with (
        waiting("AF_INET", *addresses, call="poll") as pid,
        servers[0].accept()[0],
        servers[0].accept()[0],
        servers[1].accept()[0],
    ):
        rows = rows_found(PeerLooks(), blocked(pid, "poll"))
    assert {(row[1], row[14]) for row in rows} == {(PEER, os.getpid())}


def test_of_several_processes_each_is_a_candidate(servers):
    """Nothing shows which of them the thread waits for."""
    with (
        waiting("AF_INET", servers[0].getsockname(), call="recv") as other,
        servers[0].accept()[0],
        waiting("AF_INET", *(one.getsockname() for one in servers), call="epoll") as pid,
        servers[0].accept()[0],
        servers[1].accept()[0],
    ):
        looks = PeerLooks()
        held = looks._holder
        looks._holder = lambda end, *rest: (
            (other, "b") if end.address.endswith(f":{servers[1].getsockname()[1]}") else
            held(end, *rest)
        )  # fmt: skip
        rows = rows_found(looks, blocked(pid, "epoll_wait"))
    assert {(row[1], row[14]) for row in rows} == {(CANDIDATE, os.getpid()), (CANDIDATE, other)}


def test_a_server_that_waits_for_requests_has_no_peer():
    with waiting("AF_INET", call="listening") as pid:
        assert rows_found(PeerLooks(), blocked(pid, "epoll_wait"), tries=3) == []


def test_a_server_that_polls_is_looked_at_once_in_a_tick(monkeypatch):
    """Its further turns are for threads of which another look may find more."""
    looks = PeerLooks()
    looked = []
    look_at = looks._look_at
    monkeypatch.setattr(looks, "_look_at", lambda *its: looked.append(1) or look_at(*its))
    with waiting("AF_INET", call="listening") as pid:
        rows_found(looks, blocked(pid, "epoll_wait"), tries=1)
    assert len(looked) == 1


def test_pairs_within_a_process_are_looked_up_once_in_a_look(monkeypatch):
    """Any process may poll as many as it likes."""
    pairs = [procfs.OtherEnd("unix", "", number, -1, True) for number in range(1, 200)]
    looks = PeerLooks()
    looks._ends = {1_000 + number: end for number, end in enumerate(pairs)}
    asked = []
    sockets = {str(end.inode) for end in pairs}
    monkeypatch.setattr(procfs, "sockets_of", lambda *_: asked.append(1) or (sockets, False))
    several = Awaited([*looks._ends], is_one_of_several=True)
    monkeypatch.setattr("sonde.collect.peers.awaited_sockets", lambda *_: several)
    assert not looks._look_at((1, 0, 1), {}, time.monotonic() + 60).asked
    assert len(asked) == 1


def test_a_server_that_asked_others_may_wait_for_them(servers):
    address = servers[0].getsockname()
    with waiting("AF_INET", address, call="listening") as pid, servers[0].accept()[0]:
        rows = rows_found(PeerLooks(), blocked(pid, "epoll_wait"))
    assert {(row[1], row[2], row[14]) for row in rows} == {
        (CANDIDATE, f"127.0.0.1:{address[1]}", os.getpid())
    }


def test_a_wait_on_a_connection_that_others_made_is_for_the_next_question():
    with waiting("AF_INET", call="accepted") as pid:
        rows = rows_found(PeerLooks(), blocked(pid), tries=1)
    assert {(row[1], row[2], row[9], row[14]) for row in rows} == {(CLIENT, "", pid, 0)}


@pytest.mark.parametrize("call", ["poll", "epoll"])
def test_of_very_many_descriptors_none_is_looked_at_and_that_is_counted(servers, call):
    with (
        waiting("AF_INET", servers[0].getsockname(), more=600, call=call) as pid,
        servers[0].accept()[0],
    ):
        looks = PeerLooks()
        assert rows_found(looks, blocked(pid, CALLS[call]), tries=1) == []
    assert looks.cut > 0


def test_more_addresses_than_a_few_are_no_candidates(servers, monkeypatch):
    monkeypatch.setattr("sonde.collect.peers.MAX_CANDIDATES", 1)
    with (
        waiting("AF_INET", *(one.getsockname() for one in servers), call="poll") as pid,
        servers[0].accept()[0],
        servers[1].accept()[0],
    ):
        looks = PeerLooks()
        assert rows_found(looks, blocked(pid, "poll"), tries=1) == []
    assert looks.cut > 0


NUMBERS = {"poll": 7, "select": 23, "epoll_wait": 232}


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("poll", (0, 1)),
        ("poll", (1 << 64) - 1),
        ("poll", ((1 << 63) + 8, 0xFFFFFFFF)),
        ("poll", (8, 1 << 63)),
        ("select", (1 << 62, 1, (1 << 64) - 1)),
        ("epoll_wait", ((1 << 64) - 1,)),
        ("epoll_wait", (99_999,)),
    ],
)
def test_arguments_that_make_no_sense_lead_to_nothing(call, arguments, monkeypatch):
    """Any process may call with any arguments."""
    arguments = arguments if isinstance(arguments, tuple) else (arguments, arguments)
    words = [*arguments, *(0,) * (6 - len(arguments)), 0, 0]
    line = " ".join([str(NUMBERS[call]), *map(hex, words)]).encode()
    read = procfs.read_file
    monkeypatch.setattr(
        procfs, "read_file", lambda path, *more: line if "syscall" in path else read(path, *more)
    )
    calls = {number: name for name, number in NUMBERS.items()}
    monkeypatch.setattr(awaited_sockets, "reason_of", lambda number: ("poll", calls[number]))
    try:
        found = awaited_sockets.awaited_sockets(os.getppid(), os.getppid())
    except OSError:
        return
    assert found.inodes == () or found.inodes == []


def test_descriptors_of_each_call_are_read(monkeypatch):
    """Of this process itself: the array, the sets and the instance in its own memory."""
    pid = os.getpid()
    with socket.create_server(("127.0.0.1", 0)) as server, select.epoll() as instance:
        number = server.fileno()
        instance.register(number, select.EPOLLIN)
        raw = struct.pack("=ihh", -1, 1, 0) + struct.pack("=ihh", number, 1, 0)
        monkeypatch.setattr(awaited_sockets, "_memory", lambda *_: [raw])
        inode = os.fstat(number).st_ino
        assert awaited_sockets._of_poll(pid, pid, 4096, 2) == [number]
        assert awaited_sockets._of_epoll(pid, pid, instance.fileno()) == Awaited(
            [inode], is_one_of_several=True
        )
        bits = (1 << number).to_bytes((number // 64 + 1) * 8, "little")
        monkeypatch.setattr(awaited_sockets, "_memory", lambda *_: [bits, b""])
        assert awaited_sockets._of_select(pid, pid, [number + 1, 4096, 8192]) == [number]
        assert awaited_sockets._of_select(pid, pid, [number, 4096, 8192]) == []


def first_parties(turns, waited, count):
    return [turns._parties[who[:2]] for who in itertools.islice(turns.turns(waited, 1, 8), count)]


def test_one_party_with_many_waiting_processes_crowds_out_nobody(monkeypatch):
    """Looks go round between parties, whichever has more processes."""
    monkeypatch.setattr(procfs, "party_of", lambda pid: 1000 if pid < 9_000 else 1001)
    monkeypatch.setattr(look_turns, "MAX_ASKED", 1_000)
    waited = {(pid, 0, pid): 10**12 for pid in range(1, 500)} | {(9_000, 0, 9_000): 10**8}
    turns = LookTurns()
    assert first_parties(turns, waited, 16).count(1001) == 8


def test_looks_that_cost_much_end_the_turns_of_their_party(monkeypatch):
    monkeypatch.setattr(procfs, "party_of", lambda pid: pid)
    waited = {(1, 0, 1): 10**9, (2, 0, 2): 10**9}
    turns = LookTurns()
    seen = []
    for who in turns.turns(waited, 0.1, 8):
        seen.append(who[0])
        turns.charge(who, 0.06 if who[0] == 1 else 0.001)
    assert (seen.count(1), seen.count(2)) == (1, 8)
    assert next(turns.turns(waited, 0.1, 8))[0] == 2


def test_processes_whose_party_is_not_known_yet_have_one_part_together(monkeypatch):
    asked = []
    monkeypatch.setattr(procfs, "party_of", lambda pid: asked.append(pid) or 7)
    monkeypatch.setattr(look_turns, "MAX_ASKED", 3)
    monkeypatch.setattr(look_turns, "MAX_KNOWN", 10)
    waited = {(pid, 0, pid): 10**9 for pid in range(1, 101)}
    turns = LookTurns()
    for _ in range(9):
        assert len([*turns.turns(waited, 1, 1)]) == 100
    assert len(asked) == 27
    assert len(turns._parties) <= 10
