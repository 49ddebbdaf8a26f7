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
