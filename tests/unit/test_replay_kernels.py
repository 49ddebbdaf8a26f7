# SPDX-License-Identifier: Apache-2.0
"""Shares of kernels within replays: by a trace, and by how often the program replayed before it."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from sonde.analyze.replay_kernels import MOST_KERNELS, RATE_ERROR, replay_kernels
from sonde.model.confidence import student_t_quantile
from sonde.model.device_trace import DeviceTrace, Kind

TYPE = np.dtype([(name, "u8") for name in ("start_ns", "end_ns", "correlation", "name", "graph")]
                + [("kind", "u1")])  # fmt: skip
GEMM, NORM, EAGER = 1, 2, 3


def trace(rows):
    """Of (correlation, graph, name, length in ns)."""
    made = np.zeros(len(rows), TYPE)
    for at, (correlation, graph, name, length) in enumerate(rows):
        made[at] = (1_000 * at, 1_000 * at + length, correlation, name, graph, Kind.KERNEL)
    names = {GEMM: "gemm", NORM: "norm", EAGER: "eager"}
    return DeviceTrace(7, 0, 10**9, 0, made, names, is_cut=False, lost={})


def replay(correlation, graph=5, gemm=10_000):
    return [(correlation, graph, GEMM, gemm), (correlation, graph, GEMM, gemm),
            (correlation, graph, NORM, 5_000)]  # fmt: skip


def test_a_share_is_the_time_in_a_replay_times_the_replays_before_the_trace():
    rows = [row for number in range(50) for row in replay(number)]
    gemm, norm = replay_kernels(trace(rows), 20_000)
    assert (gemm.name, gemm.launches, gemm.ns) == ("gemm", 2.0, 20_000)
    assert gemm.share == pytest.approx(0.4)
    assert gemm.half_width == pytest.approx(0.4 * RATE_ERROR), "as replays are counted"
    assert (norm.name, norm.share) == ("norm", pytest.approx(0.1))


def test_kernels_that_were_launched_by_themselves_do_not_count():
    rows = [row for n in range(50) for row in [*replay(n), (1_000 + n, 0, EAGER, 9_000)]]
    assert {one.name for one in replay_kernels(trace(rows), 1_000)} == {"gemm", "norm"}


def test_of_several_graphs_a_replay_is_their_mean():
    rows = [row for n in range(40) for row in replay(n, 5 + n % 2, [10_000, 30_000][n % 2])]
    gemm, norm = replay_kernels(trace(rows), 1_000)
    assert gemm.ns == pytest.approx(40_000)
    assert norm.ns == pytest.approx(5_000)
    assert gemm.half_width > 0.03 * gemm.share


def test_a_replay_that_the_trace_cut_is_left_out():
    rows = [row for number in range(50) for row in replay(number)] + replay(99)[:1]
    gemm, norm = replay_kernels(trace(rows), 20_000)
    assert (gemm.ns, norm.ns) == (20_000, 5_000)


def test_intervals_hold_the_truth_of_replays_that_differ():
    rng, held = random.Random(1), 0
    for _ in range(200):
        rows = [row for n in range(30) for row in replay(n, gemm=rng.randrange(5_000, 15_000))]
        gemm, _ = replay_kernels(trace(rows), 20_000)
        held += abs(gemm.share - 2 * 9_999.5 * 20_000 / 1e9) <= gemm.half_width
    assert held >= 186


@pytest.mark.parametrize(
    ("rows", "rate", "why"),
    [
        ([(1, 0, EAGER, 9_000)], 100, "no kernel of a replayed graph"),
        (replay(1), 0, "no replay was seen"),
        (replay(1) + replay(2), 100, "2 whole replays"),
        ([r for n in range(30) for r in (replay(n) if n % 4 else replay(n)[:2])], 100, "of 30 "),
    ],
)
def test_what_a_trace_does_not_show_is_refused_with_the_reason(rows, rate, why):
    with pytest.raises(ValueError, match=why):
        replay_kernels(trace(rows), rate)


def one_by_one(rows, whole, calls):
    """By name: (launches, ns, error of the mean) in whole replays, name after name."""
    found = {}
    for name in np.unique(rows["name"]).tolist():
        mine = rows[rows["name"] == name]
        replay_of = np.searchsorted(calls, mine["correlation"])
        length = (mine["end_ns"] - mine["start_ns"]).astype(float)
        each = np.bincount(replay_of, length, len(calls))[whole]
        launches = np.bincount(replay_of, minlength=len(calls))[whole]
        found[name] = launches.mean(), each.mean(), each.std(ddof=1) / len(each) ** 0.5
    return found


@pytest.mark.parametrize("seed", range(8))
def test_all_kernels_at_once_have_what_each_has_by_itself(seed):
    """Random graphs of several lengths, kernels that only some replays have, one cut replay."""
    draw = random.Random(seed)
    shapes = {graph: [draw.randrange(1, 40) for _ in range(draw.randrange(2, 30))]
              for graph in range(1, draw.randrange(2, 7))}  # fmt: skip
    rows = [
        (correlation, graph, name, draw.randrange(100, 9_000))
        for correlation in range(1, 150)
        for graph in [draw.choice(list(shapes))]
        for name in shapes[graph]
    ]
    rows += [(999, 1, name, 50) for name in shapes[1][: len(shapes[1]) // 2]]
    draw.shuffle(rows)
    made = trace(rows)
    calls = np.unique(made.rows["correlation"])
    expected = one_by_one(made.rows, calls != 999, calls)
    names = {name: str(name) for name in expected}
    named = DeviceTrace(7, 0, 10**9, 0, made.rows, names, is_cut=False, lost={})
    found = replay_kernels(named, 1_000)
    assert [one.ns for one in found] == sorted((one.ns for one in found), reverse=True)
    quantile = student_t_quantile(0.975, 148)
    for one in found:
        launches, ns, error = expected.pop(int(one.name))
        assert (one.launches, one.ns) == (pytest.approx(launches), pytest.approx(ns))
        half = one.share * RATE_ERROR + quantile * error * 1_000 / 1e9
        assert one.half_width == pytest.approx(half)
    assert not expected


def test_a_million_names_and_graphs_take_seconds():
    """Name after name they took hours."""
    number = 1_000_000
    rows = np.zeros(number, TYPE)
    rows["start_ns"] = np.arange(number)
    rows["end_ns"] = rows["start_ns"] + 10
    rows["name"] = np.arange(number)
    rows["correlation"] = np.arange(number) // 4
    rows["graph"] = 1 + np.arange(number) // 4
    rows["kind"] = Kind.KERNEL
    began = time.thread_time()
    found = replay_kernels(DeviceTrace(7, 0, 10**9, 0, rows, {}, is_cut=False, lost={}), 1_000)
    assert time.thread_time() - began < 20
    assert len(found) == MOST_KERNELS + 1
    assert found[-1].name == f"{number - MOST_KERNELS:,} other kernels"
    assert sum(one.launches for one in found) == pytest.approx(4)
