# SPDX-License-Identifier: Apache-2.0
"""A trace of a running process is judged by the time of its threads in the capture beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sonde.analyze.bound import explain
from sonde.analyze.merge import merged
from sonde.model.causes import Bound, Cause
from sonde.model.timeline import (
    Activity,
    CallKind,
    CopyDirection,
    DeviceUse,
    Timeline,
    Total,
    TotalKind,
)
from timelines import PID, STEPS, Scene, repeated

CODE, READS = "tidy train.py:12", "step train.py:30"
RECORD_NS = STEPS * 10_000_000


def sampled(activity: Activity, share: float, place: str, track: int = 0) -> Total:
    """On-CPU samples for a share of the record."""
    ns = round(share * RECORD_NS)
    return Total(track, TotalKind.SAMPLED, str(activity), CallKind.OTHER, ns, 0,
                 location=place, samples=10)  # fmt: skip


def beside(trace: Timeline, *totals: Total, longer_ns: int = 0) -> Timeline:
    """A capture of the same thread and of a child process."""
    threads = Scene()
    threads.python(0, 1, "x.py(1): x")
    threads.interner.thread(PID + 1, PID + 1, "child", "child")
    span = trace.start_ns, trace.end_ns + longer_ns
    plain = replace(threads.timeline(), totals=totals, extent_ns=span, sources=("sonde",))
    return replace(plain, tracks=threads.interner.tracks)


def reading(scene: Scene, t: float) -> None:
    """A kernel, its result is read, and code follows before the next one."""
    scene.kernel(t, t + 6000)
    scene.sync(t + 100, t + 6010)
    scene.copy(t + 6000, t + 6002, 4, called=t + 50, direction=CopyDirection.D2H)


@pytest.mark.parametrize("longer_s", [0, 2])
def test_code_behind_a_wait_keeps_its_time_and_the_wait_is_named_too(longer_s):
    """By calls alone every stall begins at the wait. Totals of a much longer capture are of other
    work, and are not used."""
    trace = repeated(Scene(), reading).timeline()
    totals = sampled(Activity.CODE, 0.39, CODE), sampled(Activity.DEVICE_WAIT, 0.59, READS)
    capture = beside(trace, *totals, longer_ns=longer_s * 1_000_000_000)

    (verdict,) = explain(merged(trace, capture)).verdicts
    bounds = {one.key: one.share for one in verdict.bounds}

    if longer_s:
        assert verdict.bounds[0].key == Bound.SYNCHRONIZATION
        return
    assert bounds[Bound.HOST] == pytest.approx(0.39, abs=0.02)
    assert bounds[Bound.SYNCHRONIZATION] == pytest.approx(0.39, abs=0.02)
    host = next(one for one in verdict.causes if one.key == Cause.HOST)
    assert host.locations[0].function == CODE
    assert verdict.device == 0
    assert verdict.computing == pytest.approx(0.6, abs=0.02)


def test_streams_that_wait_for_one_another_are_named():
    """The second stream's kernel follows the first one's, and nothing overlaps."""

    def step(scene: Scene, t: float) -> None:
        scene.kernel(t, t + 6000)
        scene.call(t + 1, t + 2, "cudaStreamWaitEvent", CallKind.EVENT)
        scene.kernel(t + 6001, t + 9990, launched=t + 10, stream=8)
        scene.sync(t + 20, t + 9995)

    trace = repeated(Scene(), step).timeline()
    capture = beside(trace, sampled(Activity.DEVICE_WAIT, 0.97, READS))

    (verdict,) = explain(merged(trace, capture)).verdicts
    bounds = {one.key: one.share for one in verdict.bounds}

    assert bounds[Bound.DEPENDENCY] == pytest.approx(0.4, abs=0.02)


@pytest.mark.parametrize(("waits", "cause"), [(0.3, Cause.GPU_CONTENTION), (0.0, None)])
def test_a_co_tenant_that_is_recorded_goes_on_between_the_drivers_reports(waits, cause):
    """Work is taken on late. The one report on the child is from before all of that."""

    def step(scene: Scene, t: float) -> None:
        scene.kernel(t, t + 6000, launched=t - 3000)
        scene.sync(t, t + 6010)

    trace = repeated(Scene(), step).timeline()
    totals = [sampled(Activity.DEVICE_WAIT, 0.95, READS)]
    if waits:
        totals.append(sampled(Activity.DEVICE_WAIT, waits, "preview train.py:50", track=1))
    at = np.array([trace.start_ns - 2_000_000_000], np.int64)
    uses = [DeviceUse(pid, 0, at, np.full(1, 0.4)) for pid in (PID, PID + 1)]
    capture = replace(beside(trace, *totals), busy_of=uses, gpus_of={PID: [0], PID + 1: [0]})

    (verdict,) = explain(merged(trace, capture)).verdicts
    shares = {one.key: one.share for one in verdict.causes}

    assert (Cause.GPU_CONTENTION in shares) == (cause is not None)
    if cause:
        assert shares[cause] == pytest.approx(0.35, abs=0.06)


@pytest.mark.parametrize("ends", [True, False])
def test_what_a_thread_does_while_it_captures_a_graph_builds_it(ends):
    """A step captures for 3 of its 10 ms: what it calls meanwhile is no launch. A capture whose
    end is not in the trace is none."""

    def step(scene: Scene, t: float) -> None:
        scene.kernel(t, t + 6000)
        scene.sync(t + 100, t + 6010)
        scene.call(t + 6100, t + 6110, "cudaStreamBeginCapture", CallKind.BUILD)
        for number in range(20):
            at = t + 6200 + 100 * number
            scene.call(at, at + 90, "cudaLaunchKernel", CallKind.LAUNCH)
        if ends:
            scene.call(t + 9090, t + 9100, "cudaStreamEndCapture", CallKind.BUILD)

    trace = repeated(Scene(), step).timeline()
    totals = (
        sampled(Activity.DEVICE_WAIT, 0.58, READS),
        sampled(Activity.LAUNCH_PATH, 0.25, "forward net.py:5"),
        sampled(Activity.CODE, 0.15, CODE),
    )
    (verdict,) = explain(merged(trace, beside(trace, *totals))).verdicts
    found = {one.key: one.share for one in verdict.causes}

    if not ends:
        assert Cause.BUILD not in found or found[Cause.BUILD] < 0.02
        return
    assert found[Cause.BUILD] == pytest.approx(0.3, abs=0.03)
    assert found.get(Cause.LAUNCH, 0.0) < 0.03
    assert found[Cause.HOST] == pytest.approx(0.1, abs=0.03)
