# SPDX-License-Identifier: Apache-2.0
"""Which of the files that processes map are looked at, and when."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

import disks
from sonde import apis, procfs
from sonde._native import CommEvent, ExitEvent, ForkEvent, MmapEvent
from sonde.collect import discovery, mapped_files, put_off
from sonde.collect.discovery import Discovery
from sonde.collect.mapped_files import MappedFile, mapped_by
from sonde.collect.probe_shares import FILES_OF_PARTY, PLACES_OF_PARTY
from sonde.collect.probes import MAX_SITES, PutOff, TooManyPlaces
from sonde.procfs import Holder

A_LIBRARY = "/usr/lib/libOpenCL.so.1"


class FakeProbes:
    """Finds a device API in files of the names it is given."""

    def __init__(self, *carriers: str) -> None:
        self.carriers = carriers
        self.files: dict[mapped_files.FileKey, str] = {}
        self.examined: list[str] = []
        self.held: dict[mapped_files.FileKey, Holder] = {}
        self.counts: dict[mapped_files.FileKey, int] = {}
        self.notices: list[tuple[str, float, str]] = []
        self.dropped: list[int] = []
        """How many files each time."""
        self.wanted = "all"
        self.found_none = False

    def examine(self, fd, key, name, trusted=False, most=MAX_SITES):
        self.examined.append(name)
        self.found_none = name not in self.carriers
        if key in self.held:
            raise PutOff(self.held[key])
        if self.count_of(key) > most:
            raise TooManyPlaces(self.count_of(key))
        if name in self.carriers:
            self.files[key] = name
            os.close(fd)
            return True
        return False

    def count_of(self, key):
        return self.counts.get(key, 40)

    def places(self, key):
        return self.count_of(key)

    def mapped_by(self, key, pid):
        pass

    def drop(self, keys):
        self.dropped.append(len(keys))
        for key in keys:
            del self.files[key]
        return set(keys)

    def report(self, name, value, text):
        self.notices.append((name, value, text))


@pytest.fixture(autouse=True)
def sys_folder(tmp_path_factory, monkeypatch):
    """The disk of `mapped` is the machine's own."""
    disks.use(tmp_path_factory.mktemp("sys"), monkeypatch)


@pytest.fixture
def opened(monkeypatch):
    """Files need not exist: opening one gives a descriptor of nothing."""
    paths = []

    def open_any(file):
        paths.append(file.path)
        return os.open("/dev/null", os.O_RDONLY)

    monkeypatch.setattr(discovery, "open_mapped", open_any)
    monkeypatch.setattr(discovery, "mapped_now", lambda _unread: iter(()))
    return paths


def mapped(pid, inode, path):
    return MmapEvent(0, pid, pid, 0x1000, 0x1000, 0, (8, 1, inode), path)


def make(probes):
    return Discovery(apis.load(), probes)


def test_every_file_is_looked_at_once_programs_and_device_libraries_first(opened):
    probes = FakeProbes("libOpenCL.so.1")
    found = make(probes)
    events = [
        *(mapped(10, 2, "/lib/libc.so.6"), mapped(10, 1, "/bin/sh"), mapped(10, 3, A_LIBRARY)),
        *(mapped(11, 1, "/bin/sh"), mapped(11, 3, A_LIBRARY)),
    ]
    found.on_process_events(events)
    found.on_process_events(events)
    assert probes.examined == ["sh", "libOpenCL.so.1", "libc.so.6"]
    assert list(probes.files) == [(8, 1, 3)]


class Plain:
    """Knows some files by their name."""

    def __init__(self, *names):
        self.names = set(names)
        self.added = []

    def has(self, file, wanted):
        return wanted == "all" and file.name in self.names

    def add(self, file, wanted):
        self.added.append((file.name, wanted))


