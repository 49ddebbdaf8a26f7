# SPDX-License-Identifier: Apache-2.0
"""When kernels get a gate: also where only the first launches after a pause find a device idle."""

from __future__ import annotations

from collections import defaultdict

import pytest

from sonde import _native
from sonde.collect.device_time import DeviceTime
from stub_driver import REQUEST, build, find, start, watch

REST = 4


@pytest.fixture(scope="module")
def bursts(tmp_path_factory):
    return build(tmp_path_factory.mktemp("stub"), names=("bursts",)) / "bursts"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("library") / "sonde-inject-0.so"
    path.write_bytes(_native.inject_library())
    return path


def test_the_first_of_a_burst_is_timed_and_not_made_up_for_by_others(bursts, library):
    process = start(bursts, library, 4, REST, request=REQUEST)
    collector = DeviceTime([process.pid], 5)
    find(process.pid).close()
    collector.start()
    runs = watch(process, collector)["device_run"]
    first, rest = map(int, process.stdout.read().split())
    assert process.returncode == 0
    weights = defaultdict(float)
    for run in runs:
        weights[run[3]] += run[10]
    assert weights["first"] == pytest.approx(first, rel=0.15)
    assert weights["rest"] == pytest.approx(rest, rel=0.15)


def test_what_an_empty_pair_takes_is_measured_by_the_programs_own_thread(bursts, library):
    # On an H200 replays took 15 % longer ever after the library's thread had launched kernels; the
    # stub driver ends a program in which it does.
    process = start(bursts, library, 3, REST, request=REQUEST)
    memory = find(process.pid)
    collector = DeviceTime([process.pid], 5)
    collector.start()
    watch(process, collector)
    process.wait()
    assert process.returncode == 0
    assert memory.seen().counts["bias_ns"] > 0
    memory.close()
