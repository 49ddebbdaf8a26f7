# SPDX-License-Identifier: Apache-2.0
"""Who pays for looking through long mappings: the party of the process, and nobody else."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from sonde import procfs
from sonde.collect import device_process, mapped_files
from sonde.collect.device_process import (
    FIND_CREDIT_S,
    FIND_SHARE,
    MAX_AWAITED,
    MAX_PARTIES,
    Finder,
)
from sonde.collect.inject_memory import InjectMemory
from sonde.collect.mapped_files import FIRST_BYTES, UnreadProcesses, mapped_now

ATTACKER, VICTIM, LAST = 12345, 20001, 3


@pytest.fixture
def clock(monkeypatch):
    """Time, and how long a look through mappings of this length takes; pids are parties."""
    it = SimpleNamespace(now_s=100.0, spent_s=0.0, looks=[])

    def find(pid, most_bytes, unread):
        it.looks.append((pid, most_bytes))
        it.spent_s += 0.4 if most_bytes > FIRST_BYTES else 0.001

    times = SimpleNamespace(monotonic=lambda: it.now_s, thread_time=lambda: it.spent_s)
    monkeypatch.setattr(device_process, "time", times)
    monkeypatch.setattr(InjectMemory, "find", find)
    return it


def test_long_mappings_of_one_user_keep_no_other_users_from_being_looked_through(clock):
    finder = Finder()
    for _ in range(50):
        finder.find(7, ATTACKER)
    assert not finder.has_credit(ATTACKER)
    assert finder.has_credit(VICTIM)
    clock.looks.clear()
    finder.find(8, VICTIM)
    finder.find(9, ATTACKER)
    assert clock.looks == [(8, procfs.MAX_MAPS_BYTES), (9, FIRST_BYTES)]


def test_all_together_take_no_more_than_their_share_of_a_processor(clock):
    finder, parties = Finder(), range(20)
    for _ in range(1000):
        clock.now_s += 0.1
        for party in parties:
            if finder.has_credit(party):
                finder.find(party, party)
    began = len(parties) * (FIND_CREDIT_S + 0.4)
    assert clock.spent_s <= began + FIND_SHARE * 100
    by_party = [sum(pid == party for pid, _ in clock.looks) for party in parties]
    assert max(by_party) - min(by_party) <= 1


def test_a_party_that_waited_has_its_credit_again_and_no_more(clock):
    finder = Finder()
    while finder.has_credit(ATTACKER):
        finder.find(7, ATTACKER)
    clock.now_s += 1000
    assert finder.has_credit(ATTACKER)
    clock.looks.clear()
    while finder.has_credit(ATTACKER):
        finder.find(7, ATTACKER)
    assert len(clock.looks) == 2


def test_parties_beyond_those_that_are_known_share_one_credit(clock):
    finder = Finder()
    for party in range(MAX_PARTIES + LAST):
        finder.find(party, party)
    assert len(finder._credit_s) <= MAX_PARTIES + 1
    assert not finder.has_credit(MAX_PARTIES + LAST)


def test_waiting_processes_of_one_party_are_bounded_and_keep_no_others_waiting(clock):
    finder = Finder()
    for pid in range(MAX_AWAITED + LAST):
        finder.expect(pid, 1.0, ATTACKER)
    finder.expect(9999, 1.0, VICTIM)
    assert finder.unread.processes == LAST
    looked = []
    for pid, _ in finder.awaited():
        looked.append(pid)
        finder.find(pid, VICTIM if pid == 9999 else ATTACKER)
    assert looked == [0, 1, 9999]
    assert [pid for pid, _ in finder.awaited()] == [9999]
    finder.forget(9999)
    assert finder.is_waiting


def test_whose_processes_are_is_looked_up_within_bounds(clock, monkeypatch):
    def party_of(pid):
        clock.spent_s += 0.03
        return pid

    monkeypatch.setattr(procfs, "party_of", party_of)
    finder = Finder()
    parties = [finder.party_of(pid) for pid in range(100)]
    assert parties == [*range(17), *[procfs.NOBODY] * 83]
    clock.now_s += 1
    assert [finder.party_of(pid) for pid in (1, 2, 3, 4)] == [1, 2, procfs.NOBODY, procfs.NOBODY]


def test_a_process_with_more_mappings_than_are_read_is_counted():
    unread = UnreadProcesses()
    assert InjectMemory.find(os.getpid(), 100, unread) is None
    assert unread.processes == 1


def test_a_scan_of_all_reads_long_mappings_of_each_party_and_of_none_for_long(monkeypatch):
    spent_s, read = [0.0], []

    def mapped_by(pid, unread=None, most_bytes=procfs.MAX_MAPS_BYTES):
        if most_bytes == FIRST_BYTES:
            unread.processes += 1
        else:
            spent_s[0] += 0.3
            read.append(pid)
        return iter(())

    monkeypatch.setattr(mapped_files, "mapped_by", mapped_by)
    monkeypatch.setattr(mapped_files, "time", SimpleNamespace(thread_time=lambda: spent_s[0]))
    pids = [*range(100), *range(1000, 1003)]
    monkeypatch.setattr(procfs, "pids", lambda: pids)
    monkeypatch.setattr(procfs, "party_of", lambda pid: VICTIM if pid >= 1000 else ATTACKER)
    unread = UnreadProcesses()
    assert list(mapped_now(unread)) == []
    assert read == [0, 1000, 1, 1001]
    assert unread.processes == len(pids) - len(read)
    monkeypatch.setattr(procfs, "party_of", lambda pid: pid)
    read.clear()
    assert list(mapped_now()) == []
    assert len(read) == mapped_files.MAX_LONG_CPU_S // 0.3 + 1
