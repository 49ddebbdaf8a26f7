# SPDX-License-Identifier: Apache-2.0
"""Pieces of one user's mappings do not keep mappings of others from being followed."""

from __future__ import annotations

import platform
import struct
from collections import Counter
from types import SimpleNamespace

import pytest

from sonde.collect import memory
from sonde.collect.collector import Batch
from sonde.collect.memory import (
    FIELDS,
    LEAST_PIECES,
    MAX_PIECES,
    MOST_MAPPINGS,
    PIECES_UP_TO,
    MemoryCollector,
)

FLOODER, OTHER = 7, 8
"""Parties, and pids of theirs."""
STEP = 64
"""Bytes from one mapping to the next."""
HOLES = [(2 * at, 2 * at + 1) for at in range(MAX_PIECES)]
"""What is left of a mapping with many holes."""


class FakeBpf:
    """The maps of the BPF object."""

    def __init__(self):
        self.mappings: dict[tuple[int, int], tuple[int, ...]] = {}
        self.ends: dict[tuple[int, int], int] = {}
        self.counts: dict[int, int] = {}
        self.followed = 0

    def fields(self, _rows):
        return list(FIELDS)

    def entries(self, name):
        if name == "mapping_ends":
            return [(*place, start) for place, start in self.ends.items()]
        return [(*place, *mapping) for place, mapping in self.mappings.items()]

    def set_hash(self, name, key, value):
        if name == "mappings":
            address, pid, _ = struct.unpack("=QII", key)
            if len(self.mappings) >= MOST_MAPPINGS and (address, pid) not in self.mappings:
                raise OSError(7, "Argument list too long")
            self.mappings[address, pid] = struct.unpack("=QQQIIIIQ", value)
        elif name == "mapping_ends":
            address, pid, _ = struct.unpack("=QII", key)
            (self.ends[address, pid],) = struct.unpack("=Q", value)
        elif name == "mapping_parties":
            self.counts[struct.unpack("=Q", key)[0]] = struct.unpack("=Q", value)[0]
        elif name == "mappings_followed":
            self.followed = struct.unpack("=Q", value)[0]

    def delete_hash(self, name, key):
        if name in ("mappings", "mapping_ends"):
            address, pid, _ = struct.unpack("=QII", key)
            entries = self.mappings if name == "mappings" else self.ends
            if (address, pid) not in entries:
                raise FileNotFoundError
            del entries[address, pid]

    def of(self, party: int) -> int:
        """How many of a party are followed."""
        return sum(1 for mapping in self.mappings.values() if mapping[-1] == party)


class Machine:
    """Processes whose mappings have holes, and the collector that follows them."""

    def __init__(self, monkeypatch):
        self.bpf = FakeBpf()
        self.spaces: dict[int, list[tuple[int, int]]] = {}
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")
        kernel = SimpleNamespace(load=lambda _wanted: self.bpf)
        self.collector = MemoryCollector(kernel, stack_gap_ns=1)
        monkeypatch.setattr(self.collector, "_space_of", lambda pid, _: self.spaces.get(pid))

    def map(self, party: int, number: int, pieces: list[tuple[int, int]]) -> None:
        """`number` more mappings of a party, of each of which these pieces are left."""
        space = self.spaces.setdefault(party, [])
        first = len(space)
        for at in range(number):
            base = (first + at) * STEP
            self.bpf.mappings[base, party] = (0, 5, STEP, party, 1, 4, 0, party)
            self.bpf.ends[base + STEP, party] = base
            space += [(base + since, base + until) for since, until in pieces]

    def compare(self) -> Batch:
        batch = Batch()
        self.collector._compare(batch, 0)
        return batch

    @property
    def lost(self) -> int:
        return self.collector.losses().get("mappings", 0)


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(memory.Attached, "losses", lambda _self: {})
    return Machine(monkeypatch)


