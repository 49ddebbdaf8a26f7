# SPDX-License-Identifier: Apache-2.0
"""Where probes go, what they may cost, and what becomes of the rows: the kernel is played."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from fake_probes import (
    HOLDER,
    KEY,
    TABLE,
    USUAL,
    FakeBpf,
    FakeElf,
    FakeLocks,
    charge,
    examine,
    make,
    site_of,
)

from sonde import _native, procfs
from sonde.apis.parse import parse
from sonde.collect import probe_removal
from sonde.collect import probes as probes_module
from sonde.collect.device_calls import DeviceCalls
from sonde.collect.probe_budget import COST_NS
from sonde.collect.probes import MAX_SITES, PutOff
from sonde.collect.wanted_functions import SITES_OF_A_CALL
from sonde.query.validation import MAX_NUMBER


@pytest.fixture
def bpf():
    return FakeBpf()


def test_one_site_for_each_function_where_it_is_cheap(bpf, monkeypatch):
    FakeElf(monkeypatch, USUAL)
    probes = make(bpf)
    assert examine(probes)
    assert bpf.offsets() == [100, 204]
    assert [multi for _, multi in bpf.links.values()] == [True]
    assert [notice.name for notice in probes.notices] == ["probes_attached"]


def test_launches_on_request(bpf, monkeypatch):
    FakeElf(monkeypatch, USUAL)
    examine(make(bpf, launches=True))
    assert bpf.offsets() == [100, 204, 300]


def test_files_without_calls_are_left_alone(bpf, monkeypatch):
    FakeElf(monkeypatch, {"main": (1, 1, "emulated")})
    probes = make(bpf)
    assert not examine(probes)
    assert not probes.files and not bpf.links


def test_functions_that_lead_to_another_library_are_spared(bpf, monkeypatch):
    FakeElf(monkeypatch, USUAL, forwarders=[200])
    probes = make(bpf)
    probes.examine(os.open("/dev/null", os.O_RDONLY), KEY, "libstubs.so")
    assert bpf.offsets() == [100]
    [spared] = [notice for notice in probes.notices if notice.name == "probes_spared"]
    assert (spared.value, spared.text) == (1, "1 calls of libstubs.so lead to other libraries")
    # The library itself may be made so: there is no other place then.
    assert examine(probes)
    assert bpf.offsets() == [100, 100, 204]


def test_a_file_of_nothing_but_stubs_has_no_probes(bpf, monkeypatch):
    FakeElf(monkeypatch, USUAL, forwarders=[100, 200])
    probes = make(bpf)
    assert not probes.examine(os.open("/dev/null", os.O_RDONLY), KEY, "libstubs.so")
    assert not probes.files and not bpf.links


def test_costly_sites_have_a_separate_link_and_are_reported(bpf, monkeypatch):
    functions = {"wait": (200, 200, "single-step"), "copy": (100, 100, "single-step")}
    FakeElf(monkeypatch, {**USUAL, **functions, "copy_v2": (150, 150, "emulated")})
    probes = make(bpf)
    examine(probes)
    assert sorted(len(sites) for sites, _ in bpf.links.values()) == [1, 2]
    slow = [notice.text for notice in probes.notices if notice.name == "probe_slow"]
    assert sorted(slow)[-1] == "wait of libtest.so.1: 14 µs a call (push rbp)"
    assert len(slow) == 2


def test_one_by_one_where_the_kernel_cannot_do_all_at_once(bpf, monkeypatch):
    FakeElf(monkeypatch, USUAL)
    bpf.multi = False
    examine(make(bpf))
    assert bpf.offsets() == [100, 204]
    assert [multi for _, multi in bpf.links.values()] == [False, False]


def test_what_the_kernel_refuses_is_reported_and_the_rest_attached(bpf, monkeypatch):
    FakeElf(monkeypatch, USUAL)
    bpf.refused_offsets = {204}
    probes = make(bpf)
    examine(probes)
    assert bpf.offsets() == [100]
    [refused] = [notice for notice in probes.notices if notice.name == "probe_refused"]
    assert refused.text.startswith("wait of libtest.so.1")


def test_a_single_stepped_site_may_cost_its_share_and_no_more(bpf, monkeypatch):
    FakeElf(monkeypatch, {**USUAL, "wait": (200, 200, "single-step")})
    probes = make(bpf, budget=0.01)
    examine(probes)
    affordable = int(0.01 * 1e9 / COST_NS["single-step"])
    for _ in range(100):
        charge(probes, bpf, "wait", affordable)
    assert bpf.offsets() == [100, 200]
    for _ in range(3):
        if 200 in bpf.offsets():
            charge(probes, bpf, "wait", affordable * 3)
    assert bpf.offsets() == [100]
    [off] = [notice for notice in probes.notices if notice.name == "probe_taken_off"]
    assert off.text == "wait of libtest.so.1: user 1000 alone maps it"
    [out] = [notice for notice in probes.notices if notice.name == "calls_left_out"]
    assert "calls/s of user 1000 at 14 µs are over the budget" in out.text


def test_a_cheap_site_may_cost_ten_times_that_for_ten_seconds(bpf, monkeypatch):
    FakeElf(monkeypatch, USUAL)
    probes = make(bpf, budget=0.01)
    examine(probes)
    share = int(0.1 * 1e9 / COST_NS["emulated"])
    for _ in range(9):
        charge(probes, bpf, "copy", share * 2)
    assert bpf.offsets() == [100, 204]
    for _ in range(6):
        if 100 in bpf.offsets():
            charge(probes, bpf, "copy", share * 2)
    assert bpf.offsets() == [204]


def test_neighbours_are_attached_again_before_the_old_probes_go(bpf, monkeypatch):
    FakeElf(monkeypatch, USUAL)
    probes = make(bpf)
    examine(probes)
    before = site_of(probes, "wait").index
    probes.take_off(KEY, site_of(probes, "copy"))
    assert bpf.most_links == 2
    assert bpf.offsets() == [204]
    # The kernel side distinguishes one hit of both by the site it names.
    assert site_of(probes, "wait").index != before
    assert before in probes.sites


def test_indices_of_sites_are_used_in_turn(bpf, monkeypatch):
    """A call still going on names its site after that is gone: no other may have its index soon."""
    FakeElf(monkeypatch, USUAL)
    probes = make(bpf)
    seen = []
    for _ in range(MAX_SITES // 2):
        examine(probes)
        seen += [site_of(probes, name).index for name in ("copy", "wait")]
        probes.drop([KEY])
    assert sorted(seen) == list(range(MAX_SITES))
    examine(probes)
    assert site_of(probes, "copy").index in range(MAX_SITES)


def test_without_room_for_more_sites_it_reports_that(bpf, monkeypatch):
    FakeElf(monkeypatch, USUAL)
    monkeypatch.setattr(probes_module, "MAX_SITES", 1)
    probes = make(bpf)
    examine(probes)
    assert len(bpf.offsets()) == 1
    assert any("too many probes" in notice.text for notice in probes.notices)


def test_a_file_that_defines_a_call_thousands_of_times_gets_few_places(bpf, monkeypatch):
    """Others' files would find none left."""
    FakeElf(monkeypatch, USUAL)
    many = [SimpleNamespace(name="wait", offset=16 * number, size=8) for number in range(4_200)]
    monkeypatch.setattr(_native, "find_functions", lambda path, names: many)
    monkeypatch.setattr(
        _native,
        "probe_sites",
        lambda path, asked, cpu_s: [(at, "emulated", "", False) for at, *_ in asked],
    )
    probes = make(bpf)
    assert examine(probes)
    assert len(bpf.offsets()) == SITES_OF_A_CALL
    [refused] = [notice for notice in probes.notices if notice.name == "probe_refused"]
    assert refused.value == 4_200 - SITES_OF_A_CALL


