# SPDX-License-Identifier: Apache-2.0
"""The benchmark of collectives judges traces of several ranks; here traces made by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.explain.collectives import ROUNDS, judge, only_nccl, table

from sonde.model.causes import Bound

WORK_US, REDUCE_US, GAP_US, STEPS = 1_000, 100, 30, 40


def trace(path: Path, device: int, work_us: int, slowest_us: int) -> None:
    """A rank's loop: its work, then a collective that ends once the slowest is there, too."""
    events, correlation, t = [], 0, 1_000_000.0

    def launched(name: str, called: float, begin: float, end: float) -> None:
        nonlocal correlation
        correlation += 1
        common = {"ph": "X", "args": {"correlation": correlation}}
        call = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 9}
        events.append(common | call | {"ts": called, "dur": 4})
        args = {"correlation": correlation, "device": device, "stream": 7}
        ran = {"cat": "kernel", "name": name, "pid": device, "tid": 7, "args": args}
        events.append(common | ran | {"ts": begin, "dur": end - begin})

    for _ in range(STEPS):
        launched("gemm", t - 8, t, t + work_us)
        reduced = t + slowest_us + REDUCE_US
        launched("ncclDevKernel_AllReduce", t, t + work_us, reduced)
        wait = {"cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "pid": 9, "tid": 9}
        events.append(wait | {"ph": "X", "ts": t + 10, "dur": reduced - t - 8, "args": {}})
        t = reduced + GAP_US
    path.write_text(json.dumps({"deviceProperties": [], "traceEvents": events}))


@pytest.fixture
def run(tmp_path):
    for rank in range(2):
        took = {}
        for name, (late, times) in ROUNDS.items():
            works = [round(WORK_US * (times if one == late else 1)) for one in range(2)]
            trace(tmp_path / f"{name}-rank{rank}.json", rank, works[rank], max(works))
            took[name] = (max(works) + REDUCE_US + GAP_US) / 1e6
        (tmp_path / f"rank{rank}.txt").write_text(json.dumps(took))
    return tmp_path


def test_waiting_for_the_slowest_rank_is_reported_within_points_of_the_truth(run):
    scores = judge(run)

    assert all(abs(one.share - one.truth) < 1 for one in scores), table(scores)
    assert all(abs(one.clock - one.truth) < 1 for one in scores), table(scores)
    waiting = [one for one in scores if one.round.endswith("x2") and not one.straggler]
    assert {one.verdict for one in waiting} == {Bound.COMMUNICATION}


def test_the_straggler_is_the_rank_that_was_given_more(run):
    scores = [one for one in judge(run) if one.round != "balanced"]

    assert len(scores) == 6
    assert all(one.named == one.straggler for one in scores), table(scores)
    assert "straggler named: 3 of 3" in table(scores)


def test_the_truth_is_a_plain_sweep(run):
    alone = only_nccl(run / "last x2-rank0.json")

    assert alone == pytest.approx(1100 / 2130, abs=0.01)
