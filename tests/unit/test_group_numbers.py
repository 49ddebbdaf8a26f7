# SPDX-License-Identifier: Apache-2.0
"""Numbers of control groups: as many as there are groups, however many there were."""

from __future__ import annotations

from pathlib import Path

import pytest

from sonde.procfs import group_numbers
from sonde.procfs.group_mounts import GroupMount
from sonde.procfs.group_numbers import GroupNumbers


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(group_numbers, "MAX_GROUPS", 3)
    monkeypatch.setattr(group_numbers, "LOOK_EVERY_S", 0.0)
    mounts = [GroupMount("/nowhere", frozenset()), GroupMount(str(tmp_path), frozenset({"v2"}))]
    monkeypatch.setattr(group_numbers, "group_mounts", lambda: mounts)
    return tmp_path


def test_a_group_that_is_gone_leaves_its_number_to_none(root: Path) -> None:
    numbers, given = GroupNumbers(), set()
    (root / "stays").mkdir()
    stays, user = numbers.of("/stays"), numbers.of("user 7")
    for container in range(50):
        group = root / f"container{container}"
        group.mkdir()
        given.add(numbers.of(f"/{group.name}"))
        group.rmdir()
    assert None not in given
    assert len(given) == 50
    assert (numbers.of("/stays"), numbers.of("user 7")) == (stays, user)
    assert numbers.name_of(stays or 0) == "/stays"


def test_groups_that_are_there_keep_their_numbers(root: Path) -> None:
    numbers = GroupNumbers()
    for name in "abcd":
        (root / name).mkdir()
    assert None not in {numbers.of(f"/{name}") for name in "abc"}
    assert numbers.of("/d") is None


def test_where_other_groups_are_mounted_none_is_taken_for_gone(root: Path) -> None:
    numbers = GroupNumbers()
    before = [numbers.of(f"/{name}") for name in "abc"]
    assert numbers.of("/d") is None
    assert [numbers.of(f"/{name}") for name in "abc"] == before