def test_a_file_whose_functions_take_long_to_read_holds_nobody_up(bpf, monkeypatch):
    FakeElf(monkeypatch, USUAL)
    monkeypatch.setattr(probes_module, "CHOOSE_CPU_S", -1.0)
    probes = make(bpf)
    assert not examine(probes)
    [refused] = [notice for notice in probes.notices if notice.name == "probe_refused"]
    assert "take too long to read" in refused.text


def test_no_probe_is_placed_while_a_process_keeps_its_map_locked(bpf, monkeypatch):
    FakeElf(monkeypatch, USUAL)
    locks = FakeLocks()
    locks.held[KEY[2]] = HOLDER
    probes = make(bpf, locks=locks)
    with pytest.raises(PutOff, match="process 77 of user 1000 maps it"):
        examine(probes)
    assert not bpf.links and not probes.files
    locks.held.clear()
    assert examine(probes)
    assert len(probes.sites) == 2  # none was used up


def test_no_probe_comes_off_while_a_process_keeps_its_map_locked(bpf, monkeypatch):
    FakeElf(monkeypatch, USUAL)
    monkeypatch.setattr(probes_module, "KEPT_ON_S", 0.0)
    locks = FakeLocks()
    probes = make(bpf, locks=locks)
    examine(probes)
    locks.held[KEY[2]] = HOLDER
    for _ in range(20):
        charge(probes, bpf, "copy", 1_000_000)
    assert not probes.drop([KEY])
    assert bpf.offsets() == [100, 204]
    kept = [notice.text for notice in probes.notices if notice.name == "probes_kept_on"]
    assert kept[0] == f"libtest.so.1: {HOLDER}"
    locks.held.clear()
    charge(probes, bpf, "copy", 1_000_000)
    assert bpf.offsets() == [204]
    assert probes.drop([KEY])
    assert not bpf.links


