# SPDX-License-Identifier: Apache-2.0
"""Totals of what devices ran, from runs that were chosen one by one; and whose device is whose."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from captures import START_NS, Writer, filled
from sonde.model.timeline import TotalKind, WaitDetail
from sonde.query.device_counters import device_counters, device_ids, gpus_of_processes
from sonde.recording.timelines import open_timeline

US = 1_000
TIME_SLICE_NS = 1_000_000  # of another process, at the least


@pytest.fixture
def totals(tmp_path):
    """By (name): (ns, count) of the totals of runs, each (length in ns, grid), of weight 10."""

    def made(lengths, grid="512,1,1", weight=10.0, other=77, grids=(), **more):
        writer = Writer(seconds=5)
        key = writer.process(42, "train")
        gpu = {"hw.id": "GPU-1"}
        use = gpu | {"process.pid": str(other), "sonde.gpu.engine": "sm"}
        for series, labels in (
            ("sonde.gpu.info", gpu | {"sonde.gpu.index": "0"}),
            ("sonde.process.gpu.memory", gpu | {"process.pid": "42"}),
            ("sonde.process.gpu.utilization", use),
        ):
            row = {"series": series, "labels": json.dumps(labels), "value": 0.5}
            writer.rows["metric"].append({"time_ns": START_NS, **row})
        for number, length in enumerate(lengths):
            start = START_NS + 10_000_000 * number
            row = {"kind": "kernel", "name": "gemm", "weight": weight, "source": "event", "tid": 42}
            times = {"start_time_ns": start, "end_time_ns": start + length}
            times["grid"] = grids[number] if grids else grid
            writer.rows["device_run"].append({**key, **row, **times, **more})
        timeline = open_timeline([writer.write(tmp_path / "a.sonde")])
        kinds = (TotalKind.RUN, TotalKind.INTERRUPTED, TotalKind.UNDERFILLED)
        return {
            one.name if one.kind == TotalKind.RUN else one.kind: (one.ns, one.count)
            for one in timeline.totals
            if one.kind in kinds
        }

    return made


def test_a_run_counts_for_as_many_as_its_weight(totals):
    assert totals([50 * US] * 30) == {"gemm": (30 * 10 * 50 * US, 300)}


@pytest.mark.parametrize(("blocks", "few"), [(1, True), (16, True), (17, False)])
def test_kernels_of_few_blocks_leave_most_of_a_device_idle(totals, blocks, few):
    found = totals([50 * US] * 30, grid=f"{blocks},1,1")
    assert found.get(TotalKind.UNDERFILLED) == ((30 * 10 * 50 * US, 0) if few else None)


def test_a_grid_that_is_not_known_is_not_small(totals):
    assert set(totals([50 * US] * 30, grid="")) == {"gemm"}
    assert set(totals([50 * US] * 30, grid="1,1,1", kind="copy")) == {"gemm"}


def test_a_kernel_was_held_up_where_it_takes_a_turn_more_than_usual(totals):
    usual = [50 * US] * 36
    assert set(totals([*usual, 50 * US + TIME_SLICE_NS])) == {"gemm"}
    found = totals([*usual, 50 * US + TIME_SLICE_NS + 1])
    assert found[TotalKind.INTERRUPTED] == (10 * (TIME_SLICE_NS + 1), 0)
    assert found["gemm"] == (37 * 10 * 50 * US, 370)


def test_kernels_take_as_long_as_they_take_where_no_other_process_used_the_device(totals):
    """An evaluation's batches are larger than those of steps."""
    assert set(totals([50 * US] * 36 + [5000 * US], other=42)) == {"gemm"}


def test_four_times_the_usual_is_usual_and_more_is_contention(totals):
    usual = [1000 * US] * 36
    assert set(totals([*usual, 4000 * US])) == {"gemm"}
    assert totals([*usual, 4001 * US])[TotalKind.INTERRUPTED] == (10 * 3001 * US, 0)


def test_each_grid_of_a_kernel_has_its_own_usual_length(totals):
    """The batches of an evaluation are larger, also where another process used the device."""
    lengths, grids = [50 * US] * 30 + [5000 * US] * 25, ["512,1,1"] * 30 + ["65536,1,1"] * 25
    assert set(totals(lengths, grids=grids)) == {"gemm"}
    held_up = totals([*lengths, 15000 * US], grids=[*grids, "65536,1,1"])
    assert set(held_up) == {"gemm"}, "three times the usual"
    held_up = totals([*lengths, 30000 * US], grids=[*grids, "65536,1,1"])
    assert held_up[TotalKind.INTERRUPTED] == (10 * 25000 * US, 0)


def test_what_is_mostly_so_is_usual(totals):
    """The median is: where more than half are long, nothing is beyond."""
    assert TotalKind.INTERRUPTED in totals([50 * US] * 21 + [5000 * US] * 20)
    assert set(totals([50 * US] * 20 + [5000 * US] * 21)) == {"gemm"}
    assert set(totals([50 * US] * 18 + [5000 * US])) == {"gemm"}, "too few to know"


def test_a_wait_is_parted_by_what_its_stacks_were_in(tmp_path):
    writer = Writer(seconds=5)
    key = writer.process(42, "train")
    writer.wait(key, 42, "futex", 3.0, count=600, stack=writer.stack("main", "take_gil"))
    writer.wait(key, 42, "futex", 1.0, count=200, stack=writer.stack("main", "lock"))
    timeline = open_timeline([writer.write(tmp_path / "a.sonde")])
    found = {
        one.wait_detail: (one.ns, one.count) for one in timeline.totals if one.kind == "blocked"
    }
    assert found[WaitDetail.GIL] == (3_000_000_000, 600)
    assert found[WaitDetail.NONE] == (1_000_000_000, 200)


# ---- devices and the processes that use them ----


def metric(*points):
    """(time, series, labels, value)."""
    rows = [
        {"time_ns": at, "series": series, "labels": json.dumps(labels), "value": value}
        for at, series, labels, value in points
    ]
    return pa.table(filled("metric", rows))


def info(index):
    labels = {"hw.id": f"GPU-{index}", "sonde.gpu.index": str(index)}
    return (0, "sonde.gpu.info", labels, 1.0)


def held(gpu, pid):
    labels = {"hw.id": gpu, "process.pid": pid}
    return (0, "sonde.process.gpu.memory", labels, 1.0)


def test_a_process_uses_the_devices_that_hold_its_memory():
    table = metric(
        *(info(0), info(1), held("GPU-1", "42"), held("GPU-0", "42"), held("GPU-0", "43")),
        *(held("GPU-7", "44"), held("GPU-0", "x"), held("GPU-0", "12345678901")),
    )
    assert gpus_of_processes(table) == {42: [0, 1], 43: [0]}


def test_every_device_is_known_by_its_index():
    assert device_ids(metric(info(0), info(1))) == {0: ("GPU-0",), 1: ("GPU-1",)}


def test_counters_are_those_of_devices_with_an_index_in_order_of_time():
    power = [(at, "hw.power", {"hw.id": "GPU-1"}, value) for at, value in ((9, 3.0), (4, 2.0))]
    table = metric(info(1), *power, (5, "hw.power", {"hw.id": "GPU-8"}, 1.0))
    (found,) = device_counters(table)
    assert (found.device, found.name) == (1, "hw.power")
    assert (list(found.time_ns), list(found.value)) == ([4, 9], [2.0, 3.0])
