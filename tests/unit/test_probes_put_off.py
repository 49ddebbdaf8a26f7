# SPDX-License-Identifier: Apache-2.0
"""Who is asked for his map lock, and what is made of the answers; the reading child's part."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sonde import procfs
from sonde.procfs import map_costs, map_locks
from sonde.procfs.map_locks import MapLocks, Why

INODE = 99


class FakeBroker:
    """Of processes that do not answer: whether each has the file mapped."""

    def __init__(self, **locked: bool | None) -> None:
        self.locked = {int(name[1:]): has for name, has in locked.items()}
        self.asked: list[list[int]] = []
        self.is_broken = False
        self.costs: list[tuple[int, int, float]] = []
        self.hung: list[int] = []
        """Those that do not answer for the first time they are asked for their mappings."""

    def map_costs(
        self, whos: list[int], inode: int
    ) -> tuple[list[tuple[int, int, float]], int | None]:
        assert inode == INODE
        if self.is_broken:
            raise OSError("no child")
        hung = next((pid for pid in whos if pid in self.hung), None)
        end = len(whos) if hung is None else whos.index(hung)
        return [cost for cost in self.costs if cost[0] in whos[:end]], hung

    def first_locked(self, whos: list[int]) -> int | None:
        if self.is_broken:
            raise OSError("no child")
        self.asked.append(list(whos))
        return next((pid for pid in whos if pid in self.locked), None)

    def maps(self, who: int, inode: int) -> bool | None:
        assert inode == INODE
        return self.locked[who]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_locks, "pids", lambda: [1, 2, 3, 4, os.getpid()])
    monkeypatch.setattr(map_locks, "party_of", lambda pid: 1000 + pid)


def test_nobody_holds_anything() -> None:
    broker = FakeBroker()
    assert MapLocks(broker).holder(INODE) is None  # type: ignore[arg-type]
    assert broker.asked == [[1, 2, 3, 4]]


def test_who_has_not_mapped_the_file_is_passed_over() -> None:
    broker = FakeBroker(p2=False, p4=True)
    locks = MapLocks(broker)  # type: ignore[arg-type]
    holder = locks.holder(INODE)
    assert holder is not None
    assert (holder.pid, holder.party, holder.why) == (4, 1004, Why.LOCKED)
    assert broker.asked == [[1, 2, 3, 4], [3, 4]]
    broker.asked.clear()
    assert locks.holder(INODE) == holder
    assert broker.asked == [[4, 1, 2, 3]]  # it first
    broker.locked.clear()
    assert locks.holder(INODE) is None


def test_who_executes_a_program_is_not_asked_again_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = FakeBroker(p2=None)
    locks = MapLocks(broker)  # type: ignore[arg-type]
    assert locks.holder(INODE) is None
    broker.asked.clear()
    assert locks.holder(INODE) is None
    assert broker.asked == [[1, 3, 4]]
    monkeypatch.setattr(map_locks, "EXECUTING_S", 0.0)
    locks = MapLocks(broker)  # type: ignore[arg-type]
    broker.asked.clear()
    assert locks.holder(INODE) is None
    assert locks.holder(INODE) is None
    assert broker.asked == [[1, 2, 3, 4], [3, 4]] * 2


def test_what_is_not_known_in_time_is_taken_for_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_locks, "MAX_SILENT", 1)
    broker = FakeBroker(p2=False, p3=False)
    locks = MapLocks(broker)  # type: ignore[arg-type]
    holder = locks.holder(INODE)
    assert holder is not None
    assert (holder.pid, holder.why) == (2, Why.UNKNOWN)
    assert "is not known" in str(holder)
    assert locks.holder(INODE) is holder
    assert len(broker.asked) == 1  # nor is it asked at once again


def test_without_a_child_to_ask_with_nothing_is_known() -> None:
    broker = FakeBroker()
    broker.is_broken = True
    holder = MapLocks(broker).holder(INODE)  # type: ignore[arg-type]
    assert holder is not None
    assert holder.why is Why.UNKNOWN


@pytest.mark.parametrize(
    ("costs", "pid"),
    [
        pytest.param([(1, 2, 0.0), (2, 2, 0.001), (3, 4, 0.0)], None, id="ordinary"),
        pytest.param([(1, 2, 0.0), (3, 33, 0.0)], 3, id="one_that_maps_it_often"),
        pytest.param([(1, 32, 0.0), (3, 10, 0.01)], 3, id="one_whose_lock_is_busy"),
    ],
)
def test_who_maps_a_file_too_often_or_keeps_his_lock_busy(
    costs: list[tuple[int, int, float]], pid: int | None
) -> None:
    broker = FakeBroker()
    broker.costs = costs
    holder = MapLocks(broker).holder(INODE)  # type: ignore[arg-type]
    assert (holder and holder.pid) == pid
    if holder is not None:
        assert holder.why is Why.CROWDED
        assert f"process {pid} of user {1000 + holder.pid} maps it so often" in str(holder)


def test_the_processes_of_a_party_count_together_beyond_what_is_ordinary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = range(10, 1010)
    monkeypatch.setattr(map_locks, "pids", lambda: many)
    broker = FakeBroker()
    broker.costs = [(pid, 2, 0.0) for pid in many]
    locks = MapLocks(broker)  # type: ignore[arg-type]
    assert locks.holder(INODE) is None
    broker.costs = [(pid, 14, 0.0) for pid in many[:30]]
    assert locks.holder(INODE) is None  # of a party each
    monkeypatch.setattr(map_locks, "party_of", lambda pid: 1000)
    assert locks.holder(INODE) is not None


def test_who_does_not_let_his_mappings_be_counted_is_looked_at() -> None:
    broker = FakeBroker(p2=True)
    broker.hung = [2]
    holder = MapLocks(broker).holder(INODE)  # type: ignore[arg-type]
    assert holder is not None
    assert (holder.pid, holder.why) == (2, Why.LOCKED)
    assert broker.asked == []


def test_asking_takes_every_lock_and_changes_nothing() -> None:
    broker = procfs.Broker()
    try:
        with subprocess.Popen(["sleep", "60"]) as child:
            time.sleep(0.5)  # until it is loaded
            before = Path(f"/proc/{child.pid}/maps").read_text()
            assert broker.first_locked([child.pid, os.getpid(), 2, 500_000_001]) is None
            assert Path(f"/proc/{child.pid}/maps").read_text() == before
            child.kill()
            child.wait()
            assert broker.first_locked([child.pid]) is None
    finally:
        broker.close()


def test_a_file_is_mapped_by_any_process_with_a_private_mapping_of_any_rights(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a file with 77 words"
    path.write_bytes(b"x" * mmap.PAGESIZE)
    inode = path.stat().st_ino
    broker = procfs.Broker()
    try:
        with path.open("r+b") as file:
            assert not broker.maps(os.getpid(), inode)
            with mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED):
                assert not broker.maps(os.getpid(), inode)
            with mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ):
                assert broker.maps(os.getpid(), inode)
                assert not broker.maps(os.getpid(), int(str(inode)[:-1]))
        assert not broker.maps(500_000_001, inode)
    finally:
        broker.close()


def test_a_long_list_is_read_piece_by_piece_and_up_to_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "maps"
    line = b"7f00-7f01 %s 00000000 08:01 %d                 /a\n"
    path.write_bytes(line % (b"r--p", 5) * 4000 + line % (b"r-xp", 6) + line % (b"r--s", 7))

    def found(inode: int) -> int | None:
        fd = os.open(path, os.O_RDONLY)
        try:
            return map_costs.times_mapped(fd, inode)
        finally:
            os.close(fd)

    assert [found(5), found(6), found(7), found(0)] == [4000, 1, 0, 0]
    monkeypatch.setattr(map_costs, "MAX_MAPS_BYTES", 1 << 16)
    assert found(7) == map_costs.MANY  # not read to its end
    monkeypatch.undo()
    monkeypatch.setattr(map_costs, "MANY", 1000)
    assert found(5) == 1000
    path.write_bytes(b"")
    assert found(5) is None


def test_only_mappings_over_the_same_place_of_a_file_add_up(tmp_path: Path) -> None:
    """As the kernel counts for one uprobe; the segments of a library lie beside one another."""
    path = tmp_path / "a 7 b"
    path.write_bytes(b"x" * 4 * mmap.PAGESIZE)
    page = mmap.PAGESIZE
    broker = procfs.Broker()
    try:
        with path.open("rb") as file:
            inode, number, held = path.stat().st_ino, file.fileno(), []

            def add(pages: int, at: int) -> int:
                made = mmap.mmap(
                    number, pages * page, mmap.MAP_PRIVATE, mmap.PROT_READ, offset=at * page
                )
                held.append(made)
                [(pid, times, wait_s)], hung = broker.map_costs([os.getpid(), 2], inode)
                assert (pid, hung) == (os.getpid(), None)
                assert wait_s < 10
                return times

            assert [add(1, 0), add(2, 1), add(1, 3)] == [1, 1, 1]
            assert [add(4, 0), add(1, 2), add(1, 0)] == [2, 3, 3]
        assert broker.map_costs([os.getpid()], 7) == ([], None)
    finally:
        broker.close()


def test_a_process_whose_first_thread_ended_is_asked_all_the_same() -> None:
    script = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=lambda: (print(flush=True), time.sleep(60))).start()\n"
        "ctypes.CDLL(None).syscall(60 if __import__('os').uname().machine == 'x86_64' else 93, 0)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            deadline_s = time.monotonic() + 10
            while "Z" not in Path(f"/proc/{child.pid}/stat").read_text().split()[2]:
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            program = Path(sys.executable).resolve().stat().st_ino
            broker = procfs.Broker()
            try:
                assert broker.first_locked([child.pid]) is None
                assert broker.maps(child.pid, program)
            finally:
                broker.close()
        finally:
            child.kill()


def test_a_child_that_keeps_something_stays_until_it_may_close_it() -> None:
    """Nobody of this machine keeps his map locked: at once."""
    broker = procfs.Broker()
    ours, theirs = os.pipe()
    pid = broker.keep(theirs, 1)
    os.close(theirs)
    os.set_blocking(ours, False)
    with pytest.raises(BlockingIOError):
        os.read(ours, 1)
    broker.outlive()
    os.set_blocking(ours, True)
    timer = threading.Timer(60, os.kill, (pid, signal.SIGKILL))
    timer.start()
    assert os.read(ours, 1) == b""
    timer.cancel()
    os.close(ours)


def test_the_address_that_is_read_is_nobodys() -> None:
    assert ctypes.sizeof(ctypes.c_void_p) == 8
    assert map_costs.NOWHERE % mmap.PAGESIZE == 0
    assert 1 << 62 < map_costs.NOWHERE <= (1 << 63) - mmap.PAGESIZE
