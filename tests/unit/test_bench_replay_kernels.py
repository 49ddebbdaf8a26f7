# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.replay_kernels`: how shares of a trace are compared with CUPTI's."""

from __future__ import annotations

import pytest
from bench.replay_kernels import compared, is_well, line

WINDOWS = [
    {"steps": 100, "kernels": {"void gemm<2ul>(X)": 60_000_000, "tiny": 1_000},
     "kernels_ns": 90_000_000},
    {"steps": 50, "kernels": {"void gemm<2ul>(X)": 31_000_000}, "kernels_ns": 45_000_000},
]  # fmt: skip


def test_a_truth_is_of_a_step_and_the_pace_before_the_trace():
    names = [("gemm<(unsigned long)2>(X)", 0.6), ("norm", 0.3)]
    outcome = {"in_replays": [{"name": name, "share": share} for name, share in names]}
    gemm, whole = compared(outcome, WINDOWS, 1_000.0)
    assert (gemm["truth"], gemm["share"]) == (pytest.approx(0.61), 0.6)
    assert gemm["points"] == pytest.approx(-1)
    assert (whole["truth"], whole["share"]) == (pytest.approx(0.9), pytest.approx(0.9))


@pytest.mark.parametrize("cut", ["norm<Half, la…", "norm<Half, …Impl(Tensor))"])
def test_a_long_name_that_was_cut_is_found(cut):
    windows = [{"steps": 10, "kernels": {"norm<Half, lambda>(int, Impl(Tensor)...)": 5_000_000},
                "kernels_ns": 5_000_000}]  # fmt: skip
    outcome = {"in_replays": [{"name": cut, "share": 0.5}, {"name": "gemm…", "share": 0.1}]}
    norm, _ = compared(outcome, windows, 1_000.0)
    assert norm["share"] == 0.5


@pytest.mark.parametrize(
    ("changed", "well"),
    [
        ({}, True), ({"slower": 0.6}, False), ({"kernels": []}, False), ({"error": "x"}, False),
        ({"kernels": [{"points": -3.1}]}, False),
        ({"bounded": False, "slower": 2.0, "refused": "why"}, True),
    ],
)  # fmt: skip
def test_what_counts_as_well(changed, well):
    row = {"loop": "a", "bounded": True, "slower": 0.2, "kernels": [{"points": 1.0}],
           "before": [100.0]} | changed  # fmt: skip
    assert is_well(row, 0.5) is well
    assert ("NOT WELL" in line(row, 0.5)) is not well
