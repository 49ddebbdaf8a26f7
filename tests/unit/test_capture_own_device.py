# SPDX-License-Identifier: Apache-2.0
"""Verdicts on captures at the default budget, by what the device did and who used it."""

from __future__ import annotations

import json

import pytest

from captures import START_NS, Writer
from sonde.model.causes import Bound, Cause
from training_capture import MS, on_cpu, shares, timed_runs

STEP = ("step", "[python]", "train.py", 88, "python")
ADD = ("at::_ops::add::call", "libtorch_cpu.so")
LAUNCH = ("cudaLaunchKernel", "libcudart.so.13")
DRIVER = ("", "libcuda.so.580.1")
EVAL = ("_PyEval_EvalFrameDefault", "python3.12")


@pytest.mark.parametrize(
    ("direction", "bound"), [("h2d", Bound.COPY), ("d2h", Bound.SYNCHRONIZATION)]
)
def test_waits_behind_copies_to_the_device_are_the_copies(writer, key, explained, direction, bound):
    """To the device it is data on its way, from it a result that is read."""
    copies = {"count": 9000, "moved": 36_000, "direction": direction}
    writer.calls(key, 42, "cuMemcpyAsync", seconds=0.5, op="copy", **copies)
    writer.calls(key, 42, "cuStreamSynchronize", count=9000, seconds=2.5, op="sync")
    timed_runs(writer, key, 0.01)
    for function, seconds in (("cuMemcpyAsync", 0.5), ("cuStreamSynchronize", 2.5)):
        on_cpu(writer, key, seconds, "main", "step", (function, "libcuda.so.580.1"))
    on_cpu(writer, key, 1.2, "main", "step", ("cuLaunchKernel", "libcuda.so.580.1"))

    assert explained().bounds[0].key == bound


def test_copies_are_known_by_what_all_moved_and_how_fast_some_were(writer, key, explained):
    """One copy of 200 MB was timed, 4 ms; 240 GB were asked for: 4.8 s of 5."""
    writer.calls(
        key, 42, "cuMemcpyAsync", count=1200, seconds=0.01, op="copy",
        moved=240_000_000_000, direction="h2d",
    )  # fmt: skip
    timed_runs(writer, key, [4.0, 4.0], kind="copy", direction="h2d", bytes=200_000_000, weight=9.0)
    timed_runs(writer, key, 0.01, count=2)
    on_cpu(writer, key, 4.9, "main", "step", "cuLaunchKernel", "sched_yield")
    verdict = explained()

    assert verdict.bound == Bound.COPY
    assert shares(verdict)[Cause.COPY] == pytest.approx(0.96, abs=0.03)


def counted(writer: Writer, pid: int, **shares_of: float) -> None:
    """A GPU's own counters once a second: `dram`, `tensor`."""
    gpu = {"hw.id": "GPU-1"}
    rows = [
        ("sonde.gpu.info", gpu | {"sonde.gpu.index": "0"}, 1.0),
        ("sonde.process.gpu.memory", gpu | {"process.pid": pid}, 1e9),
        ("sonde.gpu.dram.active", gpu, shares_of["dram"]),
        ("sonde.gpu.tensor.active", gpu | {"sonde.gpu.precision": "any"}, shares_of["tensor"]),
    ]
    for second in range(1, 5):
        for series, labels, value in rows:
            point = {"series": series, "labels": json.dumps(labels), "value": value}
            writer.rows["metric"].append({"time_ns": START_NS + second * 1000 * MS, **point})


@pytest.mark.parametrize(
    ("dram", "tensor", "bound"),
    [(0.8, 0.1, "memory"), (0.2, 0.7, "compute"), (0.3, 0.3, "kernels")],
)
def test_what_limits_replays_is_known_by_the_devices_counters(
    writer, key, explained, dram, tensor, bound
):
    timed_runs(writer, key, 4.8, kind="replay", name="(graph)")
    counted(writer, 42, dram=dram, tensor=tensor)
    verdict = explained()

    assert verdict.bound == bound
    assert any("counters" in line for line in verdict.evidence) == (bound != "kernels")


def test_counters_at_zero_of_a_program_that_only_copies(writer, key, explained):
    timed_runs(writer, key, 0.5, kind="copy", direction="h2d", bytes=1_000_000)
    counted(writer, 42, dram=0.0, tensor=0.0)
    on_cpu(writer, key, 4.9, "main", "step")

    assert explained().bound in (Bound.COPY, Bound.HOST, Bound.LAUNCH)


