# SPDX-License-Identifier: Apache-2.0
"""Captures as timelines: waits, calls, totals, and the device's own runs where they were timed."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from captures import START_NS, WALL_OFFSET_NS, Writer
from sonde.analyze.bound import explain
from sonde.analyze.merge import merged
from sonde.export import verdict as text
from sonde.model.causes import Bound, Cause
from sonde.model.devices import index_of
from sonde.model.timeline import CopyDirection, DeviceKind, StateKind, TrackKind, WaitDetail
from sonde.query import timeline as of_capture
from sonde.recording.timelines import open_timeline
from timelines import PID, Scene

MS = 1_000_000


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
    assert timeline.states.wait_detail.tolist() == [1, 0]
    assert timeline.tracks[timeline.states.track[0]].label == "train (42)"
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
    assert verdict.bound == Bound.LOCK
    assert verdict.causes[0].thread == "train (42)"


def test_copies_on_the_device_keep_their_way_and_size(writer, tmp_path):
    key = writer.process(42, "train")
    run(writer, key, 0, 5, kind="copy", name="", direction="h2d", bytes=1 << 20, window=1)
    run(writer, key, 5, 6, window=1)
    device = opened(writer, tmp_path).device

    assert device.kind.tolist() == [DeviceKind.COPY, DeviceKind.KERNEL]
    assert (device.direction[0], device.bytes[0]) == (CopyDirection.H2D, 1 << 20)


@pytest.mark.parametrize(("weight", "bound"), [(95.0, Bound.COMPUTE), (20.0, Bound.INPUT)])
def test_runs_timed_singly_give_totals_but_no_gaps(writer, tmp_path, weight, bound):
    """50 runs of 1 ms of 5 s: with a weight of 95 the device computed for 95 % of the time."""
    key = writer.process(42, "train")
    for number in range(50):
        run(writer, key, 100 * number, 100 * number + 1, weight=weight, source="event")
    writer.process(43, "x", threads=[{"tid": 44, "comm": "y"}])
    writer.calls(key, 42, "cuLaunchKernel", count=5000, seconds=0.3, op="launch")
    queue = writer.stack("main", ("Queue.get", "[python]", "queue.py", 171, "python"), "sem_wait")
    writer.wait(key, 42, "futex", 4.0, count=100, waker=(43, 44), stack=queue)
    timeline = opened(writer, tmp_path)
    (verdict,) = explain(timeline).verdicts

    assert not len(timeline.device)
    assert verdict.bounds[0].key == bound
    assert any(f"computed {weight:.0f} %" in text for text in verdict.evidence[1:3])


def test_how_busy_a_device_was_counts_from_when_it_was_watched(writer, tmp_path):
    """Runs were timed in the last 2 of 5 s alone, and stand for all of that."""
    key = writer.process(42, "train")
    for number in range(40):
        run(writer, key, 3000 + 50 * number, 3001 + 50 * number, weight=48.0, source="event")
    writer.calls(key, 42, "cuLaunchKernel", count=5000, seconds=0.3, op="launch")
    (verdict,) = explain(opened(writer, tmp_path)).verdicts

    assert verdict.bound == Bound.COMPUTE
    assert "computed 96 %" in verdict.evidence[1]


def test_a_device_that_idles_while_its_thread_waits_for_it_again_and_again(writer, tmp_path):
    """Launches after each wait would have happened during it. Code is a cause beside it, and so are
    the kernels that it waits for meanwhile."""
    key = writer.process(42, "train")
    for number in range(50):
        run(writer, key, 100 * number, 100 * number + 1, weight=50.0, source="event")
    writer.calls(key, 42, "cuStreamSynchronize", count=1000, seconds=2.4, op="sync")
    writer.calls(key, 42, "cuLaunchKernel", count=1000, seconds=1.0, op="launch")
    writer.on_cpu(key, 42, writer.stack("main", "step"), 130)
    (verdict,) = explain(opened(writer, tmp_path)).verdicts
    found = {one.key: one.share for one in verdict.bounds}

    expected = {Bound.HOST: 0.26, Bound.SYNCHRONIZATION: 0.2, Bound.COMPUTE: 0.5}
    assert found == pytest.approx(expected, abs=0.02)
    assert list(found) == list(expected)


def test_threads_that_wait_for_one_another_are_reported_together(writer, tmp_path):
    key = writer.process(
        42, "train", threads=[{"tid": 42, "comm": "train"}, {"tid": 43, "comm": "autograd"}]
    )
    for tid, other in ((42, 43), (43, 42)):
        writer.calls(key, tid, "cuLaunchKernel", count=1000, seconds=2.0, op="launch")
        writer.wait(key, tid, "futex", 2.4, count=100, waker=(42, other))
    (verdict,) = explain(opened(writer, tmp_path)).verdicts

    assert verdict.bound == Bound.LAUNCH
    assert verdict.bounds[0].share == pytest.approx(0.8, abs=0.01)


def test_runs_timed_by_events_begin_when_the_stream_is_free(writer, tmp_path):
    """Ten are asked for at once and take 5 ms each; what another stream runs goes on beside."""
    key = writer.process(42, "train")
    for number in range(10):
        run(writer, key, 0.01 * number, 0.01 * number + 5, source="event", stream=1)
    run(writer, key, 0, 2, source="event", stream=2)
    run(writer, key, 60, 61, source="event", stream=1)
    timeline = opened(writer, tmp_path)
    device = timeline.device

    ends = sorted(round((end - START_NS) / MS, 2) for end in device.end_ns.tolist())
    assert ends == [2, *range(5, 55, 5), 61]
    verdict = explain(timeline).verdicts[0]
    assert verdict.computing == pytest.approx(51 / 61, abs=0.001)


def test_waits_that_the_host_timed_are_no_work_of_the_device(writer, tmp_path):
    key = writer.process(42, "train")
    for number in range(20):
        run(writer, key, 10 * number, 10 * number + 1, source="event")
        run(writer, key, 10 * number, 10 * number + 9, kind="sync", name="(sync)", source="host")
    timeline = opened(writer, tmp_path)

    assert len(timeline.device) == 20
    assert explain(timeline).verdicts[0].computing == pytest.approx(20 / 191, abs=0.001)


NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def test_a_device_that_waits_in_collectives_is_bound_by_communication(writer, tmp_path):
    """Made by hand in the shape of NCCL's kernels: no second GPU was at hand."""
    key = writer.process(42, "train")
    for device in (0, 1):
        for step in range(40):
            at = 10 * step
            late = 4 * device  # the second one computes longer, so the first one waits in NCCL
            run(writer, key, at, at + 5 + late, device=device)
            run(writer, key, at + 5 + late, at + 9.9, device=device, name=NCCL, stream=9)
    first, second = explain(opened(writer, tmp_path)).verdicts

    assert first.bound == Bound.COMMUNICATION
    assert first.causes[0].share == pytest.approx(0.49, abs=0.01)
    assert "GPU1 came last to 100 % of them" in first.causes[0].facts
    assert second.bounds[0].key == Bound.COMPUTE


