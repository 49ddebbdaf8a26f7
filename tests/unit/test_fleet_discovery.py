# SPDX-License-Identifier: Apache-2.0
"""Unknown kernels: seen when many run them, by who has the name, and otherwise not at all."""

import pytest

from sonde.errors import UsageError
from sonde.fleet.buckets import BucketSpace
from sonde.fleet.discovery import NO_UNKNOWN_KERNEL, bucket_of, discover, threshold_of
from sonde.fleet.evaluation.local_deployment import LocalDeployment, small_task
from sonde.fleet.sampling import KernelRecord, Sampler


def test_a_common_unknown_kernel_is_found_and_a_rare_one_is_not(tmp_path):
    fleet = LocalDeployment(tmp_path, small_task(buckets=512), ["a"] * 80)
    kernels = ["new_mystery_op"] * 60 + ["one_tenants_secret"] + [None] * 19
    fleet.send(*(fleet.report(n, [bucket_of(fleet.task, k)]) for n, k in enumerate(kernels)))
    fleet.close_batch()
    release = fleet.collect()
    found = discover(fleet.task, release, ["gemm_v9", "new_mystery_op", "one_tenants_secret"])
    assert [f.names for f in found] == [("new_mystery_op",)]
    assert found[0].count == pytest.approx(60, abs=20)
    assert [f.names for f in discover(fleet.task, release, [])] == [()]
    fleet.close()


def test_the_threshold_grows_with_what_a_unit_may_add():
    assert threshold_of(small_task(scale=5.0)) > threshold_of(small_task(scale=1.0)) > 10
    with pytest.raises(UsageError):
        threshold_of(small_task(kind="plain"))


def test_the_sampler_keeps_an_unknown_name_to_itself():
    space = BucketSpace()
    for name, kept in (("mystery_op", "mystery_op"), ("sgemm", None)):
        sampler = Sampler(space, 0, 100, 1)
        sampler.observe(KernelRecord(name, 0, 100))
        assert sampler.unclassified_kernel() == kept
    assert Sampler(space, 0, 100, 1).unclassified_kernel() is None
    assert bucket_of(small_task(), None) == NO_UNKNOWN_KERNEL