def test_a_file_without_a_device_api_in_the_run_before_is_not_opened_at_the_start(
    opened, monkeypatch
):
    paths = ["/bin/sh", "/lib/known.so", A_LIBRARY, "/lib/new.so"]
    files = [MappedFile(30, (8, 1, at), path, 0, 4096) for at, path in enumerate(paths, 1)]
    monkeypatch.setattr(discovery, "installed", lambda _: [])
    monkeypatch.setattr(discovery, "mapped_now", lambda _unread: iter(files))
    probes, plain = FakeProbes("libOpenCL.so.1"), Plain("known.so")
    found = Discovery(apis.load(), probes, plain=plain)
    found.scan()
    assert opened == ["/bin/sh", A_LIBRARY, "/lib/new.so"]
    assert plain.added == [("sh", "all"), ("new.so", "all")]
    assert list(probes.files) == [(8, 1, 3)]
    found.on_process_events([mapped(31, 2, "/lib/known.so")])
    assert opened[3:] == []


def test_once_it_records_only_the_file_itself_counts(opened, monkeypatch):
    monkeypatch.setattr(discovery, "installed", lambda _: [])
    probes = FakeProbes("libOpenCL.so.1")
    found = Discovery(apis.load(), probes, plain=Plain("libOpenCL.so.1"))
    found.scan()
    found.on_process_events([mapped(10, 3, A_LIBRARY)])
    assert list(probes.files) == [(8, 1, 3)]


def test_a_file_that_got_no_probe_for_another_reason_is_not_kept_as_plain(opened, monkeypatch):
    monkeypatch.setattr(discovery, "installed", lambda _: [])
    probes, plain = FakeProbes("libOpenCL.so.1"), Plain()
    probes.counts[(8, 1, 3)] = PLACES_OF_PARTY + 1
    found = Discovery(apis.load(), probes, plain=plain)
    found.scan()
    found.on_process_events([mapped(10, 3, A_LIBRARY)])
    assert (plain.added, probes.files) == ([], {})


def test_after_a_loss_of_events_what_is_mapped_now_is_looked_at(opened, monkeypatch):
    probes = FakeProbes("libOpenCL.so.1")
    found = make(probes)
    one = MappedFile(30, (8, 1, 3), A_LIBRARY, 0, 4096)
    monkeypatch.setattr(discovery, "mapped_now", lambda _unread: iter([one]))
    found.resync()
    found.tidy()
    assert list(probes.files) == [(8, 1, 3)]


def test_what_is_no_file_is_passed_over(opened):
    probes = FakeProbes()
    make(probes).on_process_events([mapped(10, 0, "//anon"), CommEvent(0, 1, 1, "x", False)])
    assert probes.examined == []


def test_a_storm_of_new_files_is_spread_over_time(opened, monkeypatch):
    probes = FakeProbes()
    found = make(probes)
    monkeypatch.setattr(discovery, "EXAMINE_S", 0.0)
    found.on_process_events([mapped(10, inode, f"/lib/{inode}.so") for inode in range(1, 100)])
    assert probes.examined == []
    assert found.backlog == 99
    monkeypatch.setattr(discovery, "EXAMINE_S", 10.0)
    found.tidy()
    assert len(probes.examined) == 99
    assert found.backlog == 0


def test_of_long_paths_a_hash_is_remembered(opened):
    probes = FakeProbes()
    found = make(probes)
    found.irrelevant_files()
    events = [mapped(10, 5, f"/{'d' * 3_000}/{number}") for number in range(3)]
    found.on_process_events(events)
    found.on_process_events(events)
    assert probes.examined == ["0", "1", "2"]
    assert sum(len(path) for _, path, _ in found._examined) < 100
    assert not found.irrelevant_files()


def test_a_file_is_looked_at_again_when_its_inode_may_be_another(opened, monkeypatch):
    probes = FakeProbes()
    found = make(probes)
    found.on_process_events([mapped(10, 5, "/tmp/a.out")])
    found.on_process_events([mapped(11, 5, "/tmp/b.out")])
    assert probes.examined == ["a.out", "b.out"]
    monkeypatch.setattr(discovery, "EXAMINED_FOR_S", 0.0)
    found.on_process_events([mapped(12, 5, "/tmp/a.out")])
    assert probes.examined == ["a.out", "b.out", "a.out"]


