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


def weights_of(process, budget):
    """The weights of timed runs by kernel, and how many of each were launched."""
    collector = DeviceTime([process.pid], budget)
    find(process.pid).close()
    collector.start()
    weights = defaultdict(float)
    for run in watch(process, collector)["device_run"]:
        weights[run[3]] += run[10]
    first, rest = map(int, process.stdout.read().split())
    assert process.returncode == 0
    return weights, first, rest


def test_the_first_of_a_burst_is_timed_and_not_made_up_for_by_others(bursts, library):
    weights, first, rest = weights_of(start(bursts, library, 4, REST, request=REQUEST), 5)
    assert weights["first"] == pytest.approx(first, rel=0.15)
    assert weights["rest"] == pytest.approx(rest, rel=0.15)


def test_the_first_of_a_long_burst_are_timed_too(bursts, library, monkeypatch):
    """Only one sample in some seventeen finds an idle device, and is most often one of `first`."""
    monkeypatch.setenv("FIRST", "40")
    weights, first, rest = weights_of(start(bursts, library, 12, 600, request=REQUEST), 0.002)
    assert weights["first"] == pytest.approx(first, rel=0.5)
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
