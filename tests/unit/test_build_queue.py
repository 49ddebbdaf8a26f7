# SPDX-License-Identifier: Apache-2.0
"""Whose unwind tables are built next: nobody's files keep those of others waiting for long."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from sonde.unwind.build_queue import BuildQueue, Request
from sonde.unwind.table_cache import LONG_S, MAX_QUEUED, MAX_SENT, TableCache

MINE, OTHER, ROOT = 1001, 1002, 0

# Builds of "slow" files take two seconds of CPU time as reported, and a tenth by the clock.
BUILDER = """
import json, sys, time
for line in sys.stdin:
    name = json.loads(line)["prefix"]
    is_slow = name.startswith("slow")
    time.sleep(0.1 if is_slow else 0)
    cpu_s = 2.0 if is_slow else 0.001
    print(json.dumps({"name": name + "-0", "was_there": True, "cpu_s": cpu_s}), flush=True)
"""


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[TableCache]:
    found = TableCache(tmp_path, builder=(sys.executable, "-c", BUILDER))
    yield found
    found.close()


@pytest.fixture
def ask(cache: TableCache) -> Iterator:
    fd = os.open(os.devnull, os.O_RDONLY)
    yield lambda name, party: cache.request(name, fd, party)
    os.close(fd)


def answered_until(cache: TableCache, name: str) -> list[str]:
    """What is answered until `name` is, with it."""
    answered: list[str] = []
    until_s = time.monotonic() + 20
    while name not in answered:
        assert time.monotonic() < until_s, f"{name} was never answered"
        answered += cache.poll()
        time.sleep(0.005)
    return answered


def test_files_of_a_user_without_end_do_not_keep_another_waiting(cache: TableCache, ask) -> None:
    for number in range(MAX_QUEUED + MAX_SENT + 10):
        ask(f"slow{number}", MINE)
    assert cache.put_off == 10
    assert not cache.has_room(MINE)
    assert cache.has_room(OTHER)
    for party in (OTHER, ROOT):
        ask(f"victim{party}", party)
        assert cache.awaits(f"victim{party}")
    answered = [it for it in answered_until(cache, "victim0") if it.startswith("slow")]
    # Those two took the places of others, which are asked for again.
    dropped = [it for it in answered if not cache.awaits(it) and cache.find(it) is None]
    assert cache.put_off == 12
    assert len(answered) <= 2 + 2
    assert len(dropped) >= 2


def test_a_user_whose_builds_take_long_has_one_at_the_subprocess(cache: TableCache, ask) -> None:
    for number in range(MAX_SENT):
        ask(f"slow{number}", MINE)
    assert len(cache._sent) == MAX_SENT
    first = answered_until(cache, "slow0")
    assert first == ["slow0"]
    assert [it.key for it in cache._sent] == ["slow1"]
    ask("quick", OTHER)
    assert answered_until(cache, "quick") == ["slow1", "quick"]


def test_the_machines_own_root_is_under_no_limit(cache: TableCache, ask) -> None:
    for number in range(MAX_SENT):
        ask(f"slow{number}", ROOT)
    answered_until(cache, "slow0")
    assert len(cache._sent) == MAX_SENT - 1


def request(name: str, party: int) -> Request:
    return Request(name, -1, party)


def taken(queue: BuildQueue, number: int) -> list[str]:
    found = [queue.take(Counter()) for _ in range(number)]
    return [it.key for it in found if it is not None]


def test_parties_that_have_used_the_same_take_turns() -> None:
    queue = BuildQueue(100)
    for number in range(3):
        queue.add(request(f"mine{number}", MINE))
    queue.add(request("other", OTHER))
    queue.order({"mine2": 5.0, "other": 2.0})
    assert taken(queue, 9) == ["mine2", "other", "mine0", "mine1"]
    assert queue.take(Counter()) is None


def test_who_has_used_more_comes_behind_others_whatever_is_needed_most() -> None:
    queue = BuildQueue(100)
    for number in range(3):
        queue.add(request(f"mine{number}", MINE))
        queue.add(request(f"other{number}", OTHER))
    queue.order({f"mine{number}": 1000.0 for number in range(3)})
    queue.charge(MINE, 8 * LONG_S)
    assert taken(queue, 6) == ["other0", "other1", "other2", "mine0", "mine1", "mine2"]
    queue.charge(MINE, 1000.0)
    queue.charge(OTHER, 100.0)
    for name, party in (("mine", MINE), ("more", MINE), ("other", OTHER)):
        queue.add(request(name, party))
    assert taken(queue, 2) == ["other", "mine"], "both have used a lot: by turns"


def test_a_full_queue_has_an_equal_share_for_each() -> None:
    queue = BuildQueue(10)
    for number in range(10):
        assert queue.has_place(MINE)
        assert queue.add(request(f"mine{number}", MINE)) is None
    assert not queue.has_place(MINE)
    evicted = []
    while queue.has_place(OTHER):
        one = queue.add(request("other", OTHER))
        assert one is not None
        evicted.append(one.key)
    assert evicted == ["mine9", "mine8", "mine7", "mine6", "mine5"]
    assert len(queue) == 10
    assert not queue.has_room(MINE)
    assert queue.has_room(ROOT)


def test_what_is_put_back_comes_first_again() -> None:
    queue = BuildQueue(10)
    for name in "abc":
        queue.add(request(name, MINE))
    first = [it for it in (queue.take(Counter()), queue.take(Counter())) if it is not None]
    queue.put_back(first)
    assert taken(queue, 3) == ["a", "b", "c"]
    assert queue.clear() == []