def test_what_is_remembered_is_bounded(opened, monkeypatch):
    monkeypatch.setattr(discovery, "EXAMINED_FILES", 10)
    found = make(FakeProbes())
    found.on_process_events([mapped(10, inode, f"/lib/{inode}.so") for inode in range(1, 100)])
    assert len(found._examined) == 10


@pytest.fixture
def used(opened, monkeypatch):
    """A library that process 10 maps, dropped as soon as nobody does."""
    monkeypatch.setattr(discovery, "UNMAPPED_S", 0.0)
    probes = FakeProbes("libOpenCL.so.1")
    found = make(probes)
    found.on_process_events([mapped(10, 3, A_LIBRARY)])
    return found, probes


def test_probes_stay_while_a_process_maps_the_file(used):
    found, probes = used
    found.tidy()
    assert probes.files


@pytest.mark.parametrize("end", [ExitEvent(0, 10, 1, 10, 1), CommEvent(0, 10, 10, "other", True)])
def test_probes_come_off_when_the_last_process_ends_or_runs_something_else(used, end):
    found, probes = used
    found.on_process_events([ExitEvent(0, 10, 1, 12, 1)])  # another of its threads
    found.tidy()
    assert probes.files
    found.on_process_events([end])
    found.tidy()
    assert not probes.files


def test_a_child_that_inherited_the_mapping_keeps_the_probes(used):
    found, probes = used
    found.on_process_events([ForkEvent(0, 20, 10, 20, 10), ExitEvent(0, 10, 1, 10, 1)])
    found.tidy()
    assert probes.files
    found.on_process_events([ExitEvent(0, 20, 10, 20, 10)])
    found.tidy()
    assert not probes.files


def test_probes_stay_where_proc_shows_a_user_without_an_event(used, monkeypatch):
    found, probes = used
    one = MappedFile(30, (8, 1, 3), A_LIBRARY, 0, 4096)
    monkeypatch.setattr(discovery, "mapped_now", lambda _unread: iter([one]))
    found.on_process_events([ExitEvent(0, 10, 1, 10, 1)])
    found.tidy()
    assert probes.files


def test_a_library_that_is_gone_before_it_could_be_read_is_reported(monkeypatch):
    def gone(file):
        raise FileNotFoundError

    monkeypatch.setattr(discovery, "open_mapped", gone)
    probes = FakeProbes()
    make(probes).on_process_events([mapped(10, 3, A_LIBRARY), mapped(10, 4, "/tmp/quick")])
    assert [(name, text) for name, _, text in probes.notices] == [
        ("library_gone", f"{Path(A_LIBRARY).name}: gone before it was read")
    ]


def test_what_is_ignored_from_now_on_is_what_carries_nothing(opened, monkeypatch):
    found = make(FakeProbes("libOpenCL.so.1"))
    found.irrelevant_files()  # somebody wants to know
    events = [mapped(10, 2, "/lib/libc.so.6"), mapped(10, 3, A_LIBRARY)]
    found.on_process_events(events)
    assert found.irrelevant_files() == {}  # each was looked at, and may have been the only one
    found.on_process_events(events)
    (((file, path), _),) = found.irrelevant_files().items()
    assert (file, path) == ((8, 1, 2), "/lib/libc.so.6")
    monkeypatch.setattr(discovery, "EXAMINED_FOR_S", 0.0)
    found.on_process_events(events)
    assert found.irrelevant_files() == {}


def without_device(pid, minor, inode, path, major=0):
    return MmapEvent(0, pid, pid, 0x1000, 0x1000, 0, (major, minor, inode), path)


