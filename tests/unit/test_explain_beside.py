# SPDX-License-Identifier: Apache-2.0
"""A trace of a running process names no code: the capture that was made beside it does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sonde.analyze.bound import explain
from sonde.analyze.merge import merged
from sonde.model.causes import Bound, Cause
from sonde.model.timeline import Activity, CallKind, CopyDirection, Timeline, Total, TotalKind
from timelines import Scene, repeated, shares

PLACE = "prepare train.py:12"


def late(scene: Scene, t: float) -> None:
    """The launch is 8 ms late, and no row shows why."""
    scene.kernel(t, t + 1000)
    scene.kernel(t + 9000, t + 9990)


def capture(trace: Timeline, **ns: int) -> Timeline:
    """Of the same thread: its samples by activity, a hundred a second."""
    totals = [
        Total(0, TotalKind.SAMPLED, str(Activity[name]), CallKind.OTHER, length, 0,
              location=PLACE, samples=length // 10_000_000)
        for name, length in ns.items()
    ]  # fmt: skip
    threads = Scene()
    threads.python(0, 1, "x.py(1): x")
    plain = threads.timeline()
    return replace(
        plain, totals=totals, extent_ns=(trace.start_ns, trace.end_ns), sources=("sonde",)
    )


@pytest.mark.parametrize(
    ("activity", "cause"), [("PAGE_FAULT", Cause.PAGE_FAULT), ("FILE", Cause.IO)]
)
def test_what_samples_of_the_thread_show_is_the_cause_of_its_late_launches(activity, cause):
    trace = repeated(Scene(), late).timeline()
    beside = capture(trace, **{activity: 160_000_000, "CODE": 20_000_000})

    (verdict,) = explain(merged(trace, beside)).verdicts

    first = verdict.causes[0]
    assert first.key == cause
    assert first.share == pytest.approx(0.8, abs=0.03)
    assert first.locations[0].function == PLACE
    assert explain(trace).verdicts[0].causes[0].key == Cause.HOST


def test_code_that_waits_for_a_cpu_in_short_pieces_is_split_as_the_threads_time_is():
    """Of 10 ms the thread has a CPU for 7.5, and the device its work for two: no wait is long
    enough to be kept."""
    trace = repeated(Scene(), late).timeline()
    beside = capture(trace, CODE=150_000_000)
    waits = Total(0, TotalKind.RUNQUEUE, "run queue", CallKind.OTHER, 50_000_000, 5000)
    beside = replace(beside, totals=[*beside.totals, waits])

    (verdict,) = explain(merged(trace, beside)).verdicts
    found = {one.key: one.share for one in verdict.causes}

    assert found[Cause.HOST] == pytest.approx(0.55, abs=0.02)
    assert found[Cause.RUN_QUEUE] == pytest.approx(0.25, abs=0.02)
    assert Bound.CPU_CONTENTION in {bound.key for bound in verdict.bounds}


def test_time_in_device_calls_and_on_the_launch_path_is_no_sign_of_the_code_between():
    trace = repeated(Scene(), late).timeline()
    beside = capture(
        trace, PAGE_FAULT=90_000_000, CODE=30_000_000, COPY=40_000_000, LAUNCH_PATH=40_000_000
    )

    (verdict,) = explain(merged(trace, beside)).verdicts

    assert verdict.causes[0].key == Cause.PAGE_FAULT


def test_a_copy_within_the_devices_memory_is_its_work():
    def step(scene: Scene, t: float) -> None:
        scene.copy(t, t + 8000, 64 << 20, direction=CopyDirection.D2D)
        scene.kernel(t + 8001, t + 9999)

    scene = repeated(Scene(), step)

    assert Cause.COPY not in shares(scene)
    (verdict,) = explain(scene.timeline()).verdicts
    assert verdict.computing > 0.99
    assert Bound.COPY not in {bound.key for bound in verdict.bounds}
