# SPDX-License-Identifier: Apache-2.0
"""The memory that queued paths take: counted as they are in memory, in all and by party, in the
images of running and ended processes and in those from before an exec."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from sys import getsizeof

import pytest

from sonde import procfs
from sonde._native import CommEvent, ExitEvent, ForkEvent, MmapEvent, ProcessEvent
from sonde.resolve import held_mappings
from sonde.resolve.process_image import MAX_PENDING_BYTES
from sonde.resolve.processes import ProcessTable
from sonde.resolve.queued_paths import MAX_OF_ONE_BYTES, MAX_QUEUED_BYTES
from sonde.resolve.tracked_process import EXEC_GRACE_NS, TrackedProcess, images_of

FIRST = 500_000_000
WIDE = "/" + "a" * 4000 + "\U0001f600"
"""4 bytes for each character in memory: 16 KB."""
Parties = Callable[[int], int]


def forked(pid: int, number: int) -> list[ProcessEvent]:
    return [ForkEvent(number, pid, 1, pid, 1), CommEvent(number, pid, pid, "x", True)]


def mapped(pid: int, number: int, times: int, path: str = WIDE) -> Iterator[ProcessEvent]:
    for n in range(times):
        yield MmapEvent(number, pid, pid, n << 16, 0x1000, 0, (254, 1, n + 1), f"{path}{n}")


def held_bytes(table: ProcessTable) -> int:
    images = {id(it): it for process in table._all() for it in images_of(process)}
    return sum(getsizeof(one.path) for it in images.values() for one in it.pending)


@pytest.fixture
def parties(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Parties by pid; every other process is of party 7."""
    by_pid: dict[int, int] = {}
    monkeypatch.setattr(procfs, "party_of", lambda pid: by_pid.get(pid, 7))
    return by_pid


def test_paths_of_one_process_are_counted_as_they_are_in_memory() -> None:
    table, now = ProcessTable(), time.monotonic_ns()
    table.feed([*forked(FIRST, now), *mapped(FIRST, now, 1000)])
    assert MAX_PENDING_BYTES - 20_000 < held_bytes(table) <= MAX_PENDING_BYTES
    assert table.counters.mappings_left_out == 1000 - len(table._live[FIRST].image.pending)


@pytest.mark.usefixtures("parties")
@pytest.mark.parametrize("then", ["runs", "ends", "executes"])
def test_all_queued_paths_have_one_bound_whatever_their_processes_do_next(then: str) -> None:
    table, now = ProcessTable(), time.monotonic_ns()
    for pid in range(FIRST, FIRST + 100):
        table.feed([*forked(pid, now), *mapped(pid, now, 60)])
        if then == "ends":
            table.feed([ExitEvent(now, pid, 1, pid, 1)])
        if then == "executes":
            table.feed([CommEvent(now, pid, pid, "y", True)])
        if pid % 10 == 0:
            table.expire(now)
    assert held_bytes(table) <= MAX_QUEUED_BYTES
    assert table.counters.mappings_left_out > 0


def test_who_fills_the_queue_leaves_room_for_others(parties: dict[int, int]) -> None:
    table, now = ProcessTable(), time.monotonic_ns()
    for pid in range(FIRST, FIRST + 100):
        table.feed([*forked(pid, now), *mapped(pid, now, 60)])
    assert held_bytes(table) == pytest.approx(MAX_QUEUED_BYTES // 2, abs=20_000)
    other = FIRST + 1000
    parties[other] = 8
    lost = table.counters.mappings_left_out
    table.feed([*forked(other, now), *mapped(other, now, 200, "/usr/lib/libc.so.")])
    assert table.counters.mappings_left_out == lost
    assert len(table._live[other].space().mappings) == 200
    table.expire(now)
    for pid in range(other + 1, other + 10):
        parties[pid] = 8
        table.feed([*forked(pid, now), *mapped(pid, now, 60)])
    assert held_bytes(table) == pytest.approx(MAX_QUEUED_BYTES // 2 + MAX_OF_ONE_BYTES, abs=40_000)


@pytest.mark.usefixtures("parties")
def test_what_is_refused_takes_nothing_of_the_bound() -> None:
    table, now = ProcessTable(), time.monotonic_ns()
    table.feed([*forked(FIRST, now), *mapped(FIRST, now, 5000)])
    assert table._queued.admit(table._live[FIRST], MAX_QUEUED_BYTES // 2)


def test_the_image_before_an_exec_goes_at_the_first_tick_after_its_time() -> None:
    table, now = ProcessTable(), time.monotonic_ns()
    table.expire(now)  # /proc is checked now, and then in a minute
    table.feed([*forked(FIRST, now), *mapped(FIRST, now, 3)])
    table.feed([CommEvent(now, FIRST, FIRST, "y", True)])
    process: TrackedProcess = table._live[FIRST]
    table.expire(now + EXEC_GRACE_NS - 1)
    assert process.previous is not None
    table.expire(now + EXEC_GRACE_NS + 1)
    assert process.previous is None


def test_mappings_of_ended_processes_and_before_an_exec_count(
    monkeypatch: pytest.MonkeyPatch, parties: dict[int, int]
) -> None:
    monkeypatch.setattr(held_mappings, "MAX_MAPPINGS_HELD", 1_000)
    table, now = ProcessTable(), time.monotonic_ns()
    parties[FIRST + 2] = 8
    table.expire(now)  # /proc is checked now, and then in a minute
    for pid in range(FIRST, FIRST + 3):
        table.feed(
            [*forked(pid, now), *mapped(pid, now, 450 if parties.get(pid) != 8 else 300, "/x")]
        )
    table.feed(
        [CommEvent(now, FIRST, FIRST, "y", True), ExitEvent(now, FIRST + 1, 1, FIRST + 1, 1)]
    )
    table.expire(now)
    held = sum(it.count for process in table._all() for it in images_of(process))
    assert held == 750
    assert table._live[FIRST + 2].image.count == 300
    assert table.counters.mappings_left_out == 450
