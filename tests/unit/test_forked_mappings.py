# SPDX-License-Identifier: Apache-2.0
"""What forks cost: mappings are shared until one side changes them, and copies are counted when
they are made."""

from __future__ import annotations

import os
import random
import time
import tracemalloc
from collections.abc import Iterator

import pytest

from sonde import procfs
from sonde._native import CommEvent, ExitEvent, ForkEvent, MmapEvent, ProcessEvent
from sonde.resolve import Resolver, held_mappings
from sonde.resolve.mappings import AddressSpace, Mapping
from sonde.resolve.process_image import MAX_DEPTH, MAX_PENDING, ProcessImage
from sonde.resolve.processes import ProcessTable
from sonde.resolve.tracked_process import TrackedProcess, images_of

FIRST = 500_000_000
MANY = 16_000
USER, OTHER = 1000, 1001
LIBC = (8, 1, 7)


def forked(pid: int, parent: int) -> ForkEvent:
    return ForkEvent(time.monotonic_ns(), pid, parent, pid, parent)


def ended(pid: int) -> ExitEvent:
    return ExitEvent(time.monotonic_ns(), pid, 1, pid, 1)


def mapped(pid: int, page: int, path: str = "//anon", pages: int = 1) -> MmapEvent:
    file = LIBC if path.startswith("/lib") else (0, 0, 0)
    at = time.monotonic_ns()
    return MmapEvent(at, pid, pid, page << 12, pages << 12, 0, file, path)


def executed(pid: int, program: str = "/bin/x") -> list[ProcessEvent]:
    at = time.monotonic_ns()
    return [
        CommEvent(at, pid, pid, "x", True),
        MmapEvent(at, pid, pid, 4096, 4096, 0, LIBC, program),
    ]


def content(space: AddressSpace) -> list[tuple[int, int, str]]:
    return [(it.start >> 12, it.end >> 12, it.path) for it in space.mappings]


def held(table: ProcessTable) -> int:
    seen: set[int] = set()
    return sum(it.size for process in table._all() for it in images_of(process, seen))


def with_many(table: ProcessTable, pid: int = FIRST, count: int = MANY) -> TrackedProcess:
    """A process with this many mappings, two pages apart from the page 65,536 on."""
    table.feed([forked(pid, 1), *executed(pid)])
    process = table._live[pid]
    process.image = ProcessImage(pid, "exec")
    process.image._space = AddressSpace(
        Mapping(page << 12, (page + 1) << 12) for page in range(65_536, 65_536 + 2 * count, 2)
    )
    table._held.recount()
    return process


def chain(table: ProcessTable, forks: int, is_changing: bool = False) -> int:
    """Each child forks the next and ends. Returns the last one's pid."""
    for pid in range(FIRST, FIRST + forks):
        events: list[ProcessEvent] = [forked(pid + 1, pid), ended(pid)]
        if is_changing:
            events.append(mapped(pid + 1, 16 + pid % 1000))
        table.feed(events)
    return FIRST + forks


