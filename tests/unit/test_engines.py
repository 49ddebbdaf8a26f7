# SPDX-License-Identifier: Apache-2.0
"""Which Rubies and PHPs of a machine are looked into, how many of whose, and how their frames are
reached."""

from __future__ import annotations

import struct
from sys import getsizeof
from types import SimpleNamespace

import pytest

from sonde import _native
from sonde.agent.stacks import aligned, moved_inward
from sonde.model.code import Frame, KnownFrame
from sonde.procfs.party_memory import PartyMemory
from sonde.resolve.naming_budget import NamingBudget
from sonde.unwind import engines
from sonde.unwind.attempts import ATTEMPTS, OVER_S, RETRY_S
from sonde.unwind.chain import CHAIN_FRAME, RUNTIME, Access, FoundEngine, RootKind
from sonde.unwind.engines import (
    EMPTY_LOOPS,
    MAX_ENGINES,
    MAX_NOTICES,
    PARTS,
    REST,
    UNREAD,
    Engine,
    Engines,
)

USER = 1000
BIAS = 0x7000_0000_0000
LOOP = (0x1000, 0x2000, 0x500, 0x600)
RUBY = FoundEngine("ruby", "3.1.2", Access.MODULE, 0x3000, LOOP, (0, 0))
PHP = FoundEngine("php", "20220829,NTS", Access.ADDRESS, 0x4000, LOOP, (0, 0))
KERNEL = struct.Struct("<5Q16H")


class Place:
    """The two words of a thread's variable, in a process's memory."""

    words: tuple[int, int] = (1, 8)
    fails = False

    def __init__(self, *key):
        pass

    def read_at(self, size, at):
        if Place.fails:
            raise OSError("gone")
        return struct.pack("<2Q", *Place.words)[:size]

    def close(self):
        pass


class Machine:
    """Engines, and what their parties have time for."""

    def __init__(self):
        self.over = set()
        budget = NamingBudget(is_limited=False)
        budget.is_over = lambda party: party in self.over
        self.engines = Engines(None, budget)

    def load(self, pid, party=USER, found=RUBY):
        process = SimpleNamespace(pid=pid, key=(pid, 1), party=party, generated_code=None)
        return self.engines.load(process, found, BIAS, False)


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(engines.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def machine(monkeypatch, clock):
    Place.words, Place.fails = (1, 8), False
    monkeypatch.setattr(engines, "ProcessMemory", Place)
    return Machine()


def test_ruby_is_reached_through_the_table_of_modules(machine):
    runtime, raw = machine.load(1)
    assert runtime == RUNTIME
    root, *loop, kind, module, stride, newest, size = KERNEL.unpack(raw)[:10]
    assert (root, kind, module, stride) == (8, RootKind.OF_MODULE, 1, 16)
    assert loop == [it + BIAS for it in LOOP]
    assert (newest, size) == (16, 64)


def test_php_is_reached_by_its_globals(machine):
    _, raw = machine.load(1, found=PHP)
    root, *_, kind, _, _, newest = KERNEL.unpack(raw)[:9]
    assert (root, kind, newest) == (BIAS + 0x4000 + 488, RootKind.AT_ADDRESS, 0xFFFF)


@pytest.mark.parametrize(
    ("access", "words", "root"),
    [(Access.THREAD, (0, 0), -0x40), (Access.SLOT, ((1 << 64) - 0x40, 0), -0x40)],
)
def test_a_thread_variable_may_lie_at_a_fixed_offset(machine, access, words, root):
    Place.words = words
    found = FoundEngine(
        "ruby", "3.3.8", access, -0x40 if access == Access.THREAD else 1, LOOP, (0, 0)
    )
    assert KERNEL.unpack(machine.load(1, found=found)[1])[:6:5] == (
        root % 2**64,
        RootKind.OF_THREAD,
    )


def test_a_party_has_a_part_of_all_engines(machine):
    for pid in range(1, MAX_ENGINES + 1):
        machine.load(pid)
    assert machine.engines.usage()["engines"] == MAX_ENGINES // PARTS
    assert machine.load(999, USER + 1) is not None
    assert machine.engines.refused == MAX_ENGINES - MAX_ENGINES // PARTS
    assert len(machine.engines.take_refusals()) == MAX_NOTICES


def test_root_has_as_many_engines_as_there_may_be(machine):
    for pid in range(1, MAX_ENGINES + 10):
        machine.load(pid, 0)
    assert machine.engines.usage()["engines"] == MAX_ENGINES


def test_one_that_ended_makes_room(machine):
    for pid in range(1, MAX_ENGINES // PARTS + 1):
        machine.load(pid)
    machine.engines.forget(1)
    assert machine.load(1) is not None


def test_who_has_no_time_left_is_tried_again(machine, clock):
    machine.over.add(USER)
    for _ in range(2 * ATTEMPTS):
        assert machine.load(1) is None
        clock[0] += OVER_S + 0.1
        assert machine.engines.due(clock[0]) == [1]
    machine.over.clear()
    assert machine.load(1) is not None
    assert machine.engines.due(clock[0]) == []


@pytest.mark.parametrize("words", [(0, 0), (1 << 20, 8), (1, 1 << 40)])
def test_a_program_that_just_begins_is_tried_again_and_then_refused(machine, clock, words):
    Place.words = words
    for attempt in range(ATTEMPTS):
        assert machine.engines.due(clock[0]) == ([1] if attempt else [])
        assert machine.load(1) is None
        clock[0] += RETRY_S + 0.1
    assert machine.engines.due(clock[0]) == []
    ((_, reason),) = machine.engines.take_refusals()
    assert reason == "Ruby: its memory cannot be read"


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (("ruby", "2.7.8", 3, 1, LOOP), "Ruby 2.7: its layout is not known"),
        (("ruby", "9" * 500, 3, 1, LOOP), "Ruby: its version cannot be read"),
        (("ruby", "3.1.2", 0, 0, LOOP), "Ruby: where a thread's frames begin was not found"),
        (("ruby", "3.1.2", 3, 1, (0, 0, 0, 0)), "Ruby: its evaluation loop was not found"),
        (("php", "20190902,NTS", 1, 1, LOOP), "PHP of API 20190902: its layout is not known"),
        (("php", "20220829,TS", 0, 0, LOOP), "PHP: a build for threads (ZTS)"),
        (("php", "20220829,NTS,debug", 1, 1, LOOP), "PHP: a debug build"),
        (("php", "", 1, 1, LOOP), "PHP: its version cannot be read"),
    ],
)
def test_what_is_not_known_is_refused_once_with_its_reason(machine, found, reason):
    engine = FoundEngine(*found, (0, 0))
    for _ in range(3):
        assert machine.load(7, found=engine) is None
    assert machine.engines.take_refusals() == [((7, 1), reason)]
    assert machine.engines.take_refusals() == []
    assert machine.engines.usage() == {"engines": 0, "engines_refused": 1}


