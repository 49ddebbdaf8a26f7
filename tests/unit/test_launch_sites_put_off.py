# SPDX-License-Identifier: Apache-2.0
"""The probe on the library in a process, while some process keeps its map locked: the kernel is
played."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from sonde import _native
from sonde.collect import launch_sites
from sonde.collect.launch_sites import FIELDS, LaunchSites
from sonde.collect.mapped_files import MappedFile
from sonde.procfs import Holder

INODE = 5


class FakeBpf:
    def __init__(self):
        self.links = set()

    def fields(self, rows):
        return list(FIELDS)

    def losses(self):
        return []

    def attach_uprobes(self, path, sites, entry, leave, multi):
        self.links.add(len(self.links) + 1)
        return len(self.links)

    def detach(self, link):
        self.links.remove(link)

    def detach_all(self, links):
        self.links -= set(links)


@pytest.fixture
def bpf(monkeypatch):
    def mapped(pid):
        return [MappedFile(pid, (8, 1, INODE), "/memfd:sonde-library (deleted)", 0, 1)]

    monkeypatch.setattr(launch_sites, "mapped_by", mapped)
    monkeypatch.setattr(launch_sites, "open_mapped", lambda _: os.open("/dev/null", os.O_RDONLY))
    site = SimpleNamespace(name="x", offset=0, size=1)
    monkeypatch.setattr(_native, "find_functions", lambda *_: [site])
    monkeypatch.setattr(_native, "probe_sites", lambda *_: [(0, "emulated", "", False)])
    monkeypatch.setattr(launch_sites, "losses_of", lambda _: {})
    return FakeBpf()


@pytest.fixture
def sites(bpf, monkeypatch):
    found = LaunchSites(SimpleNamespace(load=lambda *_, **__: bpf))
    found._locks = SimpleNamespace(held=None, holder=lambda inode: found._locks.held)
    monkeypatch.setattr(launch_sites, "PUT_OFF_S", 0.0)
    return found


def test_it_is_placed_once_the_lock_is_let_go(sites, bpf):
    sites._locks.held = Holder(77, 1000)
    assert not sites.add(10)
    assert not sites.add(10)
    assert not bpf.links
    assert sites.losses() == {"probes_put_off": 1}
    assert sites.due() == [10]
    sites._locks.held = None
    assert sites.add(10)
    assert sites.due() == []
    assert len(bpf.links) == 1


def test_who_is_timed_no_longer_waits_no_longer(sites):
    sites._locks.held = Holder(77, 1000)
    assert not sites.add(10)
    sites.drop(10)
    assert sites.due() == []


def test_it_comes_off_once_the_lock_is_let_go(sites, bpf):
    assert sites.add(10)
    sites._locks.held = Holder(77, 1000)
    sites.drop(10)
    assert sites.due() == []
    assert len(bpf.links) == 1
    sites._locks.held = None
    sites.due()
    assert not bpf.links


def test_the_end_takes_all_off(sites, bpf):
    assert sites.add(10)
    assert sites.close() == []
    assert not bpf.links
    sites.drop(10)
