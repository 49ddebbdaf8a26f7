# SPDX-License-Identifier: Apache-2.0
"""What looking at the files that processes map may cost for one user or container."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from tests.unit.test_unwind_refusals import Cache, Maps

from sonde import _native, procfs
from sonde._native import MmapEvent
from sonde.collect import waiting_files
from sonde.collect.mapped_files import MappedFile
from sonde.collect.waiting_files import WaitingFiles
from sonde.resolve import Resolver, held_mappings, mappings, processes
from sonde.resolve.mappings import MAX_PATH_BYTES, AddressSpace, Mapping
from sonde.resolve.naming_budget import NamingBudget
from sonde.resolve.new_files import in_turn
from sonde.resolve.process_image import ProcessImage
from sonde.resolve.processes import ProcessTable
from sonde.resolve.tracked_process import TrackedProcess
from sonde.unwind import code_files, unwinder
from sonde.unwind.unwinder import Unwinder

USER, OTHER = 1000, 1001
LONG = "/" + "d" * 3_800


class Loading(Maps):
    """The kernel's maps, with room for everything."""

    def __init__(self) -> None:
        self.ranges: dict[int, list[tuple[int, int, int, int]]] = {}

    def set_process(self, pid: int, _start: int, ranges: object, _runtime: object) -> None:
        self.ranges[pid] = ranges  # type: ignore[assignment]

    def drop_process(self, pid: int) -> None:
        self.ranges.pop(pid, None)


def mapping(number: int, path: str = "/x") -> Mapping:
    at = 0x1000 * (number + 1)
    return Mapping(at, at + 0x1000, 0, (8, 1, number + 1), f"{path}{number}")


@pytest.fixture
def of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes are one user's."""
    monkeypatch.setattr(TrackedProcess, "party", USER)


