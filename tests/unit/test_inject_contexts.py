# SPDX-License-Identifier: Apache-2.0
"""Contexts that are taken away, the process's end, and limits that would end it: the library in a
process on a stub driver that ends the program where a real one would crash."""

from __future__ import annotations

import resource
import subprocess

import pytest

from sonde import _native
from sonde.collect import inject_abi as abi
from sonde.collect.device_time import DeviceTime
from stub_driver import build, find, start, watch

REQUEST = f"{int(abi.Request.EVENTS | abi.Request.STACKS)}:20000"


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return build(tmp_path_factory.mktemp("stub"))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("library") / "sonde-inject-0.so"
    path.write_bytes(_native.inject_library())
    return path


@pytest.mark.parametrize("way", ["destroy", "primary", "reset"])
def test_no_event_of_a_destroyed_context_is_touched(programs, library, way):
    process = start(programs / "contexts", library, 2, way, request=REQUEST)
    collector = DeviceTime([process.pid], 5)
    find(process.pid).close()
    collector.start()
    runs = watch(process, collector)["device_run"]
    assert process.returncode == 0
    _, launched, lives = process.stdout.read().split()
    assert int(lives) >= 5
    # What was under way when a context went is not known; nothing is counted twice.
    counted = sum(run[10] for run in runs)
    error = sum(run[10] * (run[10] - 1) for run in runs) ** 0.5
    assert 0 < counted < 1.03 * int(launched) + 4 * error


@pytest.mark.parametrize("turn", range(5))
def test_the_process_exits_while_launches_are_timed(programs, library, turn):
    process = start(programs / "contexts", library, 1, "exit", request=REQUEST)
    assert process.wait(20) == 0, "our thread is out of the driver before the driver ends"


@pytest.mark.parametrize(
    ("limit", "most"),
    [
        (resource.RLIMIT_FSIZE, 1 << 20),
        (resource.RLIMIT_AS, 32 << 20),
        (resource.RLIMIT_NOFILE, 16),
    ],
)
def test_a_limit_costs_the_timing_and_not_the_process(programs, library, limit, most):
    done = subprocess.run(
        [programs / "contexts", "0.1", "primary"],
        env={"LD_PRELOAD": str(library), "SONDE_INJECT": REQUEST},
        preexec_fn=lambda: resource.setrlimit(limit, (most, most)),
    )
    assert done.returncode == 0