@pytest.mark.parametrize(("most", "bound"), [(4.5, Bound.SYNCHRONIZATION), (2.0, Bound.LOCK)])
def test_a_futex_that_the_drivers_thread_ends_is_a_wait_for_the_device(
    writer, explained, most, bound
):
    """From thread to thread, as in XLA; where others end more of it, it is a lock."""
    threads = [{"tid": tid, "comm": "train"} for tid in (42, 43, 44, 45, 46)]
    key = writer.process(42, "train", threads=threads)
    writer.wait(key, 42, "futex", most, waker=(42, 43))
    for tid in (45, 46):
        writer.wait(key, 42, "futex", (4.5 - most) / 2, waker=(42, tid))
    writer.wait(key, 43, "futex", 4.9, waker=(42, 44))
    writer.wait(key, 44, "poll", 4.9, stack=writer.stack(DRIVER, ("poll", "libc.so.6")))
    timed_runs(writer, key, 2.0)
    on_cpu(writer, key, 0.4, "main", "step")

    assert explained().bounds[0].key == bound


def used(writer: Writer, pid: int, share: float) -> None:
    """A GPU of process 42, which process `pid` used, too, by the driver's reports."""
    gpu = {"hw.id": "GPU-1"}
    tags = gpu | {"process.pid": str(pid), "sonde.gpu.engine": "sm"}
    rows = [
        ("sonde.gpu.info", gpu | {"sonde.gpu.index": "0"}, 1.0),
        ("sonde.process.gpu.memory", gpu | {"process.pid": "42"}, 1e9),
        ("sonde.process.gpu.utilization", tags, share),
    ]
    for second in range(1, 5):
        for series, labels, value in rows:
            point = {"series": series, "labels": json.dumps(labels), "value": value}
            writer.rows["metric"].append({"time_ns": START_NS + second * 1000 * MS, **point})


@pytest.mark.parametrize(
    ("pid", "cause"),
    [(77, Cause.GPU_CONTENTION), (42, None), (0, None)],
)
def test_another_process_is_blamed_for_long_kernels_where_it_used_the_device(
    writer, key, explained, pid, cause
):
    """One in ten takes 2 ms in place of 0.05. Without another process that is what they take."""
    writer.calls(key, 42, "cuStreamSynchronize", count=500, seconds=4.8, op="sync")
    timed_runs(
        writer, key, [2.05 if number % 10 == 0 else 0.05 for number in range(100)], weight=200.0
    )
    if pid:
        used(writer, pid, 0.8 if cause else 1.0)
    verdict = explained()

    if cause:
        assert shares(verdict)[cause] == pytest.approx(0.8, abs=0.04)
    assert verdict.bounds[0].key == (Bound.GPU_CONTENTION if cause else Bound.COMPUTE)
    assert any(f"computed {20 if cause else 100} %" in line for line in verdict.evidence[1:3])
    named = any("process 77 used the device" in line for line in verdict.evidence)
    assert named == (pid == 77)


@pytest.mark.parametrize(("share", "expected"), [(0.0, None), (0.3, 0.3), (0.9, 0.56)])
def test_waits_for_a_device_that_another_process_used_are_that_processs(
    writer, key, explained, share, expected
):
    """Of 76 % in waits the device's own runs explain 20."""
    writer.calls(key, 42, "cuStreamSynchronize", count=500, seconds=3.8, op="sync")
    timed_runs(writer, key, 0.1, weight=200.0)
    on_cpu(writer, key, 1.2, "main", STEP, LAUNCH)
    used(writer, 77, share)

    found = shares(explained()).get(Cause.GPU_CONTENTION)
    assert found == (expected and pytest.approx(expected, abs=0.02))


@pytest.mark.parametrize(
    ("own", "other", "waited", "expected"),
    [
        (0.7, 0.2, 0.7, 0.2),
        (0.7, 0.1, 0.7, 0.07),  # a fifth of the device is idle: what meets a wait held it up
        (0.7, 0.2, 0.1, 0.1),  # no more than the thread waited
    ],
)
def test_what_another_process_has_of_a_full_device_is_contention(
    writer, key, explained, own, other, waited, expected
):
    """Kernels take longer while another process has the device, and explain the waits for them.

    With room for both, the other one has it as often while the thread waits as at other times."""
    writer.calls(key, 42, "cuStreamSynchronize", count=500, seconds=5 * waited, op="sync")
    timed_runs(writer, key, 1.0, weight=100 * own, grid="512,1,1")
    on_cpu(writer, key, 4.9 - 5 * waited, "main", STEP, LAUNCH)
    used(writer, 77, other)

    found = shares(explained()).get(Cause.GPU_CONTENTION)
    assert found == (expected and pytest.approx(expected, abs=0.02))