@pytest.mark.parametrize("major", [0, 7])
def test_a_device_number_that_is_used_again_hides_no_other_partys_file(opened, monkeypatch, major):
    """A user's tmpfs has the number, inode and path that a container's overlay has after it; or a
    user's image, those of another one's."""
    monkeypatch.setattr(procfs, "party_of", lambda pid: 1000 if pid < 20 else -pid)
    probes = FakeProbes()
    found = make(probes)
    found._kept_devices = {(0, 21)}
    found.irrelevant_files()
    found.on_process_events([without_device(10, 99, 7, A_LIBRARY, major)])
    found.on_process_events([without_device(11, 99, 7, A_LIBRARY, major)])
    assert len(probes.examined) == 1  # one party's own file
    assert found.irrelevant_files() == {}  # the kernel's records have no party
    probes.carriers = ("libOpenCL.so.1",)
    found.on_process_events([without_device(20, 99, 7, A_LIBRARY, major)])
    assert list(probes.files) == [(major, 99, 7)]


def test_files_of_a_device_that_sonde_maps_itself_are_remembered_for_all(opened, monkeypatch):
    monkeypatch.setattr(procfs, "party_of", lambda pid: pid)
    probes = FakeProbes()
    found = make(probes)
    found._kept_devices = {(0, 21)}
    found.irrelevant_files()
    for pid in (10, 11):
        found.on_process_events([without_device(pid, 21, 7, "/lib/libc.so.6")])
    assert len(probes.examined) == 1
    assert list(found.irrelevant_files()) == [((0, 21, 7), "/lib/libc.so.6")]


def test_where_whose_it_is_is_not_known_such_a_file_is_not_remembered(opened, monkeypatch):
    monkeypatch.setattr(procfs, "party_of", lambda _: procfs.NOBODY)
    probes = FakeProbes()
    found = make(probes)
    for _ in range(2):
        found.on_process_events([without_device(10, 99, 7, A_LIBRARY)])
    assert len(probes.examined) == 2


def test_the_devices_of_this_processs_own_files_are_known():
    found = make(FakeProbes())
    libc = next(file for file in mapped_by(os.getpid()) if file.name.startswith("libc.so"))
    assert found._lasts(libc.key)