class Loaded:
    """An unwinder over played maps, and this process with mappings that are made up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, files: int) -> None:
        self.maps = Loading()
        monkeypatch.setattr(_native, "UnwindMaps", lambda _owner: self.maps)
        self.resolver = Resolver()
        self.unwinder = Unwinder(None, self.resolver, Cache())  # type: ignore[arg-type]
        self.looked_at: list[int] = []
        found = procfs.read_stat(os.getpid())
        assert found is not None
        process = self.resolver.processes.find(os.getpid(), found.start_ns)
        process.image = ProcessImage(os.getpid(), "exec")
        process.image._space = AddressSpace(map(mapping, range(files)))
        monkeypatch.setattr(self.resolver, "file_of", self._file_of)

    def _file_of(self, _process: TrackedProcess, mapping: Mapping) -> None:
        self.looked_at.append(mapping.file[2])

    def load(self) -> None:
        self.unwinder._stale.add(os.getpid())
        self.unwinder.update()


def test_the_files_of_a_process_are_looked_up_over_several_updates(
    of_a_user: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unwinder, "UPDATE_S", 0.0)
    clock = [100.0]

    def monotonic() -> float:
        clock[0] += 1e-6  # every look at the clock is a little later
        return clock[0]

    monkeypatch.setattr(unwinder.time, "monotonic", monotonic)
    monkeypatch.setattr(unwinder, "UPDATE_S", 2e-5)
    it = Loaded(monkeypatch, 300)
    it.load()
    assert 1 <= len(it.looked_at) < 50
    assert it.unwinder.is_busy
    assert not it.maps.ranges
    for _ in range(300):
        it.unwinder.update()
    assert it.looked_at == list(range(1, 301))  # each once
    assert len(it.maps.ranges[os.getpid()]) == 300
    assert not it.unwinder.is_busy


def test_of_a_process_with_ever_so_many_files_a_part_is_looked_up(
    of_a_user: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_files, "MAX_FILES", 20)
    monkeypatch.setattr(unwinder, "UPDATE_S", 60.0)
    it = Loaded(monkeypatch, 300)
    it.load()
    it.load()
    assert it.looked_at == [*range(1, 21)] * 2
    assert len(it.maps.ranges[os.getpid()]) == 300
    assert it.unwinder.losses()["too_many_files"] == 2


def test_a_party_without_time_for_files_waits_and_costs_nothing(
    of_a_user: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Loaded(monkeypatch, 3)
    monkeypatch.setattr(it.resolver.files_budget, "is_over", lambda _, in_turn=True: in_turn)
    it.load()
    stats: list[int] = []
    monkeypatch.setattr(procfs, "read_stat", stats.append)
    it.load()
    assert not it.looked_at
    assert not stats
    assert not it.unwinder.is_busy
    assert it.unwinder.losses()["delayed"] == 1


def test_a_process_that_the_operator_chose_waits_for_no_turn(
    of_a_user: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Loaded(monkeypatch, 3)
    monkeypatch.setattr(it.resolver.files_budget, "is_over", lambda _, in_turn=True: in_turn)
    monkeypatch.setattr(unwinder, "UPDATE_S", 60.0)
    it.unwinder.expect([os.getpid()])
    assert it.looked_at == [1, 2, 3]


def test_what_a_load_takes_is_its_partys(of_a_user: None, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Loaded(monkeypatch, 300)
    taken: list[int] = []
    monkeypatch.setattr(
        it.resolver.files_budget._time, "take", lambda party, _: taken.append(party)
    )
    monkeypatch.setattr(unwinder, "UPDATE_S", 60.0)
    monkeypatch.setattr("sonde.resolve.naming_budget.FREE_S", 0.0)
    charged = it.resolver.files_budget.charged
    monkeypatch.setattr(it.resolver.files_budget, "charged", lambda party: charged(party, 0.0))
    it.load()
    assert taken == [USER]


def test_what_is_charged_within_is_charged_once() -> None:
    budget = NamingBudget()
    taken: list[int] = []
    budget._time.take = lambda party, _: taken.append(party)  # type: ignore[method-assign]
    with budget.charged(USER, free_s=0.0), budget.charged(OTHER, free_s=0.0):
        pass
    with budget.charged(OTHER, free_s=0.0):
        pass
    assert taken == [USER, OTHER]


def test_long_paths_count_for_what_they_take() -> None:
    short, long = AddressSpace(), AddressSpace()
    for number in range(2_000):
        short.add(mapping(number))
        long.add(mapping(number, LONG))
    assert (len(short), short.left_out) == (2_000, 0)
    assert len(long) <= MAX_PATH_BYTES / len(LONG)
    assert long.left_out == 2_000 - len(long)
    assert long.size > 10 * len(long)
    copy = long.copy()
    for number in range(len(long)):
        long.add(mapping(number))
    assert long.size < copy.size / 10  # what is replaced counts no more
    wide = AddressSpace([mapping(1, LONG + "\U0001f600")])  # four bytes a character
    assert wide.size > 3 * AddressSpace([mapping(1, LONG)]).size


def test_mappings_of_all_are_bounded_with_their_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_mappings, "MAX_MAPPINGS_HELD", 5_000)
    table = ProcessTable()

    def process(pid: int, image: ProcessImage) -> TrackedProcess:
        found = table._live[pid] = TrackedProcess(pid, 1, 1, "x", image)
        return found

    def image(count: int, path: str) -> ProcessImage:
        built = ProcessImage(1, "exec")
        built._space = AddressSpace(mapping(number, path) for number in range(count))
        return built

    usual = process(1, image(1_000, "/x"))
    parent = image(500, LONG)
    children = [process(pid, parent.forked(pid)) for pid in range(2, 9)]  # it has ended itself
    before = process(10, ProcessImage(10, "exec"))
    before.previous = image(500, LONG)
    for _ in range(9):  # what children share is gone when the last of them has given it up
        table._bound_mappings()
    assert usual.image.count == 1_000
    assert before.previous is None
    assert all(it.image.source is None for it in children)
    assert table.counters.mappings_left_out == 500 * 2  # what children share counts once


def test_mappings_are_dropped_of_the_party_that_holds_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.procfs, "party_of", lambda pid: OTHER if pid < 1_000 else USER)
    table = ProcessTable()

    def process(pid: int, count: int) -> TrackedProcess:
        image = ProcessImage(pid, "exec")
        image._space = AddressSpace(mapping(number, "/x") for number in range(count))
        found = table._live[pid] = TrackedProcess(pid, 1, 1, "x", image)
        return found

    largest, parent = process(1, 1_500), process(2, 10)
    forks = [TrackedProcess(pid, 1, 1, "x", parent.image.forked(pid)) for pid in range(3, 1_000)]
    table._live |= {it.pid: it for it in forks}  # what they share counts once
    many = [process(pid, 1_000) for pid in range(2_000, 2_020)]
    most = largest.image.size + parent.image.size + 3 * many[0].image.size
    monkeypatch.setattr(held_mappings, "MAX_MAPPINGS_HELD", most)
    table._bound_mappings()
    assert (largest.image.count, parent.image.count) == (1_500, 10)
    assert all(it.image.source is parent.image for it in forks)
    assert sum(it.image.count for it in many) == 3_000
    assert table.counters.mappings_left_out == 17_000


def test_new_files_of_each_party_are_opened_in_turn() -> None:
    flood = SimpleNamespace(party=USER)
    quiet = SimpleNamespace(party=OTHER)
    files = [(quiet, (8, 1, 1)), (quiet, (8, 1, 2)), *((flood, (8, 1, it)) for it in range(3, 900))]
    found = [file[2] for _, file in in_turn(files, 6)]  # type: ignore[arg-type]
    assert found == [899, 2, 898, 1, 897, 896]
    assert in_turn(files[:2], 6) == [files[1], files[0]]  # type: ignore[comparison-overlap, arg-type]


def test_new_files_are_not_opened_for_a_party_without_time(
    of_a_user: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver = Resolver()
    opened: list[Mapping] = []
    monkeypatch.setattr(resolver._binaries, "of", lambda _, mapping: opened.append(mapping))
    mapped = [
        MmapEvent(0, os.getpid(), os.getpid(), 0x1000 * it, 0x1000, 0, (8, 1, it), f"/x{it}")
        for it in range(1, 4)
    ]
    resolver.on_process_events(mapped[:1])
    monkeypatch.setattr(resolver.files_budget, "is_over", lambda _: True)
    resolver.on_process_events(mapped[1:])
    assert len(opened) == 1
    assert resolver.counters.files_put_off == 2


def test_code_of_new_files_has_no_names_until_its_party_has_time(
    of_a_user: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver = Resolver()
    process = TrackedProcess(os.getpid(), 1, 1, "x", ProcessImage(os.getpid(), "proc"))
    address = int.from_bytes(os.urandom(2), "little")
    monkeypatch.setattr(resolver.files_budget, "is_over", lambda _: True)
    assert [it.frame.binary for it in resolver.resolve(process, (), [address])] == ["[unknown]"]
    assert not process.image.is_built  # nor are its mappings read


def waiting(party: int, inode: int) -> MappedFile:
    return MappedFile(party, (8, 1, inode), f"/{inode}", 0, 1)


def test_files_of_each_party_are_looked_at_in_turn_those_with_time_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting_files, "MAX_WAITING", 40)
    files = WaitingFiles()
    for inode in range(100):
        files.add(USER, waiting(USER, inode), is_urgent=False)
    files.add(OTHER, waiting(OTHER, 200), is_urgent=False)
    files.add(OTHER, waiting(OTHER, 201), is_urgent=False)
    files.add(OTHER, waiting(OTHER, 202), is_urgent=True)
    assert (len(files), files.left_out) == (13, 90)

    def take(*over: int) -> int:
        found = files.take(lambda party: party not in over)
        return found[1].key[2] if found else -1

    assert [take() for _ in range(4)] == [202, 0, 200, 1]
    assert take(USER) == 201
    assert take(USER) == -1
    assert len(files) == 8
    assert [take() for _ in range(9)] == [*range(2, 10), -1]
    assert len(files) == 0


def test_waiting_files_with_long_paths_count_for_several() -> None:
    files = WaitingFiles()
    for inode in range(1, 4_000):
        files.add(USER, MappedFile(1, (8, 1, inode), f"{LONG}{inode}", 0, 1), is_urgent=True)
    assert len(files) * len(LONG) < 1.1 * 256 * waiting_files.MAX_WAITING / waiting_files.PARTS
    assert files.left_out == 3_999 - len(files)


def test_what_the_child_reads_for_a_party_is_charged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    began_s = procfs.BROKER.cpu_s()
    for _ in range(50):
        assert procfs.read_maps(os.getppid())  # our own mappings we read ourselves
    assert 0 < procfs.BROKER.cpu_s() - began_s < 60
    budget, clock = NamingBudget(), iter([1.0, 3.0])
    monkeypatch.setattr(procfs.BROKER, "cpu_s", lambda: next(clock))
    with budget.charged(USER):
        pass
    assert budget.is_over(USER, in_turn=False)


def test_a_root_process_may_have_all_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_files, "MAX_WAITING", 40)
    files = WaitingFiles()
    for inode in range(100):
        files.add(0, waiting(0, inode), is_urgent=True)
    assert (len(files), files.left_out) == (40, 60)


def test_paths_have_room_for_as_many_mappings_as_there_may_be() -> None:
    assert MAX_PATH_BYTES // mappings.MAX_MAPPINGS >= 200 + 49  # Python's head of a string