@pytest.mark.parametrize(("each", "copying"), [(4, False), (1 << 20, True)])
def test_a_copy_that_reads_a_result_is_a_wait_and_no_copy(writer, key, explained, each, copying):
    stack = writer.stack(STEP, ADD)
    copied = {"op": "copy", "direction": "d2h", "moved": 20_000 * each, "stack": stack}
    writer.calls(key, 42, "cuMemcpyDtoHAsync_v2", count=20_000, seconds=1.5, **copied)
    on_cpu(writer, key, 3.4, "main", STEP, LAUNCH)
    timed_runs(writer, key, 0.4, weight=50.0)
    read = {"kind": "copy", "name": "", "direction": "d2h", "bytes": each, "grid": ""}
    timed_runs(writer, key, 0.05, weight=200.0, **read)
    named = {one.key: one.share for one in explained().bounds}

    assert (Bound.COPY in named) == copying
    assert named[Bound.SYNCHRONIZATION] == pytest.approx(0.1 if copying else 0.3, abs=0.01)


@pytest.mark.parametrize(("blocks", "weight", "bound"), [
    ("1,1,1", 95.0, Bound.SMALL_KERNELS), ("1,1,1", 400.0, Bound.COMPUTE),
    ("512,1,1", 95.0, Bound.COMPUTE),
])  # fmt: skip
def test_small_kernels_one_after_another_are_serial(writer, key, explained, blocks, weight, bound):
    """Four at a time are not, nor are those that fill the device."""
    timed_runs(writer, key, 1.0, weight=weight, grid=blocks)

    assert explained().bound == bound


@pytest.mark.parametrize(
    ("code", "waits", "bound", "share"),
    [
        (0.2, 0.05, Bound.HOST, 0.2),  # the rest of the stalls is the wait's
        (0.0, 0.3, Bound.SYNCHRONIZATION, 0.25),
        (0.6, 0.38, Bound.HOST, 0.25),
    ],
)
def test_launches_go_on_while_the_device_computes_and_are_no_stalls_then(
    writer, key, explained, code, waits, bound, share
):
    """The device computes for 75 %: 25 % of the time are stalls, however long the thread works."""
    timed_runs(writer, key, 1.0, weight=75.0, grid="512,1,1")
    writer.calls(key, 42, "cuStreamSynchronize", count=500, seconds=5 * waits, op="sync")
    on_cpu(writer, key, 5 * code, "main", STEP, EVAL)
    on_cpu(writer, key, 5 * (1 - code - waits), "main", STEP, LAUNCH)
    verdict = explained()

    assert verdict.bounds[0].key == bound
    assert verdict.bounds[0].share == pytest.approx(share, abs=0.02)
    assert sum(one.share for one in verdict.causes) == pytest.approx(0.25, abs=0.01)


def test_collectives_that_no_kernel_hides_are_communication(writer, key, explained):
    timed_runs(writer, key, 1.0, weight=40.0, grid="512,1,1")
    timed_runs(writer, key, 1.0, weight=60.0, name="ncclDevKernel_AllGather_RING_LL")
    writer.calls(key, 42, "cuStreamSynchronize", count=500, seconds=4.5, op="sync")
    on_cpu(writer, key, 0.5, "main", STEP, LAUNCH)
    verdict = explained()

    assert verdict.bounds[0].key == Bound.COMMUNICATION
    assert verdict.bounds[0].share == pytest.approx(0.5, abs=0.01)
    assert any("collectives ran for about" in line for line in verdict.evidence)


def test_a_block_in_a_device_call_that_is_not_timed_is_a_wait_for_the_device(
    writer, key, explained
):
    stack = writer.stack(STEP, ADD, ("cuEventSynchronize", "libcuda.so.580.1"), "poll")
    writer.wait(key, 42, "poll", 4.0, stack=stack)
    writer.on_cpu(key, 42, writer.stack(STEP, LAUNCH), 50)
    timed_runs(writer, key, 0.0005)
    verdict = explained()

    assert verdict.computing == pytest.approx(0.8, abs=0.01)
    assert Cause.LOCK not in shares(verdict)
    assert Cause.IO not in shares(verdict)
