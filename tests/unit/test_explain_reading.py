# SPDX-License-Identifier: Apache-2.0
"""What reading results back costs on a CPU goes with the waits for them."""

from __future__ import annotations

import pytest

from sonde.model.causes import Bound, Cause
from training_capture import on_cpu, process, runs, shares

SOLVE = ("solve", "[python]", "solver.py", 50, "python")
LOG = ("log", "[python]", "solver.py", 40, "python")
ITEM = ("at::_ops::item::call", "libtorch_cpu.so")
ADD = ("at::_ops::add::call", "libtorch_cpu.so")
LAUNCH = ("cudaLaunchKernel", "libcudart.so.13")


@pytest.mark.parametrize(("also_launches", "read"), [(False, 0.4), (True, 0.3)])
def test_the_launch_path_where_the_thread_waits_and_launches_nothing_is_the_waits(
    writer, verdicts, also_launches, read
):
    """Values that are read one by one: 30 % of waits, and 10 % of dispatch for them. A line that
    launches kernels as well keeps its launches."""
    key = process(writer)
    item = writer.stack(SOLVE, LOG, ITEM)
    writer.calls(key, 42, "cuStreamSynchronize", count=5000, seconds=1.5, op="sync", stack=item)
    on_cpu(writer, key, 0.5, SOLVE, LOG, ITEM)
    on_cpu(writer, key, 2.9, SOLVE, ADD, LAUNCH)
    runs(writer, key, 0.4, stack_id=writer.stack(SOLVE, ADD))
    if also_launches:
        runs(writer, key, 0.01, stack_id=writer.stack(SOLVE, LOG, ADD))
    (verdict,) = verdicts()
    named = {one.key: one.share for one in verdict.bounds}

    assert shares(verdict)[Cause.SYNCHRONIZATION] == pytest.approx(read, abs=0.01)
    # Without the launches, those behind waits too, or without the waits: either saves its part.
    assert named[Bound.SYNCHRONIZATION] == pytest.approx(read, abs=0.01)
    assert named[Bound.LAUNCH] == pytest.approx(0.9 - read - 0.01 * also_launches, abs=0.02)


def test_what_others_stalls_could_also_be_saved_by_takes_no_place_of_a_cause(writer, verdicts):
    """Launches behind waits are named beside three causes that have the stalls."""
    key = process(writer)
    item = writer.stack(SOLVE, LOG, ITEM)
    writer.calls(key, 42, "cuStreamSynchronize", count=50, seconds=0.8, op="sync", stack=item)
    for reason, seconds in (("sync to disk", 1.0), ("page fault", 0.6)):
        writer.wait(key, 42, reason, seconds, stack=writer.stack(SOLVE))
    on_cpu(writer, key, 2.5, SOLVE, ADD, LAUNCH)
    runs(writer, key, 0.5, stack_id=writer.stack(SOLVE, ADD))
    (verdict,) = verdicts()
    named = {one.key: one.share for one in verdict.bounds}

    assert named[Bound.IO] == pytest.approx(0.2, abs=0.01)
    assert named[Bound.SYNCHRONIZATION] == pytest.approx(0.16, abs=0.02)
    assert named[Bound.PAGE_FAULT] == pytest.approx(0.12, abs=0.01)
    assert named[Bound.LAUNCH] == pytest.approx(0.16, abs=0.04)
