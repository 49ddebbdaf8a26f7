# SPDX-License-Identifier: Apache-2.0
"""Device calls that run functions of their caller: exceptions and cancellation go through them as
if nobody looked."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from device_watch import DeviceWatch, Program

from sonde.model.calls import STATUS_UNKNOWN

pytestmark = [
    pytest.mark.bpf,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]

SOURCE = Path(__file__).parents[1] / "programs" / "opencl" / "callbacks.cpp"
COUNT = 50


def _build(target: Path, *flags: str) -> Path:
    subprocess.run(["g++", "-O1", SOURCE, "-o", target, "-pthread", "-ldl", *flags], check=True)
    return target


@pytest.fixture(scope="module")
def callbacks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(tmp_path_factory.mktemp("callbacks") / "callbacks", "-rdynamic")


def _run(watch: DeviceWatch, *command: object) -> Program:
    ran = Program(*command)
    watch.follow(ran, "ready")
    ran.go()
    watch.finish(ran)  # it exits with 0: nothing was thrown into the void
    return ran


@pytest.mark.parametrize("case", ["throw", "exit"])
def test_what_a_callback_throws_is_caught_and_guards_are_released(
    callbacks: Path, case: str
) -> None:
    """And each call is counted once, without a time and a status that were never seen."""
    with DeviceWatch() as watch:
        ran = _run(watch, callbacks, case, COUNT)
        assert ran.lines == [str(COUNT)]
        key = (ran.pid, "clBuildProgram", "", STATUS_UNKNOWN)
        assert {it: n for it, n in watch.calls.items() if it[0] == ran.pid} == {key: COUNT}
        assert watch.ns[key] == 0
        assert watch.samples[ran.pid, "clBuildProgram"]
        assert watch.collector.losses() == {}


def test_a_call_that_the_loader_hands_on_counts_once(callbacks: Path, tmp_path: Path) -> None:
    below = _build(tmp_path / "libbelow.so", "-DBELOW", "-shared", "-fPIC")
    with DeviceWatch() as watch:
        ran = _run(watch, callbacks, "nest", COUNT, below)
        assert sum(n for it, n in watch.calls.items() if it[0] == ran.pid) == COUNT
