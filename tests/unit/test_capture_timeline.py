# SPDX-License-Identifier: Apache-2.0
"""Captures as timelines: waits, calls, totals, and the device's own runs where they were timed."""

from __future__ import annotations

import pytest

from captures import START_NS, Writer
from sonde.analyze.bound import explain
from sonde.cli.timelines import open_timeline
from sonde.model.timeline import DeviceKind, StateKind, Way

MS = 1_000_000


@pytest.fixture
def writer():
    return Writer(seconds=5)


def run(writer: Writer, key, begin_ms: float, end_ms: float, **more) -> None:
    row = {"kind": "kernel", "name": "gemm", "weight": 1.0, "source": "cupti", "tid": 42, **more}
    start, end = START_NS + round(begin_ms * MS), START_NS + round(end_ms * MS)
    writer.rows["device_run"].append({**key, "start_time_ns": start, "end_time_ns": end, **row})


def span(writer: Writer, key, begin_ms: float, end_ms: float, kind: str, name: str, **more) -> None:
    start, end = START_NS + round(begin_ms * MS), START_NS + round(end_ms * MS)
    row = {"start_time_ns": start, "end_time_ns": end, "kind": kind, "name": name, "tid": 42}
    writer.rows["span"].append({**key, **row, **more})


def opened(writer: Writer, tmp_path):
    return open_timeline([writer.write(tmp_path / "a.sonde")])


def test_waits_and_samples(writer, tmp_path):
    key = writer.process(42, "train")
    taken = writer.stack("main", "take_gil")
    span(writer, key, 1, 31, "blocked", "futex", stack_id=taken)
    span(writer, key, 31, 35, "runqueue", "futex")
    writer.on_cpu(key, 42, writer.stack("main", "step", ("handle_mm_fault", "[kernel]")), 10)
    timeline = opened(writer, tmp_path)

    assert timeline.states.kind.tolist() == [StateKind.BLOCKED, StateKind.RUNQUEUE]
    assert timeline.states.detail.tolist() == [1, 0]
    assert timeline.lanes[timeline.states.lane[0]].label == "train (42)"
    assert timeline.samples.fault.tolist() == [True]
    assert timeline.names[timeline.samples.name[0]] == "step"
    assert timeline.end_ns - timeline.start_ns == 5_000_000_000


def test_windows_of_device_time_are_explained(writer, tmp_path):
    """Three windows of 100 ms; in each the device computes for half, and its thread has a lock."""
    key = writer.process(42, "train")
    for window in range(3):
        for step in range(10):
            at = 1000 * window + 10 * step
            run(writer, key, at, at + 5, window=window + 1, weight=10.0, grid="8,4,1")
            span(writer, key, at + 5.1, at + 9.9, "blocked", "futex")
    timeline = opened(writer, tmp_path)
    verdict = explain(timeline).verdicts[0]

    assert len(timeline.windows_ns) == 3
    assert timeline.device.blocks[0] == 32
    assert verdict.window_ns == pytest.approx(3 * 95 * MS)
    assert verdict.computing == pytest.approx(150 / 285, abs=0.001)
    assert verdict.bound == "lock"
    assert verdict.causes[0].thread == "train (42)"


def test_copies_on_the_device_keep_their_way_and_size(writer, tmp_path):
    key = writer.process(42, "train")
    run(writer, key, 0, 5, kind="copy", name="", direction="h2d", bytes=1 << 20, window=1)
    run(writer, key, 5, 6, window=1)
    device = opened(writer, tmp_path).device

    assert device.kind.tolist() == [DeviceKind.COPY, DeviceKind.KERNEL]
    assert (device.way[0], device.bytes[0]) == (Way.H2D, 1 << 20)


@pytest.mark.parametrize(("weight", "bound"), [(95.0, "compute"), (20.0, "input")])
def test_runs_timed_singly_give_totals_but_no_gaps(writer, tmp_path, weight, bound):
    """50 runs of 1 ms of 5 s: with a weight of 95 the device computed for 95 % of the time."""
    key = writer.process(42, "train")
    for number in range(50):
        run(writer, key, 100 * number, 100 * number + 1, weight=weight, source="event")
    writer.process(43, "x", threads=[{"tid": 44, "comm": "loader"}])
    writer.calls(key, 42, "cuLaunchKernel", count=5000, seconds=0.3, op="launch")
    writer.wait(key, 42, "futex", 4.0, count=100, waker=(43, 44))
    timeline = opened(writer, tmp_path)
    (verdict,) = explain(timeline).verdicts

    assert not len(timeline.device)
    assert verdict.bound == bound
    assert f"about {weight:.0f} %" in verdict.evidence[1]
