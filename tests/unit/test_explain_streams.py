# SPDX-License-Identifier: Apache-2.0
"""What an order costs: of streams that wait for one another, and of a thread that waits before it
launches. Copies within the device's memory are its work, as kernels are."""

from __future__ import annotations

import re

import pytest

from sonde.export.verdict import of_verdict
from sonde.model.causes import Bound, Cause
from training_capture import on_cpu, process, runs, shares

STEP = ("step", "[python]", "train.py", 88, "python")
BRING_IN = ("bring_in", "[python]", "train.py", 30, "python")
ADD = ("at::_ops::add::call", "libtorch_cpu.so")
LAUNCH = ("cudaLaunchKernel", "libcudart.so.13")
SIZE = 8 << 20


def copies(writer, key, share, *, direction="h2d", count=50, calls_s=0.005):
    """Copies that take a share of the 5 s on the device, and their calls."""
    stack = writer.stack(BRING_IN, ADD)
    writer.calls(
        key,
        *(42, "cuMemcpyHtoDAsync_v2"),
        count=20 * count,
        seconds=calls_s,
        op="copy",
        moved=20 * count * SIZE,
        direction=direction,
        stack=stack,
    )
    more = {"kind": "copy", "name": "", "direction": direction, "bytes": SIZE, "grid": ""}
    runs(writer, key, share, count=count, **more)


@pytest.mark.parametrize(
    ("waits", "calls_s", "is_named"), [(1000, 0.005, True), (900, 0.005, False), (1000, 0.2, False)]
)
def test_copies_that_are_queued_ahead_wait_for_kernels_by_the_order_of_streams(
    writer, verdicts, waits, calls_s, is_named
):
    """At least one wait for an event a copy, in calls that take next to no time."""
    key = process(writer)
    stack = writer.stack(BRING_IN, ADD)
    writer.calls(key, 42, "cudaStreamWaitEvent", count=waits, seconds=0.001, op="sync", stack=stack)
    writer.calls(key, 42, "cuEventSynchronize", count=50, seconds=4.2, op="sync")
    runs(writer, key, 0.75)
    copies(writer, key, 0.16, calls_s=calls_s)
    (verdict,) = verdicts()
    named = {one.key: one for one in verdict.bounds}

    assert named[Bound.COPY].share == pytest.approx(0.16, abs=0.05)
    assert (Bound.DEPENDENCY in named) == is_named
    if is_named:
        found = named[Bound.DEPENDENCY]
        assert found.share == pytest.approx(0.16, abs=0.01)
        assert [one.function for one in found.locations] == ["bring_in train.py:30"]
        assert any("queued ahead ran for 16 % of the time" in one for one in verdict.evidence)


def test_small_copies_need_no_order_of_streams(writer, verdicts):
    key = process(writer)
    writer.calls(key, 42, "cudaStreamWaitEvent", count=2000, seconds=0.001, op="sync")
    writer.calls(key, 42, "cuEventSynchronize", count=50, seconds=4.2, op="sync")
    runs(writer, key, 0.82)
    copies(writer, key, 0.02)
    (verdict,) = verdicts()

    assert Bound.DEPENDENCY not in {one.key for one in verdict.bounds}


