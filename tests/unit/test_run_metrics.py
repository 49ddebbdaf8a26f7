# SPDX-License-Identifier: Apache-2.0
"""Runs on devices as counters: weighted, by kernel with the light ones together, by size."""

from __future__ import annotations

import pytest

from sonde.agent.run_metrics import MAX_NAMED, RunMetrics
from sonde.model.rows import DeviceRunRow
from sonde.sinks import series
from sonde.sinks.series import OTHER, MetricRegistry


@pytest.fixture
def board():
    return MetricRegistry()


def row(**values):
    zero = {"kind": "kernel", "name": "k", "source": "cupti", "direction": "", "grid": "",
            "block": "", "weight": 1.0, "start_time_ns": 0, "end_time_ns": 1_000_000}  # fmt: skip
    return DeviceRunRow(**{name: (zero | values).get(name, 0) for name in DeviceRunRow._fields})


def counts(board, name):
    for metric, found in board.families():
        if metric.name == name:
            return {tuple(one.attributes.values()): one.value for one in found}
    return {}


def test_a_run_counts_for_as_many_as_its_weight(board):
    runs = RunMetrics(board)
    runs.take(row(weight=10.0))
    runs.take(row(weight=2.5, kind="copy", bytes=1))
    assert counts(board, "sonde.gpu.runs") == {("kernel",): 10, ("copy",): 2.5}
    assert counts(board, "sonde.gpu.run.time") == {("kernel",): 0.01, ("copy",): 0.0025}


def test_heavy_kernels_have_a_name_and_the_rest_is_other(board):
    runs = RunMetrics(board)
    for number in range(10_000):
        runs.take(row(name=f"light_{number}", end_time_ns=1_000))
        runs.take(row(name="heavy", end_time_ns=9_000))
    time_s = counts(board, "sonde.gpu.kernel.time")
    assert len(time_s) <= MAX_NAMED + 1
    assert time_s["heavy",] == pytest.approx(10_000 * 9e-6, rel=0.01)
    assert sum(time_s.values()) == pytest.approx(10_000 * 10e-6)
    assert (OTHER,) in time_s


def test_sizes_fall_into_steps(board):
    runs = RunMetrics(board)
    runs.take(row(grid="132,2,1", block="16,16,1", weight=3.0))
    for size in (1, 1024, 1025, 5_000_000_000):
        runs.take(row(kind="copy", bytes=size, direction="h2d"))
    assert counts(board, "sonde.gpu.kernel.grids") == {("1024",): 3}
    assert counts(board, "sonde.gpu.kernel.blocks") == {("256",): 3}
    assert counts(board, "sonde.gpu.copies") == {
        ("receive", "1024"): 2,
        ("receive", "4096"): 1,
        ("receive", "more"): 1,
    }


def test_counters_without_a_process_are_bounded_too(board):
    for number in range(1000):
        board.count("sonde.agent.lost", {"sonde.loss": f"loss-{number}"}, 1.0)
    found = counts(board, "sonde.agent.lost")
    assert len(found) == series.MAX_OWNED + 1
    assert sum(found.values()) == 1000