def test_a_frame_that_cannot_be_read_has_no_name_and_markers_are_known(machine):
    Place.fails = False
    process = SimpleNamespace(pid=1, key=(1, 1), party=USER)
    engine = Engine(process, RUBY, BIAS, False, None)
    Place.fails = True
    cache = _native.FrameCache()
    assert engine.frame(1 << 63 | 0x1000 | CHAIN_FRAME, 1 << 63 | 8, cache) is UNREAD["ruby"]
    assert engine.frame(1 << 63 | CHAIN_FRAME, 1 << 63 | 8, cache) is EMPTY_LOOPS["ruby"]
    assert engine.frame(1 << 63 | CHAIN_FRAME, 1 << 63, cache) is REST


def test_paths_of_an_engine_count_as_memory_of_its_party(machine, monkeypatch):
    monkeypatch.setattr(engines, "shown_path", lambda path, _: path)
    most_bytes = 1 << 20
    of_all = PartyMemory(most_bytes)
    places = [SimpleNamespace(pid=pid, key=(pid, 1), party=USER) for pid in range(1, 17)]
    made = [Engine(it, RUBY, BIAS, False, None, of_all) for it in places]
    for engine in made:
        for number in range(engines.MAX_FILES):
            engine._shown(f"/{number}" + 250 * "\U0001f600")
        assert engine.held_bytes >= sum(map(getsizeof, engine._files._young))
        assert engine.held_bytes <= engines.MAX_FILE_BYTES + 2_000
        engine._count()
    assert 0 < of_all.bytes <= most_bytes


def known(name):
    frame = Frame("jit" if name.islower() else "user", name, "")
    return EMPTY_LOOPS["ruby"] if name == "-" else KnownFrame(hash(name), frame)


def names(frames):
    return "".join("-" if it is EMPTY_LOOPS["ruby"] else it.frame.function for it in frames)


@pytest.mark.parametrize(
    ("frames", "loops", "leaf", "rest", "expected"),
    [
        # a is about to be entered: the loop X took it, the loop Y took X's, and Y's are left over
        ("KNaXbcYde", [(2, 3), (4, 6)], 1, 7, "KaNbcXdeY"),
        ("NXa", [], 0, 2, "aNX"),
        ("NaXb", [(1, 2)], 0, 4, "NaXb"),
    ],
)
def test_frames_of_a_loop_that_is_not_there_yet_go_to_the_loops_that_run_them(
    frames, loops, leaf, rest, expected
):
    assert names(moved_inward([known(it) for it in frames], loops, leaf, rest)) == expected


def test_frames_of_a_loop_that_is_about_to_end_go_to_the_loops_that_run_them():
    assert names(aligned([known(it) for it in "bXcY-Z"], [(0, 1), (2, 3)])) == "XbYcZ"
