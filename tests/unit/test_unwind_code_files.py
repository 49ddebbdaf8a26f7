# SPDX-License-Identifier: Apache-2.0
"""What is remembered of files with code: no more for those that processes had mapped once."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sonde import procfs
from sonde.resolve import Resolver
from sonde.unwind import code_files
from sonde.unwind.code_files import CodeFiles, Deadline
from sonde.unwind.idle_files import IdleFiles

FILES = 40


class Cache:
    """Builds no table."""

    has_queue = False

    def __init__(self) -> None:
        self.room = FILES
        self.requested: list[str] = []
        self.failed: set[str] = set()

    def has_room(self, party: int) -> bool:
        return self.room > 0

    def find(self, key: str) -> None:
        return None

    def has_failed(self, key: str) -> bool:
        return key in self.failed

    def awaits(self, key: str) -> bool:
        return key in self.requested

    def request(self, key: str, fd: int, party: int) -> None:
        if self.room:
            self.room -= 1
            self.requested.append(key)

    def poll(self) -> list[str]:
        done, self.requested = self.requested, []
        self.failed.update(done)
        return done


PROGRAM = """
import mmap, pathlib, sys
kept = []
for number in range(int(sys.argv[2])):
    path = pathlib.Path(sys.argv[1], f"{number}.so")
    path.unlink(missing_ok=True)
    path.write_bytes(pathlib.Path("/bin/true").read_bytes()[:4096])
    with path.open("rb") as file:
        protection = mmap.PROT_READ | mmap.PROT_EXEC
        kept.append(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, protection))
print("ready", flush=True)
sys.stdin.read()
"""


class Files:
    """The files of one process after the other, each which makes its files."""

    def __init__(self, folder: Path, resolver: Resolver) -> None:
        self.cache = Cache()
        self.files = CodeFiles(None, resolver, self.cache, lambda *_: None)  # type: ignore[arg-type]
        self._folder = folder
        self._resolver = resolver

    def load(self, party: int = 0) -> tuple[int, set[int]]:
        """Loads a process that has new files. Its pid, and their indices."""
        pid, found = self.look_up(party)
        self.files.used(pid, party, found)
        return pid, found

    def look_up(self, party: int) -> tuple[int, set[int]]:
        """The same without its last turn."""
        argv = [sys.executable, "-c", PROGRAM, str(self._folder), str(FILES)]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            stat = procfs.read_stat(child.pid)
            assert stat is not None
            process = self._resolver.processes.find(child.pid, stat.start_ns)
            process._party = party
            theirs = process.space().mappings
            mappings = [it for it in theirs if it.path.startswith(str(self._folder))]
            self.files.look_up(process, mappings, Deadline(time.thread_time() + 9, 1e18))
        found = set()
        for file, index in map(self.files.of, mappings):
            assert file is not None
            self.files.wait_for(file, child.pid, process.party)
            found.add(index)
        return child.pid, found


@pytest.fixture
def resolver() -> Iterator[Resolver]:
    found = Resolver()
    yield found
    found.close()


def test_files_that_nobody_maps_any_more_are_forgotten(
    tmp_path: Path, resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_files, "MAX_IDLE", FILES)
    mine = Files(tmp_path, resolver)
    loaded = []
    for _ in range(3):
        loaded.append(mine.load())
        assert len(loaded[-1][1]) == FILES
        mine.files.finished()
        mine.cache.room = FILES
    assert len(mine.files._files) == 3 * FILES
    for pid, files in loaded:
        mine.files.drop_user(pid, files)
    assert set(mine.files._files) == loaded[-1][1]
    assert not mine.files._waiting


def test_files_of_one_user_push_out_none_of_a_process_of_another_that_is_being_loaded(
    tmp_path: Path, resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_files, "MAX_IDLE", 2 * FILES)
    mine = Files(tmp_path, resolver)
    honest, first = mine.look_up(party=1)
    for _ in range(3):
        pid, files = mine.look_up(party=2)
        mine.files.used(pid, 2, files & set(mine.files._files))
        mine.files.drop_user(pid, files & set(mine.files._files))
    assert first < set(mine.files._files)
    assert len(mine.files._files) == 2 * FILES
    mine.files.used(honest, 1, first)


def test_a_file_is_remembered_as_long_as_one_of_its_parties_has_room() -> None:
    idle = IdleFiles()
    for index in range(3):
        idle.use(index, party=1)
    for index in range(2, 9):
        idle.use(index, party=2)
    assert list(idle.forget_beyond(6)) == [3, 4, 5]  # 2 is left to party 1
    idle.use(0, party=1)
    assert list(idle.forget_beyond(5)) == [1]
    assert [it in idle for it in range(9)] == [True, False, True, *3 * [False], *3 * [True]]
    idle.drop(2, party=2)
    assert 2 in idle
    for index in range(9):
        idle.drop(index)
    assert list(idle.forget_beyond(0)) == []
    assert not any(it in idle for it in range(9))


def test_a_process_whose_requests_were_dropped_asks_again(
    tmp_path: Path, resolver: Resolver
) -> None:
    mine = Files(tmp_path, resolver)
    mine.cache.room = 0
    pid, _ = mine.load()
    assert mine.files.finished() == set()
    assert not mine.files._waiting
    mine.cache.room = FILES
    assert mine.files.finished() == {pid}
    assert mine.files.finished() == set()
