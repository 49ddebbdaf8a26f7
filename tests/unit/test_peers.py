# SPDX-License-Identifier: Apache-2.0
"""Who is at the other end of a socket that a thread waits on, of real sockets."""

from __future__ import annotations

import os
import socket

import pytest

from sonde import procfs
from sonde.collect import peers
from sonde.collect.peers import PeerLooks
from waiting_sockets import blocked, found, waiting

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="reads others' system calls: needs root")


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6"])
def test_a_thread_that_connected_waits_for_the_process_at_the_other_end(family):
    host = {"AF_INET": "127.0.0.1", "AF_INET6": "::1"}[family]
    shown = {"AF_INET": "127.0.0.1", "AF_INET6": "[::1]"}[family]
    with socket.create_server((host, 0), family=getattr(socket, family)) as server:
        port = server.getsockname()[1]
        with waiting(family, (host, port)) as pid, server.accept()[0]:
            rows = found(PeerLooks(), blocked(pid), blocked(os.getpid()))
            name = procfs.with_comm(procfs.scripts_of([os.getpid()])[0] or "", "")
    assert {(address, protocol, tid, peer) for address, protocol, _, tid, peer in rows} == {
        (f"{shown}:{port}", "tcp", pid, os.getpid())
    }
    assert all(name in row[2] for row in rows)


def test_ipv4_within_ipv6_is_the_same_connection():
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        with waiting("AF_INET", ("127.0.0.1", port)) as pid, server.accept()[0]:
            (row,) = found(PeerLooks(), blocked(pid))
    assert row[0] == f"127.0.0.1:{port}"
    assert row[4] == os.getpid()


@pytest.mark.parametrize("address", ["{folder}/a.sock", "\0sonde-test-{pid}\n"])
def test_unix_sockets(address, tmp_path):
    address = address.format(folder=tmp_path, pid=os.getpid())
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        with waiting("AF_UNIX", address) as pid, server.accept()[0] as accepted:
            (row,) = found(PeerLooks(), blocked(pid))
            end = procfs.unix_end(os.fstat(accepted.fileno()).st_ino)
    shown = f"@sonde-test-{os.getpid()}\\x0a" if address[0] == "\0" else "a.sock"
    assert row[:2] == (shown, "unix")
    assert row[4] == os.getpid()
    assert end is not None
    assert not end.asked


def test_a_thread_that_waits_for_the_next_request_has_no_peer():
    """It did not connect: who asks is no cause of its wait."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        waiting("AF_INET", server.getsockname()),
        server.accept()[0] as accepted,
    ):
        inode = os.fstat(accepted.fileno()).st_ino
        end = procfs.TcpTables(os.getpid()).of(inode)
        listening = procfs.TcpTables(os.getpid()).of(os.fstat(server.fileno()).st_ino)
    assert end is not None
    assert not end.asked
    assert listening is None


def test_short_waits_and_other_calls_are_not_looked_at(monkeypatch):
    monkeypatch.setattr(PeerLooks, "_look_at", lambda *_: pytest.fail("looked"))
    looks = PeerLooks()
    short = blocked(1, ns=1_000)
    assert looks.rows(0, [short, blocked(1, "accept4"), blocked(1, "nanosleep")]) == []


def test_looks_end_with_their_cpu_time_and_come_back(monkeypatch):
    ran = []
    monkeypatch.setattr(PeerLooks, "_look", lambda *_: ran.append(1) or [])
    spent = iter([0.0, 1.0] * 9)
    monkeypatch.setattr(peers, "_spent_s", lambda: next(spent))
    looks = PeerLooks()
    looks.rows(0, [])
    looks.rows(0, [])
    assert len(ran) == 1
    looks._since_s -= 2 / peers.SHARE
    looks.rows(0, [])
    assert len(ran) == 2


def test_of_very_many_sockets_a_bounded_number_is_read_and_that_is_counted(monkeypatch):
    """On both sides: the tables of the namespace, and the descriptors of who may answer."""
    monkeypatch.setattr(peers, "MAX_DESCRIPTORS", 3)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        waiting("AF_INET", server.getsockname(), more=200) as pid,
        server.accept()[0],
    ):
        looks = PeerLooks()
        rows = found(looks, blocked(pid), tries=3)
    assert all(row[4] != pid for row in rows)
    assert looks.cut > 0
    monkeypatch.setattr("sonde.procfs.connections.MAX_TABLE_BYTES", 200)
    assert procfs.TcpTables(os.getpid()).is_cut


def test_what_is_remembered_is_bounded(monkeypatch):
    """Of a process that connects to very many addresses, on a machine of very many processes."""
    monkeypatch.setattr(procfs, "may_hold", lambda _: list(range(100_000)))
    monkeypatch.setattr(PeerLooks, "_has", lambda *_: False)
    looks = PeerLooks()
    for number in range(3_000):
        end = procfs.OtherEnd("tcp", f"127.0.0.1:{number}", 1 + number, 0, True)
        if number < 40 or number > 2_990:
            looks._holder(end, [], 0.0)
        peers._keep(looks._ends, number, end)
    assert len(looks._ends) == peers.MAX_KNOWN
    assert len(looks._searches) == peers.MAX_SEARCHES
    assert all(len(one.waiting) <= peers.MAX_SEARCHED for one in looks._searches.values())
    assert looks.cut == 49
