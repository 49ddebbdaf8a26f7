# SPDX-License-Identifier: Apache-2.0
"""Interfaces of users' own network namespaces: what is read has a bound, shared by party."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from sonde import procfs
from sonde.collect.host import files
from sonde.collect.host.network import (
    FEW_INTERFACES,
    MAX_INTERFACES,
    MAX_NAMESPACES,
    MAX_OF_PARTY,
    MAX_OTHERS,
    ROOT,
    Network,
    share_interfaces,
)
from sonde.collect.polling import Points
from sonde.sinks.plain_series import MAX_OF_NAMESPACES

HEAD = "Inter-| Receive\n face |bytes\n"


class Machine:
    """A /proc with network namespaces: by a process in each, its party and its interfaces."""

    def __init__(self, proc, monkeypatch):
        self.proc = proc
        self.parties = {}
        self.turn = 0
        self.write("self", 2)
        (proc / "net").mkdir()
        (proc / "net/softnet_stat").write_text("0 0 0\n")
        monkeypatch.setattr(procfs, "party_of", lambda pid: self.parties[pid])
        self.watched = Network(proc)
        self.watched._processes = self

    def namespaces(self):
        return [(1, 0), *((1_000 + pid, pid) for pid in self.parties)]

    def write(self, pid, interfaces):
        folder = self.proc / str(pid) / "net"
        folder.mkdir(parents=True, exist_ok=True)
        lines = (f"i{pid}x{n}: " + f"{self.turn} " * 16 for n in range(interfaces))
        (folder / "dev").write_text(HEAD + "".join(f"{line}\n" for line in lines))
        (folder / "snmp").write_text(f"IcmpMsg: InType{self.turn}\nIcmpMsg: 1\n")
        (folder / "netstat").write_text("")

    def add(self, pid, party, interfaces):
        self.parties[pid] = party
        self.write(pid, interfaces)

    def poll(self):
        points = Points()
        self.watched._read(points)
        return points.metrics


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


def interfaces_of(rows):
    return Counter(
        name.partition("x")[0]
        for name in {json.loads(row[2])["network.interface.name"] for row in rows}
    )


def test_a_user_with_many_namespaces_and_interfaces_takes_one_small_share(machine):
    for pid in range(100, 100 + MAX_NAMESPACES - 2):
        machine.add(pid, 1000, 253)
    machine.add(7, -7, 3)  # a container
    machine.watched.open()
    for machine.turn in range(1, 4):
        for pid in machine.parties:
            machine.write(pid, 3 if pid == 7 else 253)
        machine.write("self", 2)
        found = interfaces_of(machine.poll())
        assert found.pop("iself") == 2
        assert found.pop("i7") == 3
        assert sum(found.values()) == MAX_OF_PARTY
        assert len(found) == MAX_NAMESPACES - 2  # each of that user's namespaces has some
    points = Points()
    machine.watched._look(points)
    (left_out,) = [r[3] for r in points.metrics if r[1] == "sonde.network.interfaces_left_out"]
    assert left_out == (MAX_NAMESPACES - 2) * 253 - MAX_OF_PARTY


def test_all_others_together_are_far_below_what_counters_remember():
    party_of = {inode: inode for inode in range(MAX_NAMESPACES - 1)}
    shares = share_interfaces(party_of, dict.fromkeys(party_of, 512))
    assert sum(shares.values()) == MAX_OTHERS
    assert max(shares.values()) - min(shares.values()) <= 1
    series = (MAX_OTHERS + MAX_INTERFACES) * 8 + MAX_NAMESPACES * 12
    assert series < files.MAX_SERIES / 4
    assert MAX_OTHERS * 8 + (MAX_NAMESPACES - 1) * 12 <= MAX_OF_NAMESPACES


def test_namespaces_of_root_share_what_others_leave():
    party_of = {1: ROOT, 2: ROOT, 3: 1000, 4: -7}
    wanted = {1: 400, 2: 400, 3: 400, 4: FEW_INTERFACES}
    shares = share_interfaces(party_of, wanted)
    assert shares[3] == MAX_OF_PARTY
    assert shares[4] == FEW_INTERFACES
    assert shares[1] == shares[2] == (MAX_OTHERS - MAX_OF_PARTY - FEW_INTERFACES) / 2


def test_of_a_namespace_with_thousands_only_the_beginning_is_generated(machine, monkeypatch):
    machine.add(100, 1000, 14_000)
    machine.watched.open()
    sizes = []
    pread = files.os.pread
    monkeypatch.setattr(files.os, "pread", lambda *a: sizes.append(len(b := pread(*a))) or b)
    machine.poll()
    assert sum(sizes) < 40_000


def test_names_of_counters_that_a_user_adds_to_are_not_remembered(machine):
    machine.add(100, 1000, 1)
    machine.watched.open()
    for machine.turn in range(50):
        machine.write(100, 1)
        machine.poll()
    assert all(not it.reported for it in machine.watched._namespaces.values())
