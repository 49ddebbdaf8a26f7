# SPDX-License-Identifier: Apache-2.0
"""Shares of kernels within replays: by a trace, and by how often the program replayed before it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sonde.analyze.replay_kernels import replay_kernels
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
    assert gemm.half_width == pytest.approx(0.032), "as replays are counted"
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