def test_a_collective_under_kernels_is_no_stall(writer, tmp_path):
    key = writer.process(42, "train")
    for step in range(40):
        run(writer, key, 10 * step, 10 * step + 9.9)
        run(writer, key, 10 * step + 1, 10 * step + 9, name=NCCL, stream=9)
    (verdict,) = explain(opened(writer, tmp_path)).verdicts

    assert verdict.bound == Bound.COMPUTE
    assert Cause.COLLECTIVE not in {cause.key for cause in verdict.causes}


def clocks(writer: Writer, reason: str | tuple[str, ...], mhz: float, gpu: int = 0) -> None:
    """What NVML reports of a device that is held down to a clock, with 1,980 MHz its highest."""
    reasons = tuple(filter(None, (reason,))) if isinstance(reason, str) else reason

    def point(series: str, at_s: float, value: float, **labels: str) -> None:
        full = {
            "hw.id": f"GPU-{gpu}",
            **{name.replace("__", "."): one for name, one in labels.items()},
        }
        time_ns = START_NS + round(at_s * 1e9)
        row = {"time_ns": time_ns, "series": series, "labels": json.dumps(full), "value": value}
        writer.rows["metric"].append(row)

    point("sonde.gpu.info", 0, 1, sonde__gpu__index=str(gpu))
    point("sonde.gpu.clock.limit", 0, 1980e6, sonde__gpu__clock__domain="sm")
    for other in {"software_power_cap", "hardware_thermal", *reasons}:
        point("sonde.gpu.throttled", 0, other in reasons, sonde__gpu__throttle__reason=other)
    for tick in range(100):
        point("sonde.gpu.clock", tick / 100, mhz * 1e6, sonde__gpu__clock__domain="sm")


