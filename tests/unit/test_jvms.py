# SPDX-License-Identifier: Apache-2.0
"""How much the JVMs of a machine may hold, whatever code they generate and however often."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest

from sonde.resolve.naming_budget import NamingBudget
from sonde.unwind import jvm
from sonde.unwind.hotspot_code import MAX_ROWS
from sonde.unwind.jvm import (
    MAX_ALL_BLOBS,
    MAX_ALL_ROWS,
    MAX_JVMS,
    MAX_PUT_PAUSE_S,
    PARTS,
    PUT_SHARE,
    Jvms,
)

USER = 1000


class Maps:
    """The kernel's, in place of it."""

    def __init__(self):
        self.tables = set()
        self.put = 0
        self.is_full = False

    def add_rules(self, rules, end):
        if self.is_full:
            raise OSError(errno.ENOSPC, "full")
        self.put += 1
        self.tables.add(self.put)
        return self.put

    def drop_table(self, table):
        self.tables.remove(table)


class Code:
    """What a JVM that always has more code generates, up to what it may have."""

    def __init__(self):
        self.is_behind = self.has_replaced = False
        self.left_out = self.rows = 0
        self.bounds = (1, 9)
        self.most_rows = MAX_ROWS
        self.blobs = 1

    def __len__(self):
        return self.blobs

    def rules(self):
        return [(1, 0), (2, 0)]


