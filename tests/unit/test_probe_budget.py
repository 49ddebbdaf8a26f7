# SPDX-License-Identifier: Apache-2.0
"""What the calls of one user or container may cost, and what that is to others."""

from __future__ import annotations

import pytest
from fake_probes import KEY, USUAL, FakeBpf, FakeElf, charge, examine, make, site_of

from sonde import procfs
from sonde.collect import probe_budget
from sonde.collect import probes as probes_module

LOUD, OTHER = 1000, 2000
OF_LOUD, OF_OTHER = 11, 12
FAR_TOO_MANY = 10_000_000


@pytest.fixture
def bpf():
    return FakeBpf()


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    for module in (probe_budget, probes_module):
        monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def probes(bpf, monkeypatch, clock):
    FakeElf(monkeypatch, USUAL)
    monkeypatch.setattr(procfs, "party_of", {OF_LOUD: LOUD, OF_OTHER: OTHER}.get)
    made = make(bpf)
    examine(made)
    made.users = [OF_LOUD, OF_OTHER]
    made.users_of = lambda key: made.users
    return made


def be_loud(probes, bpf, times=2, function="copy"):
    for _ in range(times):
        charge(probes, bpf, function, FAR_TOO_MANY, party=LOUD)


def texts(probes, name):
    return [notice.text for notice in probes.notices if notice.name == name]


def test_the_calls_of_a_loud_user_are_left_out_and_those_of_others_are_not(probes, bpf):
    be_loud(probes, bpf)
    copy = site_of(probes, "copy").index
    assert bpf.paused == {(LOUD, copy, 0)}
    assert bpf.offsets() == [100, 204]
    [text] = texts(probes, "calls_left_out")
    assert text.startswith("copy of libtest.so.1: 10,000,000 calls/s of user 1000")
    assert text.endswith("left out for 60 s")
    charge(probes, bpf, "copy", 100, party=OTHER)
    assert bpf.paused == {(LOUD, copy, 0)}


def test_each_user_has_the_whole_budget(probes, bpf):
    """Many who stay below it are not over it together."""
    site = site_of(probes, "copy")
    half = int(0.05 * 1e9 / site.each_ns)
    for _ in range(100):
        for party in range(10):
            bpf.call(site.index, 3000 + party, half)
        probes.charge({site.index: 10 * half}, 1.0)
    assert not bpf.paused


def test_a_pause_ends_and_is_longer_each_time(probes, bpf, clock):
    copy = site_of(probes, "copy").index
    lengths = []
    for _ in range(6):
        be_loud(probes, bpf)
        assert bpf.paused
        began = clock[0]
        while bpf.paused:
            clock[0] += 5.0
            probes.charge({copy: 0}, 5.0)
        lengths.append(clock[0] - began)
    assert lengths == [60, 120, 240, 480, 960, 960]


def test_a_site_comes_off_where_the_loud_user_alone_maps_the_file_and_back_later(
    probes, bpf, clock
):
    probes.users = [OF_LOUD]
    be_loud(probes, bpf)
    assert bpf.offsets() == [204]
    assert texts(probes, "probe_taken_off") == ["copy of libtest.so.1: user 1000 alone maps it"]
    assert not bpf.paused and not any(bpf.near.values())
    probes.mapped_by(KEY, OF_LOUD)
    clock[0] += 59.0
    probes.charge({}, 59.0)
    assert bpf.offsets() == [204]
    clock[0] += 2.0
    probes.charge({}, 2.0)
    assert bpf.offsets() == [100, 204]
    be_loud(probes, bpf)
    clock[0] += 119.0
    probes.charge({}, 119.0)
    assert bpf.offsets() == [204]  # twice as long


def test_it_is_back_as_soon_as_somebody_else_maps_the_file(probes, bpf):
    probes.users = [OF_LOUD]
    be_loud(probes, bpf)
    assert bpf.offsets() == [204]
    probes.mapped_by(KEY, OF_OTHER)
    assert bpf.offsets() == [100, 204]


def test_sites_come_off_together_and_seldom(probes, bpf, clock):
    """It takes the kernel a tenth of a second each time."""
    probes.users = [OF_LOUD]
    be_loud(probes, bpf)
    be_loud(probes, bpf, function="wait")
    assert bpf.offsets() == [204]
    clock[0] += probes_module.TAKE_OFF_EVERY_S
    probes.charge({}, 1.0)
    assert bpf.offsets() == []


def test_who_is_paused_stays_so_where_a_site_has_a_new_number(probes, bpf):
    be_loud(probes, bpf)
    probes.take_off(KEY, site_of(probes, "wait"))
    assert bpf.paused == {(LOUD, site_of(probes, "copy").index, 0)}


def test_where_nobody_is_near_the_budget_nobody_is_counted_by_user(probes, bpf, clock):
    charge(probes, bpf, "copy", 100)
    assert not bpf.near
    be_loud(probes, bpf, times=1)
    assert bpf.near == {site_of(probes, "copy").index: 1}
    for _ in range(200):
        clock[0] += 5.0
        probes.charge({}, 5.0)
    assert not any(bpf.near.values()) and not bpf.party_hits
