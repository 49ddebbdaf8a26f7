# SPDX-License-Identifier: Apache-2.0
"""Which processes are loaded first, where there is no time for all of those that walks meet."""

from __future__ import annotations

import time

import pytest

from sonde import _native
from sonde._native import ExitEvent
from sonde.resolve import Resolver
from sonde.unwind import unwinder
from sonde.unwind.code_files import Deadline
from sonde.unwind.unwinder import Unwinder

SLOW_S = 0.03
"""Of the clock: longer than one update may take of a CPU."""


class Maps:
    """The kernel's maps, with what walks have asked for since the last look."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def load_pages(self) -> int:
        return 0

    def usage(self) -> tuple[int, ...]:
        return 0, 0, 0, 0, 0

    def wanted(self) -> list[tuple[int, int]]:
        asked, self.asked = self.asked, []
        return asked


class Cache:
    is_busy = has_queue = False

    def poll(self) -> list[str]:
        return []

    def warm_up(self) -> None:
        pass


class Loads(Unwinder):
    """Notes which processes are loaded; each takes some time."""

    def __init__(self) -> None:
        super().__init__(None, Resolver(), Cache())  # type: ignore[arg-type]
        self.order: list[int] = []
        self.pause = time.sleep

    def _load(self, pid: int, until: Deadline) -> bool:
        self.order.append(pid)
        self.pause(SLOW_S)
        return True


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> Maps:
    found = Maps()
    monkeypatch.setattr(_native, "UnwindMaps", lambda _owner: found)
    return found


def work(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


def test_a_process_that_most_walks_ask_for_is_loaded_first(maps: Maps):
    loads = Loads()
    maps.asked = [(4_000_001, 1), (4_000_002, 50), (4_000_003, 7)]
    loads.update()

    assert loads.order == [4_000_002, 4_000_003, 4_000_001]


def test_walks_of_all_looks_count_until_it_is_loaded(maps: Maps):
    loads = Loads()
    loads.pause = work  # one in each update
    maps.asked = [(4_000_001, 9), (4_000_002, 5), (4_000_003, 6)]
    loads.update()
    maps.asked = [(4_000_002, 5)]
    loads.update()
    loads.update()

    assert loads.order == [4_000_001, 4_000_002, 4_000_003]


def test_time_that_others_have_the_cpu_for_does_not_count(maps: Maps):
    """Beside ten busy programs, 25 ms of the clock are 3 ms of work."""
    loads = Loads()
    maps.asked = [(pid, 1) for pid in range(4_000_001, 4_000_006)]
    loads.update()

    assert len(loads.order) == 5


def test_an_update_ends_though_all_of_it_is_waiting(maps: Maps, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(unwinder, "UPDATE_S", SLOW_S)
    loads = Loads()
    maps.asked = [(pid, 1) for pid in range(4_000_001, 4_000_006)]
    loads.update()

    assert 1 <= len(loads.order) < 5
    assert loads.is_busy


def test_a_process_that_has_ended_is_not_loaded(maps: Maps):
    loads = Loads()
    loads.pause = work
    maps.asked = [(4_000_001, 2), (4_000_002, 1), (4_000_003, 1)]
    loads.update()
    loads.on_process_events([ExitEvent(0, 4_000_002, 1, 4_000_002, 1)])
    loads.update()
    loads.update()

    assert loads.order == [4_000_001, 4_000_003]
    assert not loads.is_busy