@pytest.fixture(autouse=True)
def parties(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Parties by pid; every other process is of USER."""
    by_pid: dict[int, int] = {}
    monkeypatch.setattr(procfs, "party_of", lambda pid: by_pid.get(pid, USER))
    return by_pid


@pytest.fixture
def table() -> ProcessTable:
    table = ProcessTable()
    table.expire(time.monotonic_ns())  # /proc is checked now, and then in a minute
    return table


@pytest.fixture
def memory() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("is_changing", [False, True])
def test_a_chain_of_forks_takes_little_time(table: ProcessTable, is_changing: bool) -> None:
    with_many(table)
    began_s = time.process_time()
    chain(table, 8_000, is_changing)
    assert time.process_time() - began_s < 2.0


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("is_changing", [False, True])
def test_a_chain_of_forks_takes_little_memory(table: ProcessTable, is_changing: bool) -> None:
    with_many(table)
    before_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    last = chain(table, 8_000, is_changing)
    _, peak_bytes = tracemalloc.get_traced_memory()
    assert peak_bytes - before_bytes < 20e6
    assert held(table) <= held_mappings.MAX_MAPPINGS_HELD + 8_000  # those that are queued
    if not is_changing:
        assert held(table) == MANY
        assert len(table._live[last].space()) == MANY
        assert table.counters.mappings_left_out == 0


def test_children_without_changes_share_one_list_also_when_they_are_sampled(
    table: ProcessTable,
) -> None:
    parent = with_many(table)
    for pid in range(FIRST + 1, FIRST + 1_000):
        table.feed([forked(pid, FIRST)])
        assert table._live[pid].image.is_built
        assert table._live[pid].space() is parent.space()
    assert held(table) == table._held.total == MANY


def test_each_side_has_its_changes_alone(table: ProcessTable) -> None:
    parent = with_many(table, count=3)
    known = content(parent.space())
    table.feed([forked(FIRST + 1, FIRST)])
    child = table._live[FIRST + 1]
    table.feed([mapped(FIRST + 1, 65_538, "/lib/of_child.so")])
    assert content(parent.space()) == known
    assert content(child.space())[1] == (65_538, 65_539, "/lib/of_child.so")
    table.feed([mapped(FIRST, 65_536, "/lib/of_parent.so"), forked(FIRST + 2, FIRST)])
    table.feed([mapped(FIRST, 65_540, "/lib/later.so")])
    later = table._live[FIRST + 2]

    def names(process: TrackedProcess) -> list[str | None]:
        found = process.space().find_all([65_536 << 12, 65_538 << 12, 65_540 << 12])
        return [it and it.name for it in found]

    assert names(child) == ["[anon]", "of_child.so", "[anon]"]
    assert names(later) == ["of_parent.so", "[anon]", "[anon]"]
    assert names(parent) == ["of_parent.so", "[anon]", "later.so"]


def test_a_child_that_nobody_sampled_has_what_its_parent_had_at_the_fork(
    table: ProcessTable,
) -> None:
    table.feed([forked(FIRST, 1), *executed(FIRST), mapped(FIRST, 32, "/lib/old.so")])
    table.feed([forked(FIRST + 1, FIRST), mapped(FIRST, 32, "/lib/new.so")])
    parent, child = table._live[FIRST], table._live[FIRST + 1]
    assert content(parent.space())[1] == (32, 33, "/lib/new.so")
    table.feed([ended(FIRST)])
    for _ in range(3):
        table.expire(time.monotonic_ns())
    assert content(child.space())[1] == (32, 33, "/lib/old.so")


@pytest.mark.parametrize("seed", range(20))
def test_forks_and_changes_in_any_order_are_as_with_a_copy_at_each_fork(
    table: ProcessTable, seed: int
) -> None:
    chance = random.Random(seed)
    table.feed([forked(FIRST, 1), *executed(FIRST)])
    truth = {FIRST: AddressSpace([Mapping(4096, 8192, 0, LIBC, "/bin/x")])}
    for number in range(1, 1_500):
        # The youngest fork most, so that long chains come about.
        pid = max(truth) if chance.random() < 0.6 else chance.choice(list(truth))
        event = chance.random()
        if event < 0.4:
            table.feed([forked(FIRST + number, pid)])
            truth[FIRST + number] = truth[pid].copy()
        elif event < 0.8:
            page, pages = chance.randrange(1, 60), chance.randrange(1, 4)
            table.feed([mapped(pid, page, f"/lib/{number}", pages)])
            truth[pid].add(Mapping(page << 12, (page + pages) << 12, 0, LIBC, f"/lib/{number}"))
        elif event < 0.85 and len(truth) > 3:
            table.feed([ended(pid)])
            del truth[pid]
        elif event < 0.9:
            table.expire(time.monotonic_ns())
        else:
            assert content(table._live[pid].space()) == content(truth[pid])
    for pid, space in truth.items():
        assert content(table._live[pid].space()) == content(space)
    table._held.recount()
    assert table._held.total == held(table)
    assert table.counters.mappings_left_out == 0


def test_of_a_long_chain_with_changes_few_images_are_built(table: ProcessTable) -> None:
    with_many(table, count=1_000)
    last = chain(table, 10 * MAX_DEPTH, is_changing=True)
    seen: set[int] = set()
    images = [it for process in table._all() for it in images_of(process, seen)]
    assert sum(it.count > 500 for it in images) <= 11
    assert table._live[last].image.depth <= MAX_DEPTH
    assert len(table._live[last].space()) == 1_001 + 10 * MAX_DEPTH - 1


def test_what_was_named_before_a_change_is_forgotten_at_the_fork_after_it(
    table: ProcessTable,
) -> None:
    process = with_many(table)
    process.space()
    process.frames.put(65_536 << 12, 1, object(), needs_reorder=False)
    table.feed([forked(FIRST + 1, FIRST)])
    assert len(process.frames) == 1
    table.feed([mapped(FIRST, 65_536, "/lib/new.so"), forked(FIRST + 2, FIRST)])
    assert len(process.frames) == 0


def test_the_program_and_its_new_files_are_known_after_a_fork(table: ProcessTable) -> None:
    table.feed([forked(FIRST, 1), *executed(FIRST, "/lib/program"), forked(FIRST + 1, FIRST)])
    parent, child = table._live[FIRST], table._live[FIRST + 1]
    assert (parent.exe, parent.image.program, child.exe) == ("program",) * 3
    queued = parent.image.pending_mapping(LIBC)
    assert queued is not None
    assert queued.name == "program"
    table.feed([mapped(FIRST, 16)])
    parent.space()
    assert parent.image.program == "program"


def test_a_process_that_forks_queues_no_more_than_one_that_does_not(table: ProcessTable) -> None:
    table.feed([forked(FIRST, 1), *executed(FIRST)])
    for number in range(1, 9):
        table.feed([mapped(FIRST, 16 + number * 1_000 + it) for it in range(1_000)])
        table.feed([forked(FIRST + number, FIRST)])
    assert sum(it.count for it in images_of(table._live[FIRST])) == MAX_PENDING
    assert table.counters.mappings_left_out == 8_001 - MAX_PENDING


def test_a_process_known_from_proc_forks(table: ProcessTable) -> None:
    me, child = os.getpid(), FIRST + 1
    table.feed([forked(child, me)])
    mine = [it for it in content(table._live[child].space()) if it[2].startswith("/")]
    assert mine  # its parent's, as it has ended itself
    assert [it for it in content(table._live[me].space()) if it[2].startswith("/")] == mine
    assert table._live[child].space() is table._live[me].space()


def test_copies_are_bounded_within_a_tick(table: ProcessTable) -> None:
    with_many(table)
    most = made = 0
    for number in range(1, 101):
        table.feed([forked(FIRST + number, FIRST), mapped(FIRST + number, 16)])
        process = table._live[FIRST + number]
        made += len(process.space()) > MANY
        most = max(most, held(table))
    assert most <= held_mappings.MAX_MAPPINGS_HELD
    lost = table.counters.mappings_left_out
    assert 0 < lost <= 100 * (MANY + 1)
    table._held.recount()
    assert table._held.total == held(table)
    # Each copy that was made is there, or is counted once; so is one that was dropped at once.
    assert (held(table) + lost) % (MANY + 1) in (0, MANY)


def test_who_copies_many_mappings_does_not_take_those_of_others(
    table: ProcessTable, parties: dict[int, int]
) -> None:
    others = range(FIRST + 1_000, FIRST + 1_010)
    parties.update(dict.fromkeys(others, OTHER))
    with_many(table)
    for pid in others[:5]:
        with_many(table, pid, count=500)
    for number in range(1, 201):
        table.feed([forked(FIRST + number, FIRST), mapped(FIRST + number, 16)])
        table._live[FIRST + number].space()
        if number % 40 == 0:
            table.feed([forked(others[4 + number // 40], others[0])])
            table.feed([mapped(others[4 + number // 40], 16)])
            assert len(table._live[others[4 + number // 40]].space()) == 501
    for _ in range(2):
        assert [len(table._live[pid].space()) for pid in others] == 5 * [500] + 5 * [501]
        table.expire(time.monotonic_ns())
    assert table.counters.mappings_left_out > 0


def test_the_loss_of_what_many_share_counts_once(
    table: ProcessTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_many(table)
    chain(table, 2_000)
    table.feed([forked(FIRST + 3_000, 1), *executed(FIRST + 3_000)])
    monkeypatch.setattr(held_mappings, "MAX_MAPPINGS_HELD", 1_000)
    for _ in range(3):
        table._bound_mappings()
    assert table.counters.mappings_left_out == MANY
    assert held(table) == table._held.total == 1
    last = table._live[FIRST + 2_000]
    assert len(last.space()) == 0
    table.feed([mapped(last.pid, 16, "/lib/later.so")])
    for _ in range(2):
        table._bound_mappings()
    assert content(last.space()) == [(16, 17, "/lib/later.so")]
    assert table.counters.mappings_left_out == MANY


def test_changes_of_processes_whose_list_was_dropped_count_as_lost_too(
    table: ProcessTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_many(table)
    table.feed([forked(FIRST + 1, FIRST), *(mapped(FIRST + 1, 16 + it) for it in range(3))])
    monkeypatch.setattr(held_mappings, "MAX_MAPPINGS_HELD", 1_000)
    table._bound_mappings()
    assert table.counters.mappings_left_out == MANY + 3
    assert held(table) == table._held.total == 0


def test_an_image_before_an_exec_that_was_dropped_has_no_mappings(
    table: ProcessTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = with_many(table)
    table.feed(executed(FIRST))
    assert len(process.previous_space()) == MANY
    monkeypatch.setattr(held_mappings, "MAX_MAPPINGS_HELD", 1_000)
    table._bound_mappings()
    assert process.previous is None
    assert len(process.previous_space()) == 0
    assert len(process.space()) == 1


def test_mappings_that_a_process_has_no_room_for_are_counted_however_they_come(
    table: ProcessTable,
) -> None:
    process = with_many(table)
    table.feed([mapped(FIRST, 16 + 2 * it) for it in range(500)])
    assert len(process.space()) == 16_384
    table.expire(time.monotonic_ns())
    assert table.counters.mappings_left_out == MANY + 500 - 16_384


def test_a_resolver_names_code_of_both_sides_after_a_fork() -> None:
    resolver = Resolver()
    resolver.on_process_events(
        [
            forked(FIRST, 1),
            *executed(FIRST),
            mapped(FIRST, 64, "/lib/a.so"),
            forked(FIRST + 1, FIRST),
        ]
    )
    table = resolver.processes
    parent, child = table._live[FIRST], table._live[FIRST + 1]

    def binary(process: TrackedProcess) -> str:
        return resolver.resolve(process, (), [64 << 12])[0].frame.binary

    assert (binary(parent), binary(child)) == ("a.so", "a.so")
    resolver.on_process_events([mapped(FIRST, 64, "/lib/b.so"), forked(FIRST + 2, FIRST)])
    later = table._live[FIRST + 2]
    assert (binary(parent), binary(child), binary(later)) == ("b.so", "a.so", "b.so")
    resolver.on_process_events([mapped(FIRST + 1, 64, "/lib/c.so")])
    assert (binary(parent), binary(child), binary(later)) == ("b.so", "c.so", "b.so")
    resolver.close()
