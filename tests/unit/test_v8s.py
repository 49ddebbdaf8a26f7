# SPDX-License-Identifier: Apache-2.0
"""Which V8s of a machine are looked into, and how many of whose."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sonde.resolve.naming_budget import NamingBudget
from sonde.unwind import v8
from sonde.unwind.attempts import ATTEMPTS, OVER_S, RETRY_S
from sonde.unwind.v8 import MAX_V8S, PARTS, RUNTIME, V8s

USER = 1000
MAPPED = SimpleNamespace(file="node", bounds={0: (0, 1 << 20)}, code=[])


class ReadableV8:
    def __init__(self, process, resolver, exports, memory_of_all=None):
        self.party = process.party
        self.code_left_out = 0
        self.layout = SimpleNamespace(for_kernel=lambda _: b"")

    def close(self):
        pass


class Node:
    """V8s, whose files are what a test makes of them."""

    def __init__(self):
        self.exports = {v8.MARK: 1}
        self.file = SimpleNamespace(fd=0)
        self.over = set()
        budget = NamingBudget(is_limited=False)
        budget.is_over = lambda party: party in self.over
        resolver = SimpleNamespace(budget=budget, file_of=lambda *_: self.file)
        self.v8s = V8s(None, resolver)

    def load(self, pid, party=USER):
        process = SimpleNamespace(pid=pid, key=(pid, 1), party=party, generated_code=None)
        return self.v8s.load(process, MAPPED)


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(v8.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def node(monkeypatch, clock):
    it = Node()
    monkeypatch.setattr(v8, "V8", ReadableV8)
    monkeypatch.setattr(v8._native, "exported_addresses", lambda *_: it.exports)
    return it


def test_a_party_has_a_part_of_all_v8s(node):
    for pid in range(1, MAX_V8S + 1):
        node.load(pid)
    assert node.v8s.usage()["v8s"] == MAX_V8S // PARTS
    assert node.load(999, USER + 1) == (RUNTIME, b"")


def test_root_has_as_many_v8s_as_there_may_be(node):
    for pid in range(1, MAX_V8S + 10):
        node.load(pid, 0)
    assert node.v8s.usage()["v8s"] == MAX_V8S


def test_who_has_no_time_left_is_tried_again(node, clock):
    node.over.add(USER)
    for _ in range(2 * ATTEMPTS):
        assert node.load(1) is None
        clock[0] += OVER_S + 0.1
        assert node.v8s.due(clock[0]) == [1]
    node.over.clear()
    assert node.load(1) == (RUNTIME, b"")
    assert node.v8s.due(clock[0]) == []


def test_the_library_with_v8_may_come_after_its_program(node, clock):
    node.exports = {}
    assert node.load(1) is None
    clock[0] += RETRY_S + 0.1
    assert node.v8s.due(clock[0]) == [1]
    node.exports = {v8.MARK: 1}
    assert node.load(1) == (RUNTIME, b"")


@pytest.mark.parametrize(("file", "refused"), [(None, 1), (SimpleNamespace(fd=0), 0)])
def test_a_file_that_cannot_be_read_is_refused_and_one_without_v8_is_no_loss(
    node, clock, file, refused
):
    node.file, node.exports = file, {}
    for _ in range(2 * ATTEMPTS):
        assert node.load(1) is None
        clock[0] += RETRY_S + 0.1
    assert node.v8s.due(clock[0]) == []
    assert node.v8s.refused == refused