class ChangingJvm:
    def __init__(self, process, exports, memory_of_all=None):
        self.code = Code()
        self.is_quiet = False

    def refresh(self):
        self.code.rows = max(self.code.rows, self.code.most_rows)
        return not self.is_quiet

    def close(self):
        pass


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(jvm.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def put_takes(monkeypatch):
    """CPU time of putting one table into the kernel, in a list of one."""
    takes_s, used_s = [0.0], [0.0]

    def thread_time():
        used_s[0] += takes_s[0]
        return used_s[0]

    monkeypatch.setattr(jvm.time, "thread_time", thread_time)
    return takes_s


@pytest.fixture
def jvms(monkeypatch, clock):
    monkeypatch.setattr(jvm, "Jvm", ChangingJvm)
    monkeypatch.setattr(jvm._native, "exported_addresses", lambda *_: {})
    return Jvms(Maps(), SimpleNamespace(budget=NamingBudget(is_limited=False)))


def process(pid, party=USER):
    return SimpleNamespace(
        pid=pid, key=(pid, 1), party=party, generated_code=None, forget_frames=lambda: None
    )


def test_a_party_has_a_part_of_all_jvms(jvms):
    for pid in range(1, MAX_JVMS + 1):
        jvms.load(process(pid), 0, 0)
    assert jvms.usage()["jvms"] == MAX_JVMS // PARTS
    jvms.load(process(999, USER + 1), 0, 0)
    assert jvms.usage()["jvms"] == MAX_JVMS // PARTS + 1


def test_root_has_as_many_jvms_as_there_may_be(jvms):
    for pid in range(1, MAX_JVMS + 10):
        jvms.load(process(pid, 0), 0, 0)
    assert jvms.usage()["jvms"] == MAX_JVMS


def test_rules_of_all_jvms_and_of_a_party_are_bounded(jvms):
    for party in range(1, 9):
        for number in range(3):
            jvms.load(process(10 * party + number, party), 0, 0)
    rows = {}
    for it in jvms._loaded.values():
        rows[it.party] = rows.get(it.party, 0) + it.jvm.code.rows
    assert sum(rows.values()) == MAX_ALL_ROWS
    assert max(rows.values()) == MAX_ALL_ROWS // PARTS


def test_code_of_all_jvms_and_of_a_party_is_bounded(jvms):
    for party in range(1, 9):
        for number in range(3):
            one = process(10 * party + number, party)
            jvms.load(one, 0, 0)
            if one.generated_code is not None:
                one.generated_code.code.blobs = one.generated_code.code.most_blobs
    blobs = {}
    for it in jvms._loaded.values():
        blobs[it.party] = blobs.get(it.party, 0) + it.jvm.code.blobs
    assert sum(blobs.values()) == MAX_ALL_BLOBS
    assert max(blobs.values()) == MAX_ALL_BLOBS // PARTS


def test_who_has_its_part_of_the_code_keeps_no_others_jvm_out(jvms):
    one = process(1)
    jvms.load(one, 0, 0)
    one.generated_code.code.blobs = MAX_ALL_BLOBS // PARTS
    assert jvms.load(process(2), 0, 0) is None
    assert jvms.usage()["jvms"] == 1
    jvms.load(process(3, USER + 1), 0, 0)
    assert jvms.usage()["jvms"] == 2


def turns(jvms, clock, one, seconds, settles=True):
    """How often it was put into the kernel in that time, asked for at each tick."""
    before = jvms._maps.put
    for _ in range(int(seconds / 0.05)):
        clock[0] += 0.05
        jvms.load(one, 0, 0)
        if settles:
            jvms.settle(one.pid)
    return jvms._maps.put - before


def test_a_jvm_that_warms_up_is_in_the_kernel_as_soon_as_it_is_looked_at(jvms, clock, put_takes):
    put_takes[0] = 0.005
    one = process(1)
    jvms.load(one, 0, 0)
    assert jvms._maps.put == 1
    assert turns(jvms, clock, one, 8) >= 25
    assert len(jvms._maps.tables) == 1


def test_a_part_of_the_code_is_followed_at_once_by_all_of_it(jvms, clock, put_takes):
    put_takes[0] = 0.3
    one = process(1)
    jvms.load(one, 0, 0)
    jvms.settle(1)
    code = one.generated_code.code
    clock[0] += 60
    code.is_behind = True
    jvms.load(one, 0, 0)
    assert jvms._maps.put == 2
    clock[0] += 0.05
    jvms.load(one, 0, 0)  # it is still being read
    assert jvms._maps.put == 2
    code.is_behind = False
    one.generated_code.is_quiet = True
    clock[0] += 0.3
    jvms.load(one, 0, 0)
    assert jvms._maps.put == 3
    clock[0] += 0.3
    one.generated_code.is_quiet = False
    jvms.load(one, 0, 0)
    assert jvms._maps.put == 3  # that table was whole


def test_large_tables_of_a_jvm_whose_code_keeps_changing_take_a_share_of_a_core(
    jvms, clock, put_takes
):
    put_takes[0] = 0.3
    one = process(1)
    jvms.load(one, 0, 0)
    put = turns(jvms, clock, one, 60)
    assert PUT_SHARE * 0.8 <= put * put_takes[0] / 60 <= PUT_SHARE
    looked_s = jvms._loaded[1].looked_s
    assert clock[0] - looked_s <= 0.3  # it is looked at as often as before


def test_a_change_that_has_to_wait_is_not_forgotten(jvms, clock, put_takes):
    put_takes[0] = 0.5
    one = process(1)
    jvms.load(one, 0, 0)
    turns(jvms, clock, one, 40)
    one.generated_code.is_quiet = True
    before = jvms._maps.put
    clock[0] += MAX_PUT_PAUSE_S
    assert jvms.due(clock[0]) == [1]
    jvms.load(one, 0, 0)
    assert jvms._maps.put == before + 1


def test_a_process_that_is_not_loaded_holds_two_tables_at_most(jvms, clock):
    one = process(1)
    jvms.load(one, 0, 0)
    assert turns(jvms, clock, one, 20, settles=False) > 3
    assert len(jvms._maps.tables) == 2
    jvms.forget(1)
    assert not jvms._maps.tables


def test_where_the_kernel_has_no_room_it_is_tried_ever_more_rarely(jvms, clock):
    jvms._maps.is_full = True
    one = process(1)
    turns(jvms, clock, one, 100)
    assert 8 <= jvms.left_out <= 14
    jvms._maps.is_full = False
    one.generated_code.is_quiet = True
    assert turns(jvms, clock, one, MAX_PUT_PAUSE_S + 1) == 1
