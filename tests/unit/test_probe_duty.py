# SPDX-License-Identifier: Apache-2.0
"""Probes that are on for a part of the time: when they come off, what their counts stand for."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from fake_probes import HOLDER, KEY, FakeBpf, FakeElf, FakeLocks, make

from sonde.collect import probe_budget, probe_duty
from sonde.collect import probes as probes_module
from sonde.collect.probe_duty import DutyCycle

FUNCTIONS = {
    "copy": (100, 100, "emulated"),
    "wait": (200, 200, "emulated"),
}
WHO = (7, 0, 7)
OFTEN = 10_000
"""Calls a second, of each function: 2 us each, so 2 % of a core."""


class Machine:
    """A program that calls, and a recorder that reads once a second."""

    def __init__(self, monkeypatch, functions=FUNCTIONS):
        self.now_s = 1000.0
        for module in (probe_budget, probe_duty, probes_module):
            monkeypatch.setattr(module.time, "monotonic", lambda: self.now_s)
        FakeElf(monkeypatch, functions)
        self.bpf, self.locks = FakeBpf(), FakeLocks()
        self.probes = make(self.bpf, locks=self.locks)
        self.probes.examine(os.open("/dev/null", os.O_RDONLY), KEY, "libtest.so.1")
        self.probes.users_of = lambda key: [7]
        self.duty = DutyCycle(self.probes, 0.01)
        self.estimate = self.true = 0.0
        """Calls of `copy`."""

    def sites(self):
        """Those that have their probes, by function."""
        found = (site for on in self.probes.files[KEY].links.values() for site in on)
        return {site.call.function: site for site in found}

    def second(self, to_the_end=False, **rates):
        """A second passes in which each function is called that often; those in `nested` are within
        calls of `copy`."""
        nested = rates.pop("nested", 0)
        on = self.sites()
        self.now_s += 1.0
        self.true += rates.get("copy", 0)
        counted, hits = {}, {}
        for function, rate in rates.items():
            if (site := on.get(function)) is not None:
                what = (function, "test", "copy", "", 0)
                counted[site.index, what, WHO] = [rate, rate * 1000, 0, 0]
                hits[site.index] = rate
        if nested and "wait" in on:
            hits[on["wait"].index] = nested
        if nested and "copy" in on:
            index = on["copy"].index
            counted[index, ("copy", "test", "copy", "", 0), WHO][3] = nested
        self.duty.end_turn()
        for (index, what, _), (count, *_) in counted.items():
            if what[0] == "copy":
                self.estimate += count * self.duty.factors(index)[0]
        if to_the_end:
            unseen = {what[0]: sums for what, _, sums in self.duty.unseen({})}
            self.estimate += unseen.get("copy", [0])[0]
        self.duty.charge(counted, hits)
        return bool(self.sites())

    def reports(self):
        return [it.text for it in self.probes.notices if it.name == "calls_sampled"]


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def test_what_is_within_the_budget_stays_on(machine):
    assert all(machine.second(copy=1_000, wait=1_000) for _ in range(100))
    assert machine.reports() == []


def test_a_program_that_calls_often_pays_for_one_second_and_then_for_its_turns(machine):
    """What is counted in the second in which the recording begins is their first turn."""
    assert not machine.second(copy=OFTEN, wait=OFTEN)
    assert machine.estimate == machine.true == OFTEN
    assert machine.reports() == []
    on = [machine.second(copy=OFTEN, wait=OFTEN) for _ in range(8)]
    assert on == [False, True, *6 * [False]], "the program may have begun within that second"
    assert len(machine.reports()) == 1


def test_after_a_burst_all_are_counted_again(machine):
    machine.second(copy=OFTEN, wait=OFTEN)
    on = [machine.second(copy=100) for _ in range(100)]
    assert on[8:] == [True] * 92
    assert machine.estimate == pytest.approx(machine.true, rel=0.01)
    assert not machine.duty


def test_where_probes_cannot_come_off_at_once_the_first_turn_begins(machine):
    machine.locks.held[KEY[2]] = HOLDER
    assert machine.second(copy=OFTEN, wait=OFTEN)
    machine.locks.held.clear()
    machine.now_s += probes_module.KEPT_ON_S
    machine.second(copy=OFTEN, wait=OFTEN)
    machine.second(copy=OFTEN, wait=OFTEN)
    assert not machine.sites()
    assert machine.estimate == machine.true


def test_probes_are_on_as_much_as_the_budget_allows(machine):
    on = [machine.second(copy=OFTEN, wait=OFTEN) for _ in range(400)]
    assert sum(on) * 0.04 / 400 == pytest.approx(0.005, rel=0.25)
    [text] = machine.reports()
    assert text == (
        "copy wait: 20,000 calls/s would cost a process 4.0% of a core;"
        " counted 12% of the time from here on, totals are estimates"
    )


@pytest.mark.parametrize("seconds", [1, 2, 3, 6, 10, 11, 37])
def test_the_estimate_is_right_whenever_it_ends(machine, seconds):
    for _ in range(seconds - 1):
        machine.second(copy=OFTEN, wait=OFTEN)
    machine.second(to_the_end=True, copy=OFTEN, wait=OFTEN)
    assert machine.estimate == pytest.approx(machine.true, rel=0.01)


def test_time_accounted_for_at_the_end_of_a_chunk_is_not_again_by_the_next_turn(machine):
    for second in range(100):
        machine.second(to_the_end=second % 3 == 0, copy=OFTEN, wait=OFTEN)
    machine.second(to_the_end=True, copy=OFTEN, wait=OFTEN)
    assert machine.estimate == pytest.approx(machine.true, rel=0.01)


def test_stacks_of_a_turn_stand_for_all_the_time_before_it(machine):
    for _ in range(4):
        machine.second(to_the_end=True, copy=OFTEN, wait=OFTEN)
    for _ in range(30):
        machine.second(to_the_end=True, copy=OFTEN, wait=OFTEN)
        on = machine.sites()
        if "copy" in on and machine.duty.factors(on["copy"].index) != (1.0, 1.0):
            break
    totals, stacks = machine.duty.factors(on["copy"].index)
    assert totals == pytest.approx(1.0) and stacks == pytest.approx(8.0, rel=0.2)


def test_calls_of_a_process_that_ended_go_on_no_longer(machine):
    for _ in range(5):
        machine.second(copy=OFTEN, wait=OFTEN)
    off_s = machine.now_s - 1.0
    machine.now_s += 3.0
    unseen = {what[0]: sums for what, _, sums in machine.duty.unseen({WHO[0]: off_s + 1.0})}
    assert unseen["copy"][0] <= 1.1 * OFTEN


def test_where_calls_become_rare_all_are_counted_again(machine):
    for _ in range(20):
        machine.second(copy=OFTEN, wait=OFTEN)
    for _ in range(20):
        machine.second(copy=10)
    assert machine.second(copy=10) and not machine.duty
    assert not machine.probes.in_turns


def test_rare_calls_stay_on(machine):
    for _ in range(5):
        machine.second(copy=2 * OFTEN, wait=5)
    assert set(machine.sites()) == {"wait"}


def test_what_is_called_within_others_comes_off_with_them_and_first(machine, monkeypatch):
    """Else it would count for itself as long as the outer one is off."""
    detached = []
    real = machine.bpf.detach_all
    monkeypatch.setattr(
        machine.bpf,
        "detach_all",
        lambda links: detached.append([machine.bpf.links[it][0] for it in links]) or real(links),
    )
    while machine.second(copy=2 * OFTEN, nested=50):
        pass
    assert not machine.sites()
    while not machine.second(copy=2 * OFTEN, nested=50):
        pass
    detached.clear()
    machine.second(copy=2 * OFTEN, nested=50)
    offsets = [[offset for sites in links for offset, _ in sites] for links in detached]
    assert offsets == [[200], [100]]


def test_sites_that_are_called_often_later_come_off_with_the_others(machine):
    for _ in range(10):
        machine.second(copy=2 * OFTEN, wait=5)
    for _ in range(60):
        machine.second(copy=2 * OFTEN, wait=2 * OFTEN)
    seen = set()
    for _ in range(60):
        machine.second(copy=2 * OFTEN, wait=2 * OFTEN)
        seen.add(frozenset(machine.sites()))
    assert seen == {frozenset(), frozenset({"copy", "wait"})}


def test_nothing_changes_while_a_process_keeps_the_kernel_waiting(machine):
    machine.locks.held[KEY[2]] = HOLDER
    assert all(machine.second(copy=OFTEN, wait=OFTEN) for _ in range(10))
    assert machine.estimate == machine.true
    machine.locks.held.clear()
    machine.now_s += probes_module.KEPT_ON_S
    while machine.second(copy=OFTEN, wait=OFTEN):
        pass
    machine.locks.held[KEY[2]] = HOLDER
    assert not any(machine.second(copy=OFTEN, wait=OFTEN) for _ in range(30))
    machine.locks.held.clear()
    assert any(machine.second(copy=OFTEN, wait=OFTEN) for _ in range(60))
    machine.second(copy=OFTEN, wait=OFTEN)
    machine.second(to_the_end=True, copy=OFTEN, wait=OFTEN)
    assert machine.estimate == pytest.approx(machine.true, rel=0.05)


def test_a_file_that_nobody_maps_any_more_is_forgotten(machine):
    for _ in range(10):
        machine.second(copy=OFTEN, wait=OFTEN)
    assert machine.duty
    machine.probes.drop([KEY])
    machine.duty.end_turn()
    assert not machine.duty


def test_a_number_that_another_site_has_now_stands_for_itself(machine):
    for _ in range(5):
        machine.second(copy=OFTEN, wait=OFTEN)
    while not machine.second(copy=OFTEN, wait=OFTEN):
        pass
    index = machine.sites()["copy"].index
    assert machine.duty.factors(index)[0] > 1
    machine.probes.sites[index] = replace(machine.probes.sites[index], offset=999)
    assert machine.duty.factors(index) == (1.0, 1.0)
