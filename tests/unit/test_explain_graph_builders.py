# SPDX-License-Identifier: Apache-2.0
"""A function that captures graphs again and again costs all that is called in it."""

from __future__ import annotations

import pytest

from captures import START_NS
from sonde.analyze.bound import explain
from sonde.model.causes import Bound, Cause
from sonde.recording.timelines import open_timeline

MS = 1_000_000
MAIN = ("main", "[python]", "train.py", 88, "python")
MAKE = ("make", "[python]", "plans.py", 17, "python")
FORWARD = ("forward", "[python]", "model.py", 12, "python")
ADD = ("at::_ops::add::call", "libtorch_cpu.so")
LAUNCH = ("cudaLaunchKernel", "libcudart.so.13")
SYNC = ("cudaDeviceSynchronize", "libcudart.so.13")
ITEM = ("cudaStreamSynchronize", "libcudart.so.13")
INSTANTIATE = ("cudaGraphInstantiateWithFlags", "libcudart.so.13")
REPLAY = ("cudaGraphLaunch", "libcudart.so.13")


@pytest.fixture
def explained(writer, tmp_path):
    def explained(*, builder=MAKE, graphs=50, forward=True):
        """Of 5 s: 1 s waits for warm-ups and 1 s of launches in the builder, 2.6 s of waits for
        replays; the device works for 4.4 s, a quarter of it for the warm-ups."""
        key = writer.process(42, "train")
        inside = (MAIN, builder) if builder != MAIN else (MAIN,)
        build = writer.stack(*inside, INSTANTIATE)
        calls = {"op": "build", "count": graphs, "seconds": 0.1, "stack": build}
        writer.calls(key, 42, "cudaGraphInstantiateWithFlags", **calls)
        waits = {"op": "sync", "count": 50, "stack": writer.stack(*inside, SYNC)}
        writer.calls(key, 42, "cudaDeviceSynchronize", seconds=1.0, **waits)
        writer.on_cpu(key, 42, writer.stack(*inside, SYNC), 99)
        warm = writer.stack(*inside, *((FORWARD,) if forward else ()), ADD, LAUNCH)
        writer.on_cpu(key, 42, warm, 99)
        replay = writer.stack(MAIN, REPLAY)
        writer.calls(
            key, 42, "cudaGraphLaunch", seconds=0.1, op="graph-launch", count=500, stack=replay
        )
        item = {"op": "sync", "count": 500, "stack": writer.stack(MAIN, ITEM)}
        writer.calls(key, 42, "cudaStreamSynchronize", seconds=2.6, **item)
        writer.on_cpu(key, 42, writer.stack(MAIN, ITEM), 257)
        for number in range(100):
            for kind, stack, ns in (("replay", replay, 33 * MS), ("kernel", warm, 11 * MS)):
                start = START_NS + number * 50 * MS
                row = {"kind": kind, "name": "gemm", "weight": 20.0, "source": "event"}
                row |= {
                    "grid": "512,1,1",
                    "start_time_ns": start,
                    "end_time_ns": start + ns // 20,
                    "tid": 42,
                }
                writer.rows["device_run"].append({**key, **row, "stream": 7, "stack_id": stack})
        return explain(open_timeline([writer.write(tmp_path / "a.sonde")])).verdicts[0]

    return explained


@pytest.mark.parametrize("change", [{"forward": True}, {"forward": False}, {"graphs": 10}])
def test_warm_up_and_waits_are_part_of_capturing(explained, change):
    verdict = explained(**change)
    (first, *rest) = verdict.causes

    assert verdict.bounds[0].key == Bound.HOST
    assert first.key == Cause.BUILD
    assert first.share == pytest.approx(0.34, abs=0.04)
    assert first.locations[0].function == "make plans.py:17"
    assert sum(one.share for one in rest) < 0.02
    assert "of it, 22 points for graphs that were captured" in verdict.evidence


@pytest.mark.parametrize("change", [{"graphs": 9}, {"builder": MAIN}])
def test_a_few_graphs_at_the_start_and_a_loop_that_replays_them_are_no_building(explained, change):
    verdict = explained(**change)

    built = sum(one.share for one in verdict.causes if one.key == Cause.BUILD)
    assert built <= 0.03
    assert verdict.bounds[0].key == Bound.COMPUTE
