# SPDX-License-Identifier: Apache-2.0
"""Whom `record -p` watches besides: descendants that go on, and nobody who got their number."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import pytest

from sonde.collect import kernel as kernel_module
from sonde.collect.kernel import PASSES, Kernel

ROOT = 100


@dataclass
class Stat:
    """As /proc/PID/stat has it."""

    ppid: int
    start_ns: int = 1
    goes_on: bool = True


class Targets:
    """The map of watched processes."""

    def __init__(self) -> None:
        self.pids: set[int] = set()

    def set_hash(self, _: str, key: bytes, __: bytes) -> None:
        self.pids.add(struct.unpack("=I", key)[0])

    def delete_hash(self, _: str, key: bytes) -> None:
        self.pids.remove(struct.unpack("=I", key)[0])


@pytest.fixture
def watched(monkeypatch):
    """Whom it watches, by what each pass finds, and each look at a process."""

    def found(families, looks):
        kernel = Kernel.__new__(Kernel)
        targets = Targets()
        kernel._shared, kernel._unwatched = {"targets": targets}, 0
        passes = iter(families)
        monkeypatch.setattr(
            kernel_module.procfs, "family", lambda roots, **_: {*roots, *next(passes)}
        )
        left = {pid: iter(each) for pid, each in looks.items()}
        monkeypatch.setattr(kernel_module.procfs, "read_stat", lambda pid: next(left[pid]))
        kernel._watch_with_children(frozenset([ROOT]))
        return targets.pids

    return found


@pytest.mark.parametrize(
    "looks",
    [
        [None],  # gone
        [Stat(ROOT), None],  # ended before it was watched
        [Stat(ROOT), Stat(ROOT, goes_on=False)],
        [Stat(ROOT), Stat(7, start_ns=2)],  # its number is somebody else's
        [Stat(7, start_ns=2)],  # already
    ],
)
def test_a_child_that_has_ended_leaves_no_number(watched, looks):
    assert watched([{101}, {101}], {101: looks}) == {ROOT}


def test_children_that_go_on_are_watched_pass_by_pass(watched):
    looks = {101: [Stat(ROOT)] * 2, 102: [Stat(101)] * 2}
    assert watched([{101}, {101, 102}, {101, 102}], looks) == {ROOT, 101, 102}


def test_a_program_that_forks_without_end_delays_nothing(watched):
    families = ({200 + it for it in range(number + 1)} for number in range(10_000))
    looks = {200 + it: [Stat(ROOT)] * 2 for it in range(10_000)}
    assert len(watched(families, looks)) == 1 + PASSES
