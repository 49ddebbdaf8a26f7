# SPDX-License-Identifier: Apache-2.0
"""Verdicts on two programs of the second exam, which nobody here wrote.

They taught rules (docs/lab/exam.md), so they examine nothing; they hold what was mended.
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