def test_a_copy_within_the_device_is_work_of_its_memory(writer, verdicts):
    """Few large ones among many small ones: the bytes of those that were not timed mean nothing."""
    key = process(writer)
    item = writer.stack(STEP, ADD)
    writer.calls(key, 42, "cuStreamSynchronize", count=50, seconds=2.0, op="sync", stack=item)
    runs(writer, key, 0.3)
    copies(writer, key, 0.2, direction="d2d")
    copied = {"op": "copy", "direction": "d2d", "moved": 4000 * SIZE}
    writer.calls(key, 42, "cuMemcpyDtoDAsync_v2", count=100, seconds=0.001, **copied)
    on_cpu(writer, key, 2.5, STEP, ADD, LAUNCH)
    (verdict,) = verdicts()

    assert Cause.COPY not in shares(verdict)
    assert "the device computed about 51 % of the time, by runs timed singly" in verdict.evidence
    by_class = {one.bound: one.share for one in verdict.kernel_classes}
    assert by_class[Bound.MEMORY] == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize(
    ("waited", "computed", "both", "kernels"),
    [(1.0, 0.7, True, True), (0.4, 0.7, False, True), (0.4, 0.4, False, False)],
)
def test_a_wait_before_launches_counts_for_both_and_for_the_kernels(
    writer, verdicts, waited, computed, both, kernels
):
    """A step that reads its loss launches into an empty queue: not waiting, fewer launches and
    faster kernels each save it. A device that computes for most of the time is named from waits of
    5 % on, as a cause of stalls is."""
    key = process(writer)
    item = writer.stack(STEP, ADD)
    writer.calls(key, 42, "cuStreamSynchronize", count=50, seconds=waited, op="sync", stack=item)
    on_cpu(writer, key, 4.9 - waited, STEP, ADD, LAUNCH)
    runs(writer, key, computed)
    (verdict,) = verdicts()
    named = {one.key: one.share for one in verdict.bounds}

    if both:
        assert named[Bound.SYNCHRONIZATION] == pytest.approx(0.2, abs=0.02)
        assert named[Bound.LAUNCH] == pytest.approx(0.3, abs=0.02)
    else:
        assert named[Bound.SYNCHRONIZATION] == pytest.approx(0.08, abs=0.02)
        assert named[Bound.LAUNCH] == pytest.approx(0.92 - computed, abs=0.02)
    assert named.get(Bound.COMPUTE) == (pytest.approx(computed, abs=0.02) if kernels else None)


@pytest.mark.parametrize(
    ("grid", "same_code", "share"),
    [("8,1,1", True, 0.3), ("8,1,1", False, 0.1), ("512,1,1", True, None)],
)
def test_small_kernels_of_two_streams_that_overlap_at_times_could_do_so_all_the_time(
    writer, verdicts, grid, same_code, share
):
    """Of 140 % on two streams 100 % ran one way or another, so the longest one's rest is by itself.
    Streams that run the same code as often take as long. Large kernels fill the device."""
    key = process(writer)
    stacks = [writer.stack(STEP, ADD), writer.stack(BRING_IN, ADD)]
    writer.calls(
        *(key, 42, "cudaStreamWaitEvent"), count=500, seconds=0.001, op="sync", stack=stacks[1]
    )
    writer.calls(key, 42, "cuEventSynchronize", count=50, seconds=4.5, op="sync")
    runs(writer, key, 0.9, grid=grid, stack_id=stacks[0])
    runs(writer, key, 0.5, grid=grid, stream=8, stack_id=stacks[0 if same_code else 1])
    (verdict,) = verdicts()
    named = {one.key: one for one in verdict.bounds}

    assert (Bound.DEPENDENCY in named) == (share is not None)
    if share is not None:
        assert named[Bound.DEPENDENCY].share == pytest.approx(share, abs=0.01)
        assert [one.function for one in named[Bound.DEPENDENCY].locations] == [
            "bring_in train.py:30"
        ]


def test_the_text_has_all_kernels_beside_their_classes(writer, verdicts):
    key = process(writer)
    stack = writer.stack(STEP, ADD)
    writer.calls(key, 42, "cuStreamSynchronize", count=50, seconds=3.5, op="sync", stack=stack)
    on_cpu(writer, key, 1.3, STEP)
    runs(writer, key, 0.4)
    runs(writer, key, 0.3, name="elementwise_kernel")
    (verdict,) = verdicts()

    words = r"compute-bound 40 %, memory-bound 30 %, all kernels 7[01] %$"
    assert re.search(words, of_verdict(verdict)[0])