@pytest.mark.parametrize("has_child", [True, False])
def test_at_the_end_probes_that_cannot_come_off_are_left_to_a_child(bpf, monkeypatch, has_child):
    kept = []

    class FakeBroker:
        def keep(self, fd, inode):
            assert inode
            if not has_child:
                raise OSError("no child")
            kept.append(fd)
            return 88

        def outlive(self):
            kept.append("outlives")

        def close(self):
            kept.append("ended")

    FakeElf(monkeypatch, USUAL)
    monkeypatch.setattr(probe_removal, "WAIT_S", 0.0)
    monkeypatch.setattr(procfs, "Broker", FakeBroker)
    locks = FakeLocks()
    probes = make(bpf, locks=locks)
    examine(probes)
    locks.held[KEY[2]] = HOLDER
    notes = probes.close()
    if has_child:
        assert kept == [1001, "outlives"]
        assert not bpf.links
        [line] = notes
        assert line.startswith("the probes on libtest.so.1 stay until")
        assert str(HOLDER) in line and line.endswith("process 88 waits for that")
    else:
        assert (kept, notes) == (["ended"], [])
        assert len(bpf.links) == 1  # as it is


def row(
    site, *, stack=0, status=0, direction=0, flags=0, count=1, nested=0, ns=10, size=0, weight=0
):
    weights = (weight, weight * ns, weight * size)
    key = (7, 8, 123_456_789_012, stack, site, status, direction, flags)
    return (*key, count, nested, ns, size, *weights, ns)


@pytest.fixture
def calls(bpf, monkeypatch):
    FakeElf(monkeypatch, USUAL)
    kernel = SimpleNamespace(load=lambda wanted: bpf)
    collector = DeviceCalls(kernel, [parse(TABLE, "t", "x86_64")], launches=False, budget=0.01)
    examine(collector._probes)
    return collector


