# SPDX-License-Identifier: Apache-2.0
"""Folders of control groups that do not answer: skipped, counted, charged; the rest is read."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest

from sonde import procfs
from sonde.collect.host.groups import GroupTree
from sonde.procfs import group_folders
from sonde.procfs.group_answers import read_group
from sonde.procfs.group_folders import GroupFolders
from sonde.procfs.patience import MAX_ABANDONED_OF_PARTY
from sonde.resolve.cgroup_index import _groups

MANY = 300


class Child:
    """One that was killed; it dies once its folder is not locked any more."""

    def __init__(self, locked: set[str] | None) -> None:
        self.locked = locked
        self.folder = ""

    def poll(self) -> int | None:
        return None if self.locked is not None and self.folder in self.locked else -9


class Fake(GroupFolders):
    """Folders of a tree of files; the child that reads `locked` ones never answers."""

    def __init__(self, locked: set[str], *, is_deadly: bool = False) -> None:
        super().__init__()
        self.locked = locked
        self.is_deadly = is_deadly
        self.asked: list[str] = []
        self.late: dict[str, float] = {}
        self.requests = self.children = 0
        self._left: deque[tuple[str, Any]] = deque()

    def _start(self) -> Any:
        if self._child is None:
            self._child = Child(self.locked if self.is_deadly else None)  # type: ignore[assignment]
            self.children += 1

    def _send(self, request: Any, fd: int | None = None) -> None:
        self._start()
        self.requests += 1
        _, folders, *how = request
        self._left = deque((folder, (names, *how)) for folder, names in folders)

    def _receive(self, until_s: float) -> tuple[int, Any, float]:
        folder, how = self._left[0]
        if folder in self.locked:
            self._child.folder = folder  # type: ignore[union-attr]
            raise TimeoutError
        self._left.popleft()
        self.asked.append(folder)
        try:
            content, _ = read_group(folder, *how)
        except OSError as error:
            return error.errno or 5, None, 0.0
        return 0, content, self.late.get(folder, 0.0)

    def _is_running(self) -> bool:
        return False

    def _give_up(self, party: int = procfs.NOBODY) -> None:
        child, self._child = self._child, None
        if child is not None:
            self.abandoned.add(child, party)


def made(tmp_path: Path, *paths: str) -> list[str]:
    for path in paths:
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "cpu.max").write_text(path)
    return [str(tmp_path / path) for path in paths]


def party(folder: str) -> str:
    return Path(folder).name[0]


def names(folders: list[str]) -> list[list[str]]:
    return [["cpu.max", "absent"]] * len(folders)


def test_one_that_does_not_answer_is_skipped_and_the_others_are_read(tmp_path: Path) -> None:
    folders = made(tmp_path, "a1", "b1", "c1")
    fake = Fake({folders[1]})
    found, unread = fake.look([*folders, str(tmp_path / "gone")], party, names([*folders, ""]))
    assert [it and it.contents for it in found] == [
        {"cpu.max": b"a1"},
        None,
        {"cpu.max": b"c1"},
        None,
    ]
    assert (unread, fake.hung, fake.children) == (1, 1, 2)


def test_it_is_left_alone_for_a_while_and_so_is_what_is_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time_s = [1_000.0]
    monkeypatch.setattr(group_folders.time, "monotonic", lambda: time_s[0])
    a, below, b = made(tmp_path, "a", "a/below", "b")
    fake = Fake({a})
    for passed_s, asks in ((0, True), (5, False), (6, True), (15, False), (6, True), (30, False)):
        time_s[0] += passed_s
        before = fake.hung
        found, unread = fake.look([a, below, b], party)
        assert [it is not None for it in found] == [False, False, True]
        assert (fake.hung - before, unread) == (int(asks), 2)
    fake.locked.clear()
    time_s[0] += 300
    found, unread = fake.look([a, below, b], party)
    assert None not in found
    assert unread == 0


def test_a_child_that_cannot_die_is_not_followed_by_another_for_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time_s = [1_000.0]
    monkeypatch.setattr(group_folders.time, "monotonic", lambda: time_s[0])
    folders = made(tmp_path, "a")
    fake = Fake(set(folders), is_deadly=True)
    for _ in range(5):
        fake.look(folders, party)
        time_s[0] += 1_000
    assert len(fake.abandoned) == 1
    assert fake.hung == 1
    fake.locked.clear()
    found, _ = fake.look(folders, party)
    assert found[0] is not None


def test_a_party_loses_two_children_and_costs_the_others_nothing(tmp_path: Path) -> None:
    of_one = made(tmp_path, *(f"a{number}" for number in range(10)))
    others = made(tmp_path, *(f"b{number}" for number in range(10)))
    fake = Fake(set(of_one), is_deadly=True)
    found, unread = fake.look([*of_one, *others], party)
    assert len(fake.abandoned) == MAX_ABANDONED_OF_PARTY
    assert [it is not None for it in found] == [False] * 10 + [True] * 10
    assert unread == fake.hung == 10


def test_late_answers_use_up_what_may_be_waited_for_a_party(tmp_path: Path) -> None:
    of_one = made(tmp_path, *(f"a{number}" for number in range(MANY)))
    (other,) = made(tmp_path, "b")
    fake = Fake(set())
    fake.late = dict.fromkeys(of_one, 0.2)
    fake.look(of_one[:9], party)
    before = len(fake.asked)
    found, _ = fake.look(of_one, party)
    assert not any(found)
    assert len(fake.asked) == before
    fake.alone.all.left_s = group_folders.ALL_S / 2
    found, _ = fake.look([other], party)
    assert found[0] is not None


def test_many_folders_take_few_requests(tmp_path: Path) -> None:
    folders = made(tmp_path, *(f"a{number}" for number in range(MANY)))
    fake = Fake(set())
    found, _ = fake.look(folders, party, names(folders))
    assert None not in found
    assert fake.requests == -(-MANY // group_folders.MAX_ASKED)


def test_a_child_that_ends_costs_a_folder_at_most(tmp_path: Path) -> None:
    folders = made(tmp_path, "a1", "a2", "a3")

    class Ends(Fake):
        def _receive(self, until_s: float) -> tuple[int, Any, float]:
            if self._left[0][0] == folders[1] and not self.hung:
                raise BrokenPipeError
            return super()._receive(until_s)

    fake = Ends(set())
    found, unread = fake.look(folders, party)
    assert [it is not None for it in found] == [True, False, True]
    assert unread == 1


def test_a_scan_goes_on_beside_a_folder_that_hangs(tmp_path: Path) -> None:
    made(tmp_path, "a/x", "a/y/z", "b/x", "b/y/z")
    fake = Fake({str(tmp_path / "a")})
    found = {path for _, path, _ in _groups(str(tmp_path), {False: 50, True: 50}, fake)}
    assert found == {"/", "/a", "/b", "/b/x", "/b/y", "/b/y/z"}
    assert fake.hung == 1


def test_a_look_for_limits_counts_it_as_not_looked_at(tmp_path: Path) -> None:
    made(tmp_path, "a/x", "b/x")
    fake = Fake({str(tmp_path / "a")})
    tree = GroupTree(str(tmp_path), ["cpu.max"], fake)
    assert {it.path for it in tree.groups()} == {"", "/b", "/b/x"}
    assert tree.unvisited == 1


def test_a_real_child_reads_and_opens_files(tmp_path: Path) -> None:
    folders = made(tmp_path, "a", "b")
    real = GroupFolders()
    try:
        found, unread = real.look(folders, party, names(folders), limit=1, most_below=1)
        assert [it and it.contents for it in found] == [{"cpu.max": b"a"}, {"cpu.max": b"b"}]
        assert unread == 0
        (top,), _ = real.look([str(tmp_path)], party, most_below=1)
        assert top is not None
        assert (len(top.below), top.more) == (1, 1)
        assert top.inode == tmp_path.stat().st_ino
        opened = real.open_files(folders, party, names(folders))
        assert [[*it] for it in opened] == [["cpu.max"], ["cpu.max"]]
        for name, fds in zip("ab", opened, strict=True):
            with open(fds["cpu.max"], "rb") as file:  # noqa: PTH123
                assert file.read() == name.encode()
    finally:
        real.close()