@pytest.mark.parametrize(
    ("reason", "next_step"),
    [
        ("software_power_cap", "power limit"),
        ("hardware_thermal", "cool the GPU"),
        ("software_thermal", "cool the GPU"),
        ("hardware_power_brake", "power supplies and the power budget"),
        ("hardware_slowdown", "does not report what"),
        ("board_limit", "the voltage that the board may use"),
        ("reliability", "the voltage that the board may use"),
        ("of_a_later_driver", "look up the reason"),
        # The driver sets the sum beside the reason.
        (("hardware_slowdown", "hardware_thermal"), "cool the GPU"),
        (("hardware_slowdown", "hardware_power_brake"), "power supplies and the power budget"),
    ],
)
def test_a_device_whose_clocks_are_held_down_is_throttled(reason, next_step, writer, tmp_path):
    """Made by hand, with the series that NVML's readings have."""
    key = writer.process(42, "train")
    for step in range(100):
        run(writer, key, 10 * step, 10 * step + 9.9, name="gemm")
    clocks(writer, reason, 1200)
    (verdict,) = explain(opened(writer, tmp_path)).verdicts

    assert verdict.bound == Bound.THROTTLED
    assert verdict.bounds[0].share == pytest.approx(0.99 * (1 - 1200 / 1980), abs=0.01)
    assert next_step in verdict.advice[0].text
    assert any("1,200 of 1,980 MHz" in line for line in verdict.evidence)


@pytest.mark.parametrize(
    ("reason", "mhz", "kernel"),
    [
        ("", 1200, "gemm"),  # low, but nothing holds it down: the driver's own choice
        ("sync_boost", 1200, "gemm"),  # the clock of the slowest GPU of a group, as was asked for
        ("display_clock", 1200, "gemm"),
        ("application_clocks", 1200, "gemm"),
        ("software_power_cap", 1800, "gemm"),  # held down by little
        ("software_power_cap", 1200, "vectorized_elementwise_kernel"),  # memory sets the pace
    ],
)
def test_clocks_that_cost_little_are_no_verdict(reason, mhz, kernel, writer, tmp_path):
    key = writer.process(42, "train")
    for step in range(100):
        run(writer, key, 10 * step, 10 * step + 9.9, name=kernel)
    clocks(writer, reason, mhz)
    (verdict,) = explain(opened(writer, tmp_path)).verdicts

    assert verdict.bound in (Bound.COMPUTE, Bound.MEMORY)
    throttled = reason == "software_power_cap"
    assert any("clocks throttled" in line for line in verdict.evidence) == throttled


def holds(writer: Writer, gpu: int, pid: int) -> None:
    """What NVML reports of a process that uses a GPU."""
    me = {"hw.id": f"GPU-{gpu}"}
    for series, more in (
        ("sonde.gpu.info", {"sonde.gpu.index": str(gpu)}),
        ("sonde.process.gpu.memory", {"process.pid": str(pid), "sonde.process.start": "1"}),
    ):
        row = {"series": series, "labels": json.dumps(me | more), "value": 1.0}
        writer.rows["metric"].append({"time_ns": START_NS, **row})


