# SPDX-License-Identifier: Apache-2.0
"""Few rows of waits, and of what processes used: sums stay what they were."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from sonde.collect import tasks
from sonde.collect.collector import Batch
from sonde.collect.small_waits import MAX_RESTS, RestKey, SmallWaits
from sonde.collect.tasks import TaskCollector
from sonde.collect.waits import WaitCollector
from sonde.sinks.chunk import columns_of

LEAST_NS = 1_000
ENOUGH = 20_000


def test_a_kind_s_samples_sum_up_to_what_came_within_one_row_at_any_time():
    small, came, kept = SmallWaits(LEAST_NS), 0, 0.0
    for _ in range(ENOUGH):
        weight_ns = random.randrange(1, 2 * LEAST_NS)
        factor = small.factor("blocked", weight_ns)
        came, kept = came + weight_ns, kept + factor * weight_ns
        assert abs(kept - came) <= LEAST_NS + 1e-6 * came


def test_each_stack_is_kept_as_often_as_its_time_is_long():
    kept: Counter[int] = Counter()
    for _ in range(ENOUGH):
        small = SmallWaits(LEAST_NS)
        for stack, weight_ns in enumerate((100, 250, 50)):
            if factor := small.factor("blocked", weight_ns):
                assert factor * weight_ns == pytest.approx(LEAST_NS)
                kept[stack] += 1
    shares = [kept[stack] / ENOUGH for stack in range(3)]
    assert shares == pytest.approx([0.1, 0.25, 0.05], abs=0.02)


def test_what_is_not_small_stays_as_it_is():
    small = SmallWaits(LEAST_NS)
    assert [small.factor("blocked", ns) for ns in (LEAST_NS, 5 * LEAST_NS)] == [1.0, 1.0]
    assert small.factor("blocked", 0) == 0.0
    assert [SmallWaits(0).factor("blocked", ns) for ns in (0, 1)] == [1.0, 1.0]


def test_kinds_are_drawn_apart():
    small = SmallWaits(LEAST_NS)
    kept = Counter[str]()
    for _ in range(ENOUGH):
        for kind, ns in (("blocked", 500), ("runqueue", 10)):
            kept[kind] += bool(small.factor(kind, ns))
    assert abs(kept["blocked"] - ENOUGH / 2) <= 1
    assert abs(kept["runqueue"] - ENOUGH / 100) <= 1


def wait(tid, stack_id, blocked_ns, *, nr=0, count=1, waker=3):
    """A row of the kernel's: a thread's waits for one reason, on one stack."""
    weights = (float(count), blocked_ns, 0) if stack_id else (0.0, 0, 0)
    return (7, tid, 110, stack_id, nr, count, blocked_ns, 0, *weights, blocked_ns, 0, 1, waker)


def sums(batches, value):
    names, found = columns_of("activity"), Counter()
    for batch in batches:
        for row in batch.rows.get("activity", ()):
            one = dict(zip(names, row, strict=True))
            found[one["kind"], one["name"], one["tid"]] += one[value]
    return found


def ticks(small, all_rows):
    """The batches of ticks with these rows; a chunk ends with the last."""
    batches = []
    for tick, rows in enumerate(all_rows):
        batch = Batch()
        WaitCollector._add_rows(batch, tick, rows, small)
        WaitCollector._add_rests(batch, tick, small, tick == len(all_rows) - 1)
        batches.append(batch)
    return batches


def test_totals_of_threads_and_reasons_are_exact_in_few_rows():
    every = [
        [
            wait(tid, stack, random.randrange(1, 300), nr=nr, count=stack + 1)
            for tid in range(20)
            for nr in (0, 7)
            for stack in range(5)
        ]
        for _ in range(10)
    ]
    usual, few = ticks(SmallWaits(0), every), ticks(SmallWaits(LEAST_NS), every)
    for value in ("ns", "count"):
        assert sums(few, value) == sums(usual, value)
    rows = [sum(len(one.rows.get("activity", ())) for one in some) for some in (usual, few)]
    assert rows[1] < rows[0] / 2
    threads = set().union(*(one.threads for one in few))
    assert threads == set().union(*(one.threads for one in usual))


def test_each_sample_has_its_row_of_activity_and_one_more_at_most_has_none():
    """`query.wait_parts` joins the two tables by that."""
    every = [[wait(9, stack, random.randrange(1, 900)) for stack in range(30)] for _ in range(20)]
    for batch in ticks(SmallWaits(LEAST_NS), every):
        spare = len(batch.rows.get("activity", ())) - len(batch.rows.get("sample", ()))
        assert spare in (0, 1)


def test_a_rest_is_a_row_once_it_is_long_enough_and_at_the_end_of_a_chunk():
    small, key = SmallWaits(LEAST_NS), RestKey("blocked", "futex", "futex", 7, 1, 9)
    small.add(key, 2, 600, 400, (1, 2))
    assert not list(small.due(everything=False))
    small.add(key, 1, 500, 500, (3, 4))
    ((found, rest),) = small.due(everything=False)
    assert found == key
    assert (rest.count, rest.ns, rest.max_ns, rest.waker) == (3, 1_100, 500, (3, 4))
    small.add(key, 1, 5, 5, (0, 0))
    assert [rest.ns for _, rest in small.due(everything=True)] == [5]
    assert not list(small.due(everything=True))


def test_beyond_the_bound_of_rests_the_oldest_become_rows():
    small = SmallWaits(LEAST_NS)
    for tid in range(MAX_RESTS + 5):
        small.add(RestKey("blocked", "futex", "futex", 7, 1, tid), 1, 1, 1, (0, 0))
    assert [key.tid for key, _ in small.due(everything=False)] == list(range(5))
    assert len(list(small.due(everything=True))) == MAX_RESTS


def test_beyond_the_bound_of_processes_those_that_did_nothing_lately_become_rows(monkeypatch):
    monkeypatch.setattr(tasks, "MAX_ROWS", 10)
    collector = TaskCollector.__new__(TaskCollector)
    collector._least_ns, collector._small = LEAST_NS, {}
    used = [1] * 13
    for turn in range(20):
        drained = [(pid, 0, *used) for pid in (1, 2, 100 + turn)]
        found = [pid for pid, _, _ in collector._due(drained, False)]
        assert found == ([100 + turn - 8] if turn >= 8 else [])
    assert len(list(collector._due([], True))) == 10
    assert not collector._small


def test_what_a_process_used_is_added_up_until_it_is_worth_a_row():
    collector = TaskCollector.__new__(TaskCollector)
    collector._least_ns, collector._small = LEAST_NS, {}
    used = [7, 110, 300, 300, *[1] * 11]
    assert not list(collector._due([tuple(used)], False))
    ((pid, _, found),) = collector._due([tuple(used)], False)
    assert (pid, *found) == (7, 600, 600, *[2] * 11)
    ((_, _, found),) = collector._due([tuple(used)], True)
    assert found[0] == 300
