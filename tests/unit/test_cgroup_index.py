# SPDX-License-Identifier: Apache-2.0
"""Which control groups a scan takes in where there are more than it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from sonde.resolve import cgroup_index
from sonde.resolve.cgroup_index import CgroupIndex

MAX_GROUPS = 64


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup_index, "MAX_GROUPS", MAX_GROUPS)
    monkeypatch.setattr(cgroup_index, "MAX_OF_USER", MAX_GROUPS // 4)


def _index(monkeypatch: pytest.MonkeyPatch, *mounts: Path) -> CgroupIndex:
    index = CgroupIndex()
    monkeypatch.setattr(index, "mounts", lambda: enumerate(map(str, mounts)))
    for cache in ("_paths", "_delegated"):  # whatever a scan yields
        monkeypatch.setattr(index, cache, cgroup_index.LruCache(100_000))
    index.scan()
    return index


def _known(index: CgroupIndex, hierarchy: int, folders: list[Path]) -> int:
    return sum(index._get((hierarchy, it.stat().st_ino)) is not None for it in folders)


def _make(parent: Path, count: int) -> list[Path]:
    folders = [parent / f"g{number}" for number in range(count)]
    for folder in folders:
        folder.mkdir(parents=True)
    return folders


def test_groups_of_one_hierarchy_leave_room_for_those_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = _make(tmp_path / "v2", 5 * MAX_GROUPS)
    few = _make(tmp_path / "memory", 10)
    index = _index(monkeypatch, tmp_path / "v2", tmp_path / "memory")
    assert _known(index, 1, few) == 10
    assert _known(index, 0, many) == MAX_GROUPS // 2
    index = _index(monkeypatch, tmp_path / "memory", tmp_path / "v2")
    assert _known(index, 0, few) == 10
    assert _known(index, 1, many) == MAX_GROUPS - 10  # what the first did not need


def test_groups_inside_one_users_leave_room_for_those_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = "user.slice/user-{0}.slice/user@{0}.service"
    many = _make(tmp_path / below.format(1000), 5 * MAX_GROUPS)
    few = _make(tmp_path / below.format(1001), 10)
    index = _index(monkeypatch, tmp_path)
    assert _known(index, 0, few) == 10
    assert 0 < _known(index, 0, many) <= MAX_GROUPS // 4