def test_processes_that_each_see_one_gpu_are_no_tenants_of_one(writer, tmp_path):
    """Each calls its own GPU number 0, as CUDA_VISIBLE_DEVICES has it."""
    for number, pid in enumerate((42, 43)):
        key = writer.process(pid, f"train-{number}")
        holds(writer, number, pid)
        for step in range(100):
            run(writer, key, 10 * step + 5 * number, 10 * step + 5 * number + 4.5, tid=pid)
    timeline = opened(writer, tmp_path)
    verdicts = explain(timeline).verdicts

    streams = [one for one in timeline.tracks if one.kind == TrackKind.STREAM]
    assert sorted((one.device, one.pid) for one in streams) == [(0, 42), (1, 43)]
    assert len(verdicts) == 2
    assert not any(cause.key == Cause.GPU_CONTENTION for one in verdicts for cause in one.causes)


@pytest.mark.parametrize(("held_down", "bound"), [(0, Bound.COMPUTE), (1, Bound.THROTTLED)])
def test_the_clocks_of_the_gpu_that_a_process_uses_are_its(held_down, bound, writer, tmp_path):
    key = writer.process(42, "train")
    holds(writer, 1, 42)
    for step in range(100):
        run(writer, key, 10 * step, 10 * step + 9.9)
    clocks(writer, "software_power_cap", 1200, gpu=held_down)
    (verdict,) = explain(opened(writer, tmp_path)).verdicts

    assert verdict.bound == bound


@pytest.mark.parametrize(
    ("held_down", "ids", "holder", "bound", "assumed"),
    [
        (3, {0: ["0000:1B:00.0"]}, 0, Bound.THROTTLED, False),  # both name its PCI address
        (0, {0: ["0000:1B:00.0"]}, 0, "compute", False),
        (3, {}, PID, Bound.THROTTLED, False),  # the capture knows which GPU holds its memory
        (0, {}, PID, "compute", False),
        (0, {}, 0, Bound.THROTTLED, True),  # nothing names it: equal numbers, and a note
        (3, {}, 0, "compute", True),
    ],
)
def test_a_trace_is_joined_with_the_clocks_of_its_own_gpu(
    held_down, ids, holder, bound, assumed, writer, tmp_path
):
    """A trace that calls its GPU number 0, beside a capture of a machine with several."""
    scene = Scene()
    for step in range(100):
        scene.kernel(10_000 * step + 10, 10_000 * step + 9_900, name="gemm")
    writer.process(PID, "train")
    for gpu in (0, 3):
        clocks(writer, "software_power_cap" if gpu == held_down else "", 1200, gpu=gpu)
    labels = {"hw.id": "GPU-3", "sonde.gpu.index": "3", "sonde.gpu.pci.address": "00000000:1b:00.0"}
    row = {"time_ns": START_NS, "series": "sonde.gpu.info", "labels": json.dumps(labels)}
    writer.rows["metric"].append({**row, "value": 1.0})
    if holder:
        holds(writer, 3, holder)
    trace = scene.timeline(wall_offset_ns=WALL_OFFSET_NS + START_NS, device_ids=ids)
    explained = explain(merged(trace, opened(writer, tmp_path)))

    assert explained.verdicts[0].bound == bound
    assert any("assumed" in note for note in explained.notes) == assumed


@pytest.mark.parametrize(
    ("gpus", "ordinals", "indices"),
    [
        ([], [0, 1], [0, 1]),  # nothing identifies them
        ([5], [0, 0], [5, 5]),
        ([4, 5, 6, 7], [0, 1, 2, 3], [4, 5, 6, 7]),
        ([0, 3], [3, 0], [3, 0]),  # it sees all, and launched on two
        ([1, 3], [1], [1]),  # it sees all, as far as is known
        ([4, 5], [1], [5]),
        ([0], [0, 2], [0, 2]),  # they contradict: its own word
    ],
)
def test_ordinals_are_distinguished_from_indices(gpus, ordinals, indices):
    known = index_of(gpus, ordinals)

    assert [known[one] for one in ordinals] == indices