def test_rows_of_one_call_become_one_total(calls, bpf):
    index = site_of(calls._probes, "copy").index
    bpf.hits = {index: 1}
    bpf.rows = [
        row(index, direction=1, count=10, ns=100, size=1000),
        row(index, direction=1, count=2, ns=500, size=200, stack=55, weight=6),
        row(index, direction=1, count=0, ns=7, flags=2),
        row(index, direction=2, count=3, ns=30, size=30),
        row(index, direction=1, count=1, ns=1, size=9, status=-5),
    ]
    batch = calls.drain(1000, False)
    who = (7, 123_450_000_000, 8)
    copy = (1000, "device", "copy", "test", "copy")
    assert batch.rows["activity"] == [
        (*copy, "h2d", 0, *who, 12, 607, 1200, 500, 0, 0),
        (*copy, "d2h", 0, *who, 3, 30, 30, 30, 0, 0),
        (*copy, "h2d", -5, *who, 1, 1, 9, 1, 0, 0),
    ]
    assert batch.rows["sample"] == [(1000, "device", "copy", *who, 55, 6.0, 3000.0, 1200.0)]
    assert batch.stacks == {55: (7, 123_450_000_000)}
    assert batch.threads == {who}
    assert batch.seen == 16


class FakeRing:
    """Spans of which only the number matters."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def column(self, name):
        return []

    def distinct(self, names):
        return []

    def __getattr__(self, name):
        return lambda *arguments: []


def test_calls_left_out_of_the_spans_are_reported(calls, bpf, monkeypatch):
    index = site_of(calls._probes, "copy").index
    bpf.hits = {index: 1}
    bpf.rows = [row(index, count=400)]
    events = calls.drain(1000, False).rows["event"]
    [left_out] = [event for event in events if event[2] == "spans_left_out"]
    assert left_out[5] == 400.0
    # One that was in the ring before its row: it is no new one.
    monkeypatch.setattr(bpf, "drain_ring", lambda ring, of, limit: FakeRing(3))
    calls.drain(2000, False)
    monkeypatch.setattr(bpf, "drain_ring", lambda ring, of, limit: [])
    bpf.rows = [row(index, count=5)]
    events = calls.drain(3000, False).rows["event"]
    assert [event[5] for event in events if event[2] == "spans_left_out"] == [2.0]


def test_every_hit_of_a_site_is_charged_once(calls, bpf, monkeypatch):
    """Those too that make no row: of processes not watched, of calls that another call makes."""
    charged = []
    monkeypatch.setattr(calls._probes, "charge", lambda hits, elapsed_s: charged.append(hits))
    index = site_of(calls._probes, "copy").index
    bpf.hits = {index: 20}
    calls.drain(1000, False)
    bpf.hits = {index: 25}
    calls.drain(2000, False)
    assert [hits[index] for hits in charged] == [20, 5]


def test_rows_are_not_asked_for_before_a_site_was_ever_hit(calls, bpf, monkeypatch):
    asked = []
    monkeypatch.setattr(bpf, "drain", lambda rows: asked.append(rows) or [])
    calls.drain(1000, True)
    assert asked == []
    bpf.hits = {site_of(calls._probes, "copy").index: 1}
    calls.drain(2000, False)
    calls.drain(3000, False)  # it may go on still
    assert asked == ["device_calls", "device_calls"]


def test_sizes_that_were_never_meant_fit_their_column(calls, bpf):
    index = site_of(calls._probes, "copy").index
    bpf.hits = {index: 1}
    bpf.rows = [
        row(index, direction=1, count=1, ns=1, size=2**64 - 1),
        row(index, direction=1, count=1, ns=1, size=2**64 - 1, stack=55, weight=1),
    ]
    [activity] = calls.drain(1000, False).rows["activity"]
    assert activity[12] == MAX_NUMBER  # more is left out by readers


def test_a_call_whose_probe_came_off_does_not_go_on_for_ever(calls, bpf):
    site = site_of(calls._probes, "copy")
    bpf.hits = {it.index: 1 for it in calls._probes.sites.values()}
    calls._probes.take_off(KEY, site)
    bpf.rows = [row(site.index, direction=1, count=0, ns=10**9, flags=2)]
    assert "activity" not in calls.drain(1000, True).rows
