# SPDX-License-Identifier: Apache-2.0
"""Accuracy of explain counts programs: one is right if all of its runs are."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from bench.explain.expected import is_right  # noqa: E402
from bench.explain.score import programs_right  # noqa: E402

from sonde.model.causes import Bound  # noqa: E402


@dataclass
class Run:
    kind: str
    right: bool


def test_a_program_counts_if_all_of_its_runs_are_right():
    runs = [Run("a", True), Run("a", True), Run("b", True), Run("b", False), Run("c", True)]

    assert programs_right(runs).startswith("2 of 3 = 66.7 % (Wilson 95 %: 20.8 to 93.9 %)")
    assert programs_right(runs).endswith("; not b")
    assert "not" not in programs_right([Run("a", True)])


@pytest.mark.parametrize(
    ("found", "reports", "right"),
    [
        (Bound.GPU_CONTENTION, True, True),
        (Bound.GPU_CONTENTION, False, True),
        (Bound.NOT_TAKEN, False, True),
        (Bound.NOT_TAKEN, True, False),
        (Bound.LAUNCH, False, False),
    ],
)
def test_what_is_not_known_is_right_where_nothing_shows_other_processes(found, reports, right):
    assert is_right(found, Bound.GPU_CONTENTION, reports) == right
