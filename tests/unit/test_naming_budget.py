# SPDX-License-Identifier: Apache-2.0
"""What finding names may cost for one user or container, and what it leaves to the others."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sonde import procfs
from sonde.resolve import allowance, naming_budget, perf_maps
from sonde.resolve.counters import Counters
from sonde.resolve.naming_budget import BURST_S, NamingBudget
from sonde.resolve.perf_maps import PerfMaps
from sonde.resolve.process_image import ProcessImage
from sonde.resolve.resolver import Resolver
from sonde.resolve.tracked_process import TrackedProcess

PARTY, OTHER = 1000, 1001


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Clocks that stand still."""
    clocks = {"time": 100.0, "cpu": 0.0}
    monkeypatch.setattr(naming_budget.time, "monotonic", lambda: clocks["time"])
    monkeypatch.setattr(naming_budget.time, "thread_time", lambda: clocks["cpu"])
    return clocks


def test_what_is_not_limited_may_end_at_a_time(now) -> None:
    budget = NamingBudget(is_limited=False)
    _use(budget, now, PARTY, 1_000.0)
    assert not budget.is_over(PARTY)
    budget.until_s = 110.0
    assert not budget.is_over(PARTY)
    now["time"] = 110.0
    assert budget.is_over(PARTY)
    assert budget.is_over(OTHER)


def _use(budget: NamingBudget, now: dict[str, float], party: int, used_s: float) -> None:
    with budget.charged(party):
        now["cpu"] += used_s


def test_a_party_that_used_up_its_time_waits_until_enough_came_back(now: dict[str, float]) -> None:
    budget = NamingBudget()
    _use(budget, now, PARTY, BURST_S / 2)
    budget.tick()
    assert not budget.is_over(PARTY)
    _use(budget, now, PARTY, BURST_S)
    budget.tick()
    assert budget.is_over(PARTY)
    assert not budget.is_over(OTHER)
    now["time"] += BURST_S / 2 / naming_budget.SHARE + 1
    assert budget.is_over(PARTY)  # a little is there
    now["time"] += naming_budget.ENOUGH_S / naming_budget.SHARE
    assert not budget.is_over(PARTY)


def test_in_one_tick_a_party_uses_a_part_of_its_time(now: dict[str, float]) -> None:
    budget, free = NamingBudget(), NamingBudget(is_limited=False)
    _use(budget, now, PARTY, naming_budget.TURN_S)
    assert budget.is_over(PARTY)
    assert not budget.is_over(OTHER)
    budget.tick()
    assert not budget.is_over(PARTY)
    _use(free, now, PARTY, 100)
    assert not free.is_over(PARTY)


def test_root_and_what_is_quick_are_free(now: dict[str, float]) -> None:
    budget = NamingBudget()
    _use(budget, now, 0, 100)
    for _ in range(100_000):
        _use(budget, now, PARTY, naming_budget.FREE_S / 2)
    assert not budget.is_over(0)
    assert not budget.is_over(PARTY)


def test_parties_are_bounded_and_newcomers_share_one(
    now: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allowance, "MAX_PARTIES", 3)
    budget = NamingBudget()
    for party in range(1, 10):
        _use(budget, now, party, BURST_S)
    assert all(budget.is_over(party) for party in range(1, 10))  # those beyond three share one
    now["time"] += 1000
    _use(budget, now, 9, BURST_S)
    assert budget.is_over(9)


def test_whose_names_are_put_off_is_reported_once() -> None:
    budget = NamingBudget()
    budget.left_out[PARTY] += 5
    assert budget.newly_over() == [(PARTY, 5)]
    budget.left_out[PARTY] += 5
    assert budget.newly_over() == []


@contextmanager
def _with_maps(count: int, lines: int) -> Iterator[list[TrackedProcess]]:
    """Processes of a user that share one long perf map."""
    children, paths, tracked = [], [], []
    try:
        for _ in range(count):
            child = subprocess.Popen(["sleep", "60"])
            children.append(child)
            path = Path(f"/tmp/perf-{child.pid}.map")
            path.unlink(missing_ok=True)
            if paths:
                os.link(paths[0], path)
            else:
                path.write_text("".join(f"{n * 16:x} 10 f{n}\n" for n in range(1, lines)))
            paths.append(path)
            tracked.append(TrackedProcess(child.pid, 1, 1, "sleep", ProcessImage(child.pid, "")))
        yield tracked
    finally:
        for child in children:
            child.kill()
            child.wait()
        for path in paths:
            path.unlink()


def test_many_processes_with_long_perf_maps_cost_no_more_than_their_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An address that no map has, asked of every process at every tick."""
    monkeypatch.setattr(naming_budget, "BURST_S", 0.05)
    monkeypatch.setattr(TrackedProcess, "party", PARTY)
    counters = Counters()
    maps = PerfMaps(counters, NamingBudget())
    reads = []
    read_more = PerfMaps._read_more
    monkeypatch.setattr(
        PerfMaps, "_read_more", lambda *it: reads.append(it[1].pid) or read_more(*it)
    )
    with _with_maps(30, 120_000) as processes:
        for tick in range(1, 11):
            for process in processes:
                assert maps.find(process, 1, tick * 2_000_000_000) is None
    assert len(reads) < 30
    assert counters.names_put_off == 300 - len(reads)


def test_the_party_with_most_perf_maps_gives_way_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf_maps, "MAX_BYTES", 1_000_000)
    counters = Counters()
    maps = PerfMaps(counters, NamingBudget())
    with _with_maps(6, 4_000) as processes:
        for process in processes:
            process._party = PARTY
        processes[0]._party = OTHER
        for process in processes:
            assert maps.find(process, 0x20, 2_000_000_000) is not None
        assert counters.perf_maps_evicted > 0
        assert maps.find(processes[0], 0x20, 2_100_000_000) is not None
        assert maps.find(processes[-1], 0x20, 2_100_000_000) is not None
        assert maps.find(processes[1], 0x20, 5_000_000_000) is None  # not at once again
        assert maps.find(processes[1], 0x20, 20_000_000_000) is not None


def test_code_of_a_party_without_time_keeps_file_and_offset_and_is_named_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolver = Resolver()
    try:
        resolver.processes.scan()
        start_ns = procfs.read_stat(os.getpid())
        assert start_ns is not None
        process = resolver.processes.find(os.getpid(), start_ns.start_ns)
        process._party = PARTY
        space = process.space()
        mapping = next(it for it in space.find_all(_code_of_libc()) if it is not None)
        address = _code_of_libc()[0]
        monkeypatch.setattr(resolver.budget, "is_over", lambda party: party == PARTY)
        [put_off] = resolver.resolve(process, (), [address])
        assert (put_off.frame.function, put_off.frame.binary) == ("", "libc.so.6")
        assert put_off.frame.offset == address - mapping.start + mapping.offset
        assert resolver.counters.names_put_off == 1
        assert resolver.resolve(process, (), [address]) == [put_off]
        monkeypatch.undo()
        resolver.tick(time.monotonic_ns())
        [named] = resolver.resolve(process, (), [address])
        assert named.frame.function
    finally:
        resolver.close()


def _code_of_libc() -> list[int]:
    import ctypes

    function = ctypes.CDLL(None).getppid
    return [ctypes.cast(function, ctypes.c_void_p).value or 0]