def test_a_file_that_is_put_off_is_tried_again_ever_more_rarely(opened, monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(put_off, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    probes = FakeProbes("libOpenCL.so.1")
    key = (8, 1, 3)
    probes.held[key] = Holder(os.getpid(), 1000)
    found = make(probes)
    found.on_process_events([mapped(10, 3, A_LIBRARY)])
    found.on_process_events(
        [mapped(11, 3, A_LIBRARY)]
    )  # one more of its users: nobody is asked for it
    assert len(probes.examined) == 1
    tries = []
    for _ in range(200):
        now_s[0] += 1
        found.tidy()
        if len(probes.examined) > len(tries) + 1:
            tries.append(int(now_s[0]) - 1000)
    assert tries == [1, 3, 7, 15, 31, 63, 123, 183]
    assert found.put_off == 1
    assert [notice[0] for notice in probes.notices] == ["probes_put_off"]
    probes.held.clear()
    now_s[0] += 60
    found.tidy()
    assert key in probes.files
    found.tidy()
    assert len(probes.examined) == 10


def test_a_file_is_tried_at_once_where_the_process_is_gone(opened):
    probes = FakeProbes("libOpenCL.so.1")
    probes.held[8, 1, 3] = Holder(500_000_001, 1000)
    found = make(probes)
    found.on_process_events([mapped(10, 3, A_LIBRARY)])
    probes.held.clear()
    found.tidy()
    assert (8, 1, 3) in probes.files


def test_a_file_that_got_its_probes_waits_no_longer_where_the_time_was_over_then(
    opened, monkeypatch
):
    probes = FakeProbes("libOpenCL.so.1")
    key = (8, 1, 3)
    probes.held[key] = Holder(500_000_001, 1000)
    found = make(probes)
    found.on_process_events([mapped(10, 3, A_LIBRARY)])
    probes.held.clear()
    monkeypatch.setattr(discovery, "EXAMINE_S", 0.0)
    found.tidy()
    assert key in probes.files
    tries = len(probes.examined)
    probes.drop([key])
    found.tidy()
    assert len(probes.examined) == tries


def test_a_file_beyond_the_bound_is_counted_once(opened, monkeypatch):
    monkeypatch.setattr(put_off, "MAX_FILES", 1)
    monkeypatch.setattr(discovery, "EXAMINED_FOR_S", 0.0)
    probes = FakeProbes("libOpenCL.so.1")
    probes.held[8, 1, 3] = probes.held[8, 1, 4] = Holder(os.getpid(), 1000)
    found = make(probes)
    for pid in range(10, 15):
        found.on_process_events([mapped(pid, 3, A_LIBRARY), mapped(pid, 4, A_LIBRARY)])
    assert len(probes.examined) == 6
    assert found.put_off == 2
    assert len(probes.notices) == 2


def test_one_party_s_files_leave_room_for_those_of_others_to_wait(monkeypatch):
    monkeypatch.setattr(put_off, "MAX_FILES", 8)
    files = put_off.PutOffFiles()
    flood, other = Holder(os.getpid(), 1000), Holder(os.getpid(), 1001)
    for number in range(20):
        files.add((8, 1, number), A_LIBRARY, flood)
    tried = [key for key, _ in files._files.items()]
    for number in range(20):
        files.add((8, 2, number), A_LIBRARY, other)
    assert sum((8, 2, number) in files for number in range(20)) == 4
    assert sum((8, 1, number) in files for number in range(20)) == 4
    assert files.count == 40
    for key in tried:  # some have made room meanwhile
        with files.attempt(key):
            pass
    assert all(key not in files for key in tried)
    assert len(files._no_room) <= 8


def test_where_the_way_to_a_file_is_gone_others_are_looked_for(opened, monkeypatch):
    probes = FakeProbes("libOpenCL.so.1")
    probes.held[8, 1, 3] = Holder(500_000_001, 1000)
    found = make(probes)
    found.on_process_events([mapped(10, 3, A_LIBRARY)])
    probes.held.clear()
    other = MappedFile(12, (8, 1, 3), A_LIBRARY, 0, 1)

    def open_other(file):
        if file.pid != 12:
            raise FileNotFoundError
        return os.open("/dev/null", os.O_RDONLY)

    monkeypatch.setattr(discovery, "open_mapped", open_other)
    monkeypatch.setattr(discovery, "mapped_now", lambda _unread: iter([other]))
    found.tidy()
    found.tidy()
    assert (8, 1, 3) in probes.files


GREEDY, OTHER, ROOT = 71, 72, 73


@pytest.fixture
def parties(opened, monkeypatch):
    monkeypatch.setattr(procfs, "party_of", {GREEDY: 1000, OTHER: 2000, ROOT: 0}.get)


def test_one_user_fills_no_more_places_than_a_share(parties):
    probes = FakeProbes("libOpenCL.so.1")
    found = make(probes)
    found.on_process_events([mapped(GREEDY, inode, A_LIBRARY) for inode in range(1, 200)])
    assert 0.9 * PLACES_OF_PARTY < 40 * len(probes.files) <= PLACES_OF_PARTY
    refused = [text for name, _, text in probes.notices if name == "probe_refused"]
    assert refused == ["further files of user 1000"]
    assert found.over_share == 199 - len(probes.files)
    found.on_process_events([mapped(OTHER, 500, A_LIBRARY), mapped(ROOT, 501, A_LIBRARY)])
    assert {(8, 1, 500), (8, 1, 501)} <= probes.files.keys()


def test_files_of_few_functions_are_bounded_by_their_number(parties):
    probes = FakeProbes("libOpenCL.so.1")
    probes.counts = {(8, 1, inode): 1 for inode in range(1, 500)}
    make(probes).on_process_events([mapped(GREEDY, inode, A_LIBRARY) for inode in range(1, 500)])
    assert len(probes.files) == FILES_OF_PARTY


def test_a_file_that_was_too_much_for_one_user_is_probed_for_another(parties):
    probes = FakeProbes("libOpenCL.so.1")
    found = make(probes)
    probes.counts[8, 1, 1] = PLACES_OF_PARTY - 10
    found.on_process_events([mapped(GREEDY, 1, A_LIBRARY), mapped(GREEDY, 2, A_LIBRARY)])
    assert list(probes.files) == [(8, 1, 1)]
    found.on_process_events([mapped(OTHER, 2, A_LIBRARY)])
    assert list(probes.files) == [(8, 1, 1), (8, 1, 2)]


def test_what_is_no_longer_probed_counts_no_longer(parties, monkeypatch):
    probes = FakeProbes("libOpenCL.so.1")
    found = make(probes)
    probes.counts[8, 1, 1] = probes.counts[8, 1, 2] = PLACES_OF_PARTY
    monkeypatch.setattr(discovery, "UNMAPPED_S", 0.0)
    found.on_process_events([mapped(GREEDY, 1, A_LIBRARY), mapped(GREEDY, 2, A_LIBRARY)])
    assert list(probes.files) == [(8, 1, 1)]
    found.on_process_events([ExitEvent(0, GREEDY, 1, GREEDY, 1)])
    found.tidy()
    found.on_process_events([mapped(GREEDY, 2, A_LIBRARY)])
    assert list(probes.files) == [(8, 1, 2)]


def test_probes_of_many_files_come_off_a_few_at_a_time(parties, monkeypatch):
    probes = FakeProbes("libOpenCL.so.1")
    probes.counts = {(8, 1, inode): 1 for inode in range(1, 41)}
    found = make(probes)
    monkeypatch.setattr(discovery, "UNMAPPED_S", 0.0)
    found.on_process_events([mapped(GREEDY, inode, A_LIBRARY) for inode in range(1, 41)])
    found.on_process_events([ExitEvent(0, GREEDY, 1, GREEDY, 1)])
    for _ in range(4):
        found.tidy()
    assert probes.dropped == [16, 16, 8]
    assert not probes.files


def test_a_file_of_more_functions_than_any_library_is_examined_once(parties):
    probes = FakeProbes("libOpenCL.so.1")
    probes.counts[8, 1, 1] = PLACES_OF_PARTY + 1
    found = make(probes)
    found.on_process_events([mapped(GREEDY, 1, A_LIBRARY)])
    found.on_process_events([mapped(OTHER, 1, A_LIBRARY)])
    assert len(probes.examined) == 1
    assert not probes.files


def test_of_chosen_processes_what_others_map_is_not_looked_for(opened, monkeypatch):
    probes = FakeProbes("libOpenCL.so.1")
    asked = []

    def one(pid, _unread):
        asked.append(pid)
        return iter([MappedFile(pid, (8, 1, 3), A_LIBRARY, 0, 4096)])

    monkeypatch.setattr(discovery, "mapped_by", one)
    found = Discovery(apis.load(), probes, {os.getpid()})
    found.resync()
    found.tidy()
    assert os.getpid() in asked
    assert 1 not in asked
    assert list(probes.files) == [(8, 1, 3)]


@pytest.mark.parametrize(("pids", "is_looked_at"), [(None, True), ({1}, False)])
def test_what_others_map_is_no_matter_of_a_recording_of_given_processes(
    pids, is_looked_at, monkeypatch
):
    """Of given processes no events are left out: it is others of whom some were."""
    found = Discovery(apis.load(), FakeProbes(), pids)
    seen = []
    monkeypatch.setattr(found, "_saw", seen.append)
    found.look_at([os.getpid()])
    assert bool(seen) is is_looked_at
