# SPDX-License-Identifier: Apache-2.0
"""Verdicts on two programs each of the second to the fourth exam, which nobody here wrote.

They taught rules (docs/lab/exam.md), so they examine nothing; they hold what was fixed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sonde.analyze.bound import explain
from sonde.model.causes import Bound, Cause
from sonde.model.verdict import Verdict
from sonde.query.capture import read
from sonde.query.timeline import of_capture

DATA = Path(__file__).parents[1] / "data/explain/exam"


def verdict_of(name: str) -> Verdict:
    return explain(of_capture(read(DATA / f"{name}.sonde"))).verdicts[0]


def test_graphs_that_are_captured_again_and_again_cost_all_that_capturing_does() -> None:
    """p25: 44 % of a step by the program's own measurement."""
    verdict = verdict_of("captured_graphs")
    (first, *_) = verdict.causes

    # The loop waits for its kernels, too; what the program loses comes first.
    assert [one.key for one in verdict.bounds] == [Bound.HOST, Bound.KERNELS]
    assert first.key == Cause.BUILD
    assert first.share == pytest.approx(0.36, abs=0.02)
    assert first.locations[0].text == "Kit.graph rig.py:183 ← Plans.make p25.py:17"


def test_the_interpreters_lock_without_symbols_and_who_holds_it() -> None:
    """p21: 34 %; PyTorch takes the lock, and this interpreter's `take_gil` has no name."""
    verdict = verdict_of("interpreter_lock")
    waits = {one.key: one for one in verdict.causes if one.bound == Bound.LOCK}

    assert Cause.LOCK not in waits or waits[Cause.LOCK].share < 0.01
    assert waits[Cause.GIL].share == pytest.approx(0.34, abs=0.02)
    (fact,) = waits[Cause.GIL].facts
    assert "on a CPU in tally p21.py:11 ← uplink p21.py:21" in fact


def test_a_lock_that_launching_threads_pass_on_is_no_turn_and_has_another_holder() -> None:
    """Exam 3, p10: two launching threads wait for the lock that a third one holds while it sleeps;
    its own account is 66 %. Kernels of two streams at once sum up to more than the device's time.
    """
    explanation = explain(of_capture(read(DATA / "lock_passed_on.sonde")))

    assert len(explanation.verdicts) == 2
    for verdict in explanation.verdicts:
        (first, *_) = verdict.causes
        assert first.key == Cause.LOCK
        assert first.share == pytest.approx(0.63, abs=0.02)
        assert verdict.bounds[0].key == Bound.LOCK
        computed = "computed 35 % (27 to 69) of the time, by the driver's reports"
        # Who ended the waits stands before it, where that is known.
        assert any(computed in text for text in verdict.evidence[1:3])
    (fact,) = explanation.verdicts[0].causes[0].facts
    assert "sleep in Index.upload p10.py:35 ← Index.publish p10.py:40" in fact


def test_a_co_tenant_that_is_recorded_too_takes_its_time_out_of_the_kernels() -> None:
    """Exam 3, p12: every replay is interrupted by a child of the program, so none stands out."""
    verdict = verdict_of("recorded_co_tenant")
    (first, *_) = verdict.causes

    assert [one.key for one in verdict.bounds] == [Bound.GPU_CONTENTION]
    assert first.share == pytest.approx(0.235, abs=0.01)
    assert verdict.computing + sum(one.share for one in verdict.causes) == pytest.approx(1.0)
    assert "kernels of thumbnails p12.py:26" in first.facts[0]


def test_streams_in_order_are_named_beside_the_kernels_that_are_waited_for() -> None:
    """Exam 4, p09: 24 % of a step by the program's own measurement."""
    verdict = verdict_of("streams_in_order")
    named = {one.key: one for one in verdict.bounds}

    assert named[Bound.DEPENDENCY].share == pytest.approx(0.15, abs=0.01)
    assert [one.function for one in named[Bound.DEPENDENCY].locations] == [
        "Stitcher.measure_order p09.py:58",
        "Stitcher.hand_over p09.py:54",
    ]


def test_what_a_worker_process_hands_over_through_a_semaphore_is_input() -> None:
    """Exam 4, p21: frames lie in shared memory; what is waited for is a futex of both processes."""
    verdict = verdict_of("worker_semaphore")
    (first, *_) = verdict.causes

    assert [one.key for one in verdict.bounds] == [Bound.INPUT]
    assert first.share == pytest.approx(0.43, abs=0.01)
    assert "on a CPU in courier_main p21.py:25" in first.facts[0]
