# SPDX-License-Identifier: Apache-2.0
"""A kernel and ELF files that are played, for tests of probes."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from types import SimpleNamespace

from sonde import _native
from sonde.apis.parse import parse
from sonde.collect.device_calls import FIELDS
from sonde.collect.probes import Probes
from sonde.procfs import Holder

TABLE = """
api = "test"
libraries = ["libtest.so*"]
[directions.kind]
1 = "h2d"
2 = "d2h"
[[call]]
function = "copy"
suffixes = ["", "_v2"]
arguments = "size kind"
op = "copy"
bytes = "size"
direction = { of = "kind", by = "kind" }
[[call]]
function = "wait"
op = "sync"
[[call]]
function = "launch"
op = "launch"
"""
KEY = (8, 1, 99)


class FakeBpf:
    """Notes what is attached; refuses what it is set to refuse."""

    def __init__(self):
        self.sites: dict[int, bytes] = {}
        self.links: dict[int, tuple[list[tuple[int, int]], bool]] = {}
        self.made = 0
        self.multi = True
        self.refused_offsets: set[int] = set()
        self.most_links = 0
        self.rows: list[tuple[int, ...]] = []
        self.hits: dict[int, int] = {}
        self.near: dict[int, int] = {}
        self.party_hits: dict[tuple[int, int, int], int] = {}
        self.paused: set[tuple[int, int, int]] = set()

    def set_array(self, name, index, value):
        if name == "near_budget":
            self.near[index] = struct.unpack("=I", value)[0]
            return
        assert name == "sites"
        self.sites[index] = value

    def call(self, site, party, count=1):
        """A process of a party makes calls."""
        if self.near.get(site):
            self.party_hits[party, site, 0] = self.party_hits.get((party, site, 0), 0) + count

    def entries(self, name):
        assert name == "party_hits"
        return [(*key[:2], hits, 1_000_000 + key[0]) for key, hits in self.party_hits.items()]

    def set_hash(self, name, key, value):
        assert name == "paused_parties"
        self.paused.add(struct.unpack("=QII", key))

    def delete_hash(self, name, key):
        of = {"paused_parties": self.paused.discard, "party_hits": self.party_hits.pop}[name]
        try:
            of(struct.unpack("=QII", key))
        except KeyError:
            raise FileNotFoundError(2, "none") from None

    def attach_uprobes(self, path, sites, entry, leave, multi):
        assert Path(path).exists()
        if multi and not self.multi:
            raise OSError(22, "Invalid argument")
        if any(offset in self.refused_offsets for offset, _ in sites):
            raise OSError(524, "Unknown error 524")
        self.made += 1
        self.links[self.made] = (list(sites), multi)
        self.most_links = max(self.most_links, len(self.links))
        return self.made

    def link_fds(self, link):
        return [1000 + link]

    def detach_all(self, links):
        for link in links:
            del self.links[link]

    def offsets(self):
        return sorted(offset for sites, _ in self.links.values() for offset, _ in sites)

    def fields(self, rows):
        return list(FIELDS)

    def drain(self, rows):
        rows, self.rows = self.rows, []
        return rows

    def drain_ring(self, ring, of, limit):
        return []

    def attach(self, program):
        return 0

    def losses(self):
        return []

    def sums(self, name, indices):
        assert name == "hits"
        return [self.hits.get(index, 0) for index in indices]


class FakeElf:
    """A file of functions: name to (offset, offset of the probe, cost class)."""

    def __init__(self, monkeypatch, functions, forwarders=()):
        def find(path, names):
            return [
                SimpleNamespace(name=name, offset=start, size=64)
                for name, (start, _, _) in functions.items()
                if name in names
            ]

        def site(offset):
            [(_, moved, cost)] = {it for it in functions.values() if it[0] == offset}
            return moved, cost, "push rbp"

        def sites(path, asked, cpu_s):
            if cpu_s <= 0:
                return []
            return [(*site(at), spares and at in forwarders) for at, _, spares in asked]

        monkeypatch.setattr(_native, "find_functions", find)
        monkeypatch.setattr(_native, "probe_sites", sites)


class FakeLocks:
    """Whose map lock cannot be had, by the inode of the file."""

    def __init__(self):
        self.held = {}

    def holder(self, inode):
        return self.held.get(inode)


HOLDER = Holder(77, 1000)


def make(bpf, launches=False, budget=0.01, locks=None):
    return Probes(bpf, [parse(TABLE, "t", "x86_64")], launches, budget, locks=locks or FakeLocks())


def examine(probes):
    return probes.examine(os.open("/dev/null", os.O_RDONLY), KEY, "libtest.so.1")


def site_of(probes, function):
    [site] = [
        site
        for group in probes.files[KEY].links.values()
        for site in group
        if site.call.function == function
    ]
    return site


USUAL = {
    "copy": (100, 100, "emulated"),
    "copy_v2": (100, 100, "emulated"),
    "wait": (200, 204, "emulated"),
    "launch": (300, 300, "emulated"),
}


def charge(probes, bpf, function, count, seconds=1.0, party=1000):
    """`count` calls by processes of a party; an interval later they are charged."""
    site = site_of(probes, function)
    bpf.call(site.index, party, count)
    probes.charge({site.index: count}, seconds)
