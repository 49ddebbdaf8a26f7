# SPDX-License-Identifier: Apache-2.0
"""Code in memory that a program makes up: how many frames a user or container may have there."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from sonde.model.code import Frame
from sonde.resolve import frames_without_file
from sonde.resolve.counters import Counters
from sonde.resolve.frames_without_file import FramesWithoutFile
from sonde.resolve.mappings import Mapping
from sonde.resolve.naming_budget import NamingBudget

USER, OTHER, ROOT = 1000, 1001, 0
REGION = Mapping(0x10_0000, 0x9000_0000)


def process(party: int, **more: Any) -> Any:
    """A process whose perf map does not exist."""
    return SimpleNamespace(party=party, generated_code=None, **more)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> FramesWithoutFile:
    """At most 100 new frames at once."""
    monkeypatch.setattr(frames_without_file, "NEW_BURST", 100)
    monkeypatch.setattr(frames_without_file, "NEW_A_SECOND", 0)
    monkeypatch.setattr(
        frames_without_file, "PerfMaps", lambda *_: SimpleNamespace(find=lambda *_: None)
    )
    counters, budget = Counters(), NamingBudget()
    return FramesWithoutFile(counters, budget, max_frames=1_000)


def frames(made: FramesWithoutFile, party: int, first: int, count: int) -> list[Frame]:
    places = [(REGION, REGION.start + 16 * number) for number in range(first, first + count)]
    found, is_put_off = made.at(process(party), places)
    assert not is_put_off
    return [it.frame for it in found]


def test_addresses_that_are_new_each_time_become_one_frame(made: FramesWithoutFile) -> None:
    assert len(set(frames(made, USER, 1, 100))) == 100
    after = frames(made, USER, 1_000, 50)
    assert set(after) == {Frame("unknown", "", "[anon]")}
    assert made._counters.frames_without_offset == 50


def test_another_user_and_root_keep_their_frames(made: FramesWithoutFile) -> None:
    frames(made, USER, 1, 150)
    frames(made, USER, 500, 1)
    assert len(set(frames(made, OTHER, 2_000, 20))) == 20
    frames(made, ROOT, 3_000, 200)
    assert len(set(frames(made, ROOT, 4_000, 20))) == 20


def test_frames_that_are_known_cost_nothing(made: FramesWithoutFile) -> None:
    for _ in range(20):
        assert len(set(frames(made, USER, 1, 90))) == 90


def test_where_there_is_no_time_for_names_they_come_later(made: FramesWithoutFile) -> None:
    with made._budget.charged(USER):
        until_s = time.thread_time() + 1.1
        while time.thread_time() < until_s:
            pass
    compiled = process(USER)
    compiled.generated_code = SimpleNamespace(name_at=lambda address: None)
    found, is_put_off = made.at(compiled, [(REGION, REGION.start + 16)])
    assert is_put_off
    assert found[0].frame == Frame("unknown", "", "[anon]")
