# SPDX-License-Identifier: Apache-2.0
"""The page of an agent that keeps nothing: asked seldom, and yet no byte is missing in its totals.

The agent, its process that asks, and its page are real; the library is a stub that counts.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bench.signals import page
from bench.signals.agreement import page as agreement

from nvml_stub import Stub

LOADS = Path(__file__).parents[1] / "programs" / "nvml" / "loads.py"


def test_totals_on_a_page_are_what_was_moved(tmp_path):
    stub = Stub(tmp_path)
    stub.set_answers(utilization=80)
    loads = [sys.executable, str(LOADS)]
    watched = page.watch(tmp_path, [("h2d", 3.0, page.SELDOM_S)], loads, stub.environment)
    wire = [row for row in agreement(watched) if row.figure == "PCIe receive, wire"]
    assert wire[0].truth > 2e10
    for row in wire:  # the stub's has no headers
        assert row.seen == pytest.approx(row.truth, rel=0.02)