def test_waits_name_who_ended_them(writer, tmp_path):
    key = writer.process(42, "train")
    span(writer, key, 1, 31, "blocked", "futex", waker_pid=42, waker_tid=77)
    span(writer, key, 41, 51, "blocked", "read")
    timeline = opened(writer, tmp_path)

    first, second = timeline.states.waker.tolist()
    assert timeline.tracks[first - 1].number == 77
    assert second == 0


def test_a_verdict_from_windows_has_its_uncertainty_and_what_it_cannot_know(writer, tmp_path):
    """20 windows of 100 ms in 5 s; how long the device waits for a lock differs from one to the
    next."""
    key = writer.process(42, "train")
    rng = random.Random(4)
    for window in range(20):
        share = rng.uniform(0.3, 0.7)
        for step in range(10):
            at = 250 * window + 10 * step
            run(writer, key, at, at + 10 * share, window=window + 1, weight=10.0)
            span(writer, key, at + 10 * share + 0.1, at + 9.9, "blocked", "futex")
    explanation = explain(opened(writer, tmp_path))
    sampling = explanation.verdicts[0].sampling

    assert (sampling.windows, sampling.whole_ns) == (20, 5_000_000_000)
    # Uniform over 0.4: a deviation of 0.115, over 20 windows, with Student's 2.09.
    assert sampling.half_width[Bound.LOCK] == pytest.approx(2.09 * 0.115 / 20**0.5, rel=0.35)
    assert sampling.half_width["computing"] == pytest.approx(
        sampling.half_width[Bound.LOCK], rel=0.1
    )
    assert "every 250 ms" in sampling.cannot[0]
    page = text.render(explanation)
    assert "seen in 20 windows, 38 % of 5.00 s: computed ±" in page
    assert "launch times are not known" in page
    assert json.loads(text.to_json(explanation))["verdicts"][0]["sampling"]["windows"] == 20


def test_intervals_from_windows_hold_the_truth(writer):
    """Of 200 programs with bursts, seen in 20 windows each, at least nine in ten of the
    intervals are right."""
    right = 0
    for seed in range(200):
        rng = random.Random(seed)
        level, scene, truth, t = rng.uniform(0.2, 0.8), Scene(), 0.0, 1_000_000.0
        windows = []
        for block in range(100):
            busy = min(0.95, max(0.05, rng.gauss(level, 0.15)))
            truth += busy / 100
            if block % 5 == 2:
                windows.append((round(t * 1000), round((t + 10_000) * 1000)))
            for _ in range(10):
                scene.kernel(t, t + 1000 * busy)
                t += 1000
        timeline = scene.timeline(windows_ns=windows)
        verdict = explain(timeline).verdicts[0]
        half = verdict.sampling.half_width["computing"]
        right += abs(verdict.computing - truth) <= half

    assert right >= 180


def test_what_was_traced_whole_has_no_interval(writer, tmp_path):
    key = writer.process(42, "train")
    for step in range(400):
        run(writer, key, 10 * step, 10 * step + 5)
    (verdict,) = explain(opened(writer, tmp_path)).verdicts

    assert verdict.sampling is None


def test_waits_without_a_stack_are_what_those_alike_are():
    """Stacks are taken of some waits alone, more rarely on a busy machine."""
    queue, lock = WaitDetail.QUEUE, WaitDetail.GIL
    detail = np.array([queue, 0, queue, 0, lock, queue, 0, 0], np.uint8)
    alike = np.array([1, 1, 1, 2, 3, 3, 3, 1])
    has_stack = np.array([1, 0, 1, 0, 1, 1, 0, 1], bool)
    ns = np.array([90, 5, 9, 5, 60, 40, 5, 1])

    found = of_capture._by_those_alike(detail, alike, ns, has_stack)

    # Of the fourth's kind none has a stack, those of the seventh's differ.
    assert found.tolist() == [queue, queue, queue, 0, lock, queue, 0, 0]
    nothing = np.zeros(0, np.int64)
    empty = of_capture._by_those_alike(nothing.astype(np.uint8), nothing, nothing, nothing == 1)
    assert not len(empty)
