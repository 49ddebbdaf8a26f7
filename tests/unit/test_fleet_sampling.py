# SPDX-License-Identifier: Apache-2.0
"""On the node: instants are fair, names become classes, and only an index is left."""

import json
import random
from collections import Counter
from dataclasses import replace

import pytest

from sonde.errors import UsageError
from sonde.fleet.buckets import BucketSpace
from sonde.fleet.classify import IDLE, OTHER, Classes
from sonde.fleet.evaluation.local_deployment import small_task
from sonde.fleet.sampling import KernelRecord, Sampler, read_records

CLASSES = Classes.shipped()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm>", "gemm"),
        ("flash_fwd_splitkv_kernel", "attention"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "collective"),
        ("multi_tensor_apply_kernel<AdamFunctor>", "optimizer"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>", "elementwise"),
        ("cunn_SoftMaxForward", "softmax"),
        ("layer_norm_kernel", "normalisation"),
        ("implicit_convolve_sgemm", "convolution"),
        ("CUDA memcpy HtoD", "copy"),
        ("my_secret_kernel_v7", "other"),
    ],
)
def test_kernel_names_become_classes(name, kind):
    assert CLASSES.kernel_name(CLASSES.kernel(name)) == kind


def application(**mix):
    numbers = {CLASSES.kernels.index(name): share for name, share in mix.items()}
    return CLASSES.application_name(CLASSES.application(numbers))


def test_a_mix_becomes_an_application():
    assert application(gemm=0.6, attention=0.1, optimizer=0.05) == "llm_training"
    assert application(gemm=0.6, attention=0.1, kv_cache=0.02) == "llm_serving"
    assert application(convolution=0.6, optimizer=0.05) == "vision_training"
    assert application(other=1.0) == "other"


def test_the_tables_name_only_classes_that_exist():
    for least in CLASSES.conditions:
        assert set(least) <= set(CLASSES.kernels)
    assert len(CLASSES.kernels) <= 64
    assert len(CLASSES.applications) <= 64


def test_samples_are_shares_of_time():
    space = BucketSpace()
    sampler = Sampler(space, 0, 1_000_000, 20_000, random.Random(1))
    sampler.observe(KernelRecord("gemm", 0, 300_000))
    sampler.observe(KernelRecord("softmax", 300_000, 100_000))
    counts = Counter(space.label(bucket)[1] for bucket in sampler.buckets())
    assert counts["gemm"] / 20_000 == pytest.approx(0.3, abs=0.015)
    assert counts["softmax"] / 20_000 == pytest.approx(0.1, abs=0.01)
    assert counts["idle"] / 20_000 == pytest.approx(0.6, abs=0.015)


def test_kernels_that_overlap_share_the_instant():
    space = BucketSpace()
    sampler = Sampler(space, 0, 1000, 10_000, random.Random(2))
    for name in ("gemm", "softmax", "fft"):
        sampler.observe(KernelRecord(name, 0, 1000))
    counts = Counter(space.label(bucket)[1] for bucket in sampler.buckets())
    assert all(3000 < counts[name] < 3700 for name in ("gemm", "softmax", "fft"))


def test_a_node_that_did_nothing_reports_idle():
    space = BucketSpace()
    assert Sampler(space, 0, 10, 3).buckets() == [space.index(IDLE, IDLE)] * 3


def test_activity_is_cut_into_levels():
    space = BucketSpace(8, 8, 4)
    assert space.size == 256
    assert space.label(space.index(2, 3, 0.6)) == (
        CLASSES.application_name(2),
        CLASSES.kernel_name(3),
        "50%-75%",
    )
    assert space.index(2, 3, 1.0) == space.index(2, 3, 0.8)
    assert space.index(99, 99) == space.index(OTHER, OTHER)


@pytest.mark.parametrize("grid", [(24, 1, 1), (1, 24, 1), (1, 1, 24), (2, 3, 4)])
def test_a_class_outside_a_grid_of_few_stays_in_the_grid_and_in_its_row(grid):
    space = BucketSpace(*grid)
    assert {space.index(99, 99), space.index(1, 99), space.index(99, 1)} <= set(range(space.size))
    for application in range(space.applications):
        first = space.index(application, 0)
        assert first <= space.index(application, 99) < first + space.kernels * space.levels


def test_a_grid_has_64_classes_each_way_unless_the_task_sets_another_number():
    assert (BucketSpace().size, BucketSpace().index(63, 63)) == (4096, 4095)
    assert BucketSpace().label(0)[2] == ""
    task = small_task(24)
    assert BucketSpace.of_task(replace(task, space={})) == BucketSpace(24, 1, 1)
    grid = {"applications": 2, "kernels": 3, "levels": 4}
    assert BucketSpace.of_task(replace(task, space=grid)) == BucketSpace(2, 3, 4)
    for wrong in ({"levels": 5}, {"levels": 0}, {"kernels": -3}, {"kernels": 3.0}, {"rows": 1}):
        with pytest.raises(UsageError):
            BucketSpace.of_task(replace(task, space={**grid, **wrong}))
    # A single class each way, of which one is as large as the task.
    whole = {"applications": 1, "kernels": 24, "levels": 1}
    assert BucketSpace.of_task(replace(task, space=whole)).size == 24


@pytest.mark.parametrize(("busy_ns", "idle"), [(4, True), (5, False), (30, False)])
def test_a_device_busy_for_less_than_a_twentieth_has_no_application(busy_ns, idle):
    space = BucketSpace()
    sampler = Sampler(space, 0, 100, 50, random.Random(3))
    sampler.observe(KernelRecord("gemm", 0, busy_ns))
    mine = [space.label(bucket) for bucket in sampler.buckets()]
    idle_name = CLASSES.application_name(IDLE)
    assert any(kernel == "gemm" for _, kernel, _ in mine)
    assert {name == idle_name for name, kernel, _ in mine if kernel == "gemm"} == {idle}


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_records_are_read_from_csv_and_json_lines(tmp_path, suffix):
    path = tmp_path / f"kernels{suffix}"
    if suffix == ".csv":
        path.write_text("name,start_ns,duration_ns,activity\ngemm,1,2,0.5\n")
    else:
        row = {"name": "gemm", "start_ns": 1, "duration_ns": 2, "activity": 0.5}
        path.write_text(json.dumps(row) + "\n")
    assert list(read_records(path)) == [KernelRecord("gemm", 1, 2, 0.5)]


@pytest.mark.parametrize("content", ["a,b\n1,2\n", "name,start_ns,duration_ns\ngemm,x,2\n"])
def test_foreign_files_are_refused_with_what_is_needed(tmp_path, content):
    path = tmp_path / "kernels.csv"
    path.write_text(content)
    with pytest.raises(UsageError, match="no kernel records"):
        list(read_records(path))
    with pytest.raises(UsageError, match="cannot read"):
        list(read_records(tmp_path / "none.csv"))
