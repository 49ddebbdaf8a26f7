# SPDX-License-Identifier: Apache-2.0
"""Attaches to a server whose threads wait in calls that answer EINTR to a mere stop: none leaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench import storms

from sonde.attach import remote, tracer
from sonde.errors import TargetRefused

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or os.uname().machine != "x86_64", reason="needs root on x86-64"
)
TIMED = ("recv", "read", "accept", "sigwait", "epoll")
ALL = (*TIMED, "send", "connect", "poll", "select", "nanosleep", "semop", "futex")


@pytest.fixture(scope="module")
def bin_(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("waits")
    storms.build(folder)
    return folder


def attach(bin_: Path, wait_s: float, *words: str) -> tuple[str, dict[str, Any]]:
    """What came of one attach, and what the server's calls answered meanwhile."""
    command = [str(bin_ / "waits"), *words]
    it = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert it.stdout is not None
    assert it.stdout.readline() == "ready\n"
    try:
        loaded = remote.load(it.pid, bin_ / "payload.so", "waited", wait_s)
        came = "" if loaded is None else "loaded"
    except TargetRefused as refused:
        came = refused.cause
    output, _ = it.communicate(timeout=20)
    assert it.returncode == 0
    return came, json.loads(output)["modes"]


def leaks(modes: dict[str, Any]) -> dict[str, int]:
    return {name: it["eintr"] + it["odd"] for name, it in modes.items() if it["eintr"] + it["odd"]}


def test_threads_that_are_refused_notice_nothing(bin_: Path) -> None:
    came, modes = attach(bin_, 1.5, "--small", *ALL)

    assert "too little stack" in came
    assert leaks(modes) == {}


@pytest.mark.parametrize("filter_", ["--filter", "--deny"])
def test_threads_whose_seccomp_filters_are_read_notice_nothing(bin_: Path, filter_: str) -> None:
    came, modes = attach(bin_, 0.5, filter_, *TIMED)

    assert "memfd_create" in came if filter_ == "--deny" else came == "loaded"
    assert leaks(modes) == {}


@pytest.mark.parametrize("mode", TIMED)
def test_a_thread_is_borrowed_out_of_a_call_with_a_timeout_and_waits_on(
    bin_: Path, mode: str
) -> None:
    came, modes = attach(bin_, 2.0, mode)

    assert came == "loaded"
    assert leaks(modes) == {}


def test_a_thread_that_is_refused_is_stopped_a_few_times_and_no_more(bin_: Path) -> None:
    it = subprocess.Popen(
        [str(bin_ / "waits"), "--small", "recv"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert it.stdout is not None
    it.stdout.readline()
    done = subprocess.run(
        [sys.executable, "-m", "sonde.attach.tracer", str(it.pid), str(bin_ / "payload.so"),
         "waited", "2"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    it.communicate()

    answer = json.loads(done.stdout)
    assert answer["outcome"] == "refused"
    # The server's two threads; without a bound they were stopped 340 times a second.
    assert 2 <= answer["stops"] <= 2 * tracer.MAX_STOPS