def test_one_users_pieces_leave_room_for_mappings_of_others(machine):
    machine.map(FLOODER, MOST_MAPPINGS // 4, HOLES)
    machine.compare()

    assert machine.bpf.followed == len(machine.bpf.mappings) == PIECES_UP_TO
    assert machine.bpf.counts == {FLOODER: PIECES_UP_TO}
    assert machine.lost == MOST_MAPPINGS * 4 - PIECES_UP_TO


@pytest.mark.parametrize("user", [0, FLOODER])
def test_all_pieces_are_followed_where_there_is_room(machine, user):
    machine.map(user, PIECES_UP_TO // MAX_PIECES, HOLES)
    machine.compare()
    machine.compare()

    assert len(machine.bpf.mappings) == PIECES_UP_TO
    assert machine.lost == 0


def test_who_comes_later_gets_as_many_pieces(machine):
    machine.map(FLOODER, 2_000, HOLES)
    machine.compare()
    machine.map(OTHER, 500, HOLES)
    batch = machine.compare()

    assert machine.bpf.of(OTHER) == 500 + (PIECES_UP_TO - 2_500) // 2
    assert len(machine.bpf.mappings) == machine.bpf.followed == PIECES_UP_TO
    assert machine.bpf.counts == {who: machine.bpf.of(who) for who in (FLOODER, OTHER)}
    assert len(batch.rows["sample"]) == 500  # of each mapping, what its holes have
    assert {row[-1] for row in batch.rows["sample"]} == {STEP - MAX_PIECES}


def test_a_piece_that_is_followed_stays_while_there_is_room(machine):
    machine.map(FLOODER, 10, HOLES)
    machine.compare()
    before = dict(machine.bpf.mappings)
    machine.map(OTHER, 100, HOLES)
    machine.compare()

    assert before.items() <= machine.bpf.mappings.items()


def test_mappings_that_fill_the_room_leave_few_pieces_to_each(machine):
    machine.map(FLOODER, PIECES_UP_TO, [(0, 1), (2, 3)])
    machine.map(OTHER, 100, HOLES)
    machine.compare()

    assert machine.bpf.of(OTHER) == 100 + LEAST_PIECES // 2
    assert machine.bpf.of(FLOODER) == PIECES_UP_TO + LEAST_PIECES // 2


def test_what_goes_of_a_mapping_without_a_place_for_its_pieces_is_reported(machine):
    machine.map(FLOODER, 1, HOLES)
    first = machine.compare()
    machine.spaces[FLOODER] = []
    gone = machine.compare()

    assert [row[-1] for row in first.rows["sample"]] == [STEP - MAX_PIECES]
    assert sum(row[-1] for row in gone.rows["sample"]) == MAX_PIECES
    assert not machine.bpf.mappings
    assert machine.bpf.followed == 0


def test_pieces_of_a_process_that_is_gone_are_forgotten(machine):
    machine.map(FLOODER, 5, HOLES)
    machine.compare()
    machine.spaces.clear()
    batch = machine.compare()

    assert not machine.bpf.mappings
    assert not batch.rows.get("sample")
    assert machine.lost == 0


@pytest.mark.parametrize("ended", [False, True], ids=["it runs", "it has ended"])
def test_ends_that_no_mapping_has_are_swept(machine, ended):
    """Two threads of one process can leave them; nothing else would delete them."""
    machine.map(FLOODER, 5, HOLES[:1])
    machine.compare()
    own = dict(machine.bpf.ends)
    assert len(own) == 5
    machine.bpf.ends.update({(at * STEP + 7, FLOODER): at * STEP for at in range(1_000)})
    if ended:
        machine.spaces.clear()
        own = {}
    machine.compare()
    machine.compare()

    assert machine.bpf.ends == own


def test_an_end_is_not_swept_that_belongs_to_a_mapping_by_the_next_comparison(machine):
    """Its mapping went between the two readings, and another one ends there."""
    machine.bpf.ends[STEP, OTHER] = 0
    machine.compare()
    machine.map(OTHER, 1, [(0, STEP)])
    machine.compare()
    machine.compare()

    assert machine.bpf.ends == {(STEP, OTHER): 0}


def test_equal_numbers_of_pieces():
    assert memory.pieces_by_party(Counter({1: 5, 2: 3}), 0) == {1: 5, 2: 3}
    found = memory.pieces_by_party(Counter({1: 99_999, 2: 3, 0: 99_999}), PIECES_UP_TO - 5_003)
    assert found == {1: 2_500, 2: 3, 0: 2_500}
    assert memory.pieces_by_party(Counter({1: 9_999}), MOST_MAPPINGS) == {1: LEAST_PIECES}
