# SPDX-License-Identifier: Apache-2.0
"""Verdicts on what Sonde recorded by itself, on an H200, at its default budget.

`python -m bench.explain OUT --own` made these recordings, of 12 s each, of programs whose cause is
known; how busy the device was is by torch.profiler's trace of the same process, right after.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sonde.analyze.bound import explain
from sonde.model.causes import Bound
from sonde.model.timeline import TotalKind
from sonde.query.capture import read
from sonde.query.timeline import of_capture

DATA = Path(__file__).parents[1] / "data/explain/own"


@pytest.mark.parametrize(
    ("kind", "bound", "busy"),
    [
        # A whole graph is timed, and has no name: the device's counters show what limits it.
        ("graph_replay", Bound.MEMORY, 0.998),
        # XLA waits for the device on futexes, from thread to thread up to the driver's.
        ("jax_float", Bound.SYNCHRONIZATION, 0.413),
        # Its queue is never empty: timed without a gate.
        ("serialised_streams", Bound.SMALL_KERNELS, 0.994),
        # Our thread has as little of a CPU as the program.
        ("cpu_quota", Bound.CPU_CONTENTION, 0.371),
    ],
)
def test_the_verdict_and_how_busy_the_device_was(kind: str, bound: Bound, busy: float) -> None:
    timeline = of_capture(read(DATA / f"{kind}.sonde"))
    verdict = explain(timeline).verdicts[0]
    assert verdict.bounds[0].key == bound
    assert timeline.timed_ns is not None
    timed_ns = timeline.timed_ns[1] - timeline.timed_ns[0]
    ran = [one for one in timeline.totals if one.kind == TotalKind.RUN and one.count]
    # The trace slows its program, so the two are not to be the same.
    assert sum(one.ns for one in ran) / timed_ns == pytest.approx(busy, abs=0.07)


def test_the_counters_that_decided_are_named() -> None:
    verdict = explain(of_capture(read(DATA / "graph_replay.sonde"))).verdicts[0]
    assert any("hardware counters of the device" in line for line in verdict.evidence)
