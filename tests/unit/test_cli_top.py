# SPDX-License-Identifier: Apache-2.0
"""`sonde top`: CPU of a process that burns some, launches of one that launches on a stub driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from sonde import _native
from sonde.agent.top import DeviceShare, Top, Usage
from sonde.cli.top import table
from sonde.collect import inject_abi as abi
from stub_driver import build, find, start

pytestmark = pytest.mark.machine


def top(*words):
    return subprocess.run(
        [sys.executable, "-m", "sonde", "top", "--once", *map(str, words)],
        capture_output=True, text=True,
    )  # fmt: skip


def test_launches_and_busy_time_of_a_process(tmp_path):
    library = tmp_path / "sonde-inject-0.so"
    library.write_bytes(_native.inject_library())
    process = start(build(tmp_path) / "launches", library, 8)
    memory = find(process.pid)
    memory.wait_for(abi.Status.TIMING, timeout_s=5)
    looks = Top([process.pid], 0.05)
    before, began = memory.seen().counts["launches"], time.monotonic()
    time.sleep(2)
    (only,) = looks.look()
    launched, took_s = memory.seen().counts["launches"] - before, time.monotonic() - began
    looks.close()
    assert (only.pid, only.name) == (process.pid, "launches")
    device = only.device
    assert device.timed > 100
    # Chosen one by one: four standard errors, and counts that threads have not handed in yet.
    error = launched / device.timed**0.5
    assert abs(device.launches_per_s * took_s - launched) < 4 * error + 0.08 * launched
    # Of four launches two take 20 us, one 60, one 100.
    assert abs(device.busy / device.launches_per_s * 1e9 - 50_000) < 15_000

    done = top("--json", "-p", process.pid, "--interval", 1.5)
    assert done.returncode == 0, done.stderr
    (only,) = json.loads(done.stdout)["processes"]
    assert only["device"]["launches_per_s"] > 0
    memory.close()
    process.kill()
    process.communicate()


def test_cpu_time_of_a_process():
    burning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        done = top("--json", "-p", burning.pid, "-p", os.getpid())
        assert done.returncode == 0
        found = {one["pid"]: one for one in json.loads(done.stdout)["processes"]}
        assert found[burning.pid]["cpu"] > 0.02
        assert found[os.getpid()]["cpu"] < found[burning.pid]["cpu"], "it waits"
        assert found[burning.pid]["device"] is None
        assert found[os.getpid()]["resident_bytes"] > 1 << 20
    finally:
        burning.kill()
        burning.wait()


@pytest.mark.parametrize("width", [40, 100, 200])
def test_the_table_fits(width):
    usages = [
        Usage(1, "root", "trainer" * 20, 1.5, 3 << 30, DeviceShare(0.97, 12_345, 3e9, 200)),
        Usage(2, "a-long-user-name", "x", 0.0, 0, None),
    ]
    lines = table(usages, usages[:1], width).splitlines()
    assert len(lines) == 3
    assert all(len(line) <= width for line in lines)
    if width == 200:
        assert "97.0" in lines[2]
        assert "12,345" in lines[2]
        assert "3.22 GB" in lines[2]


@pytest.mark.parametrize("words", [["--interval", "0"], ["-p", "4194303"], ["--interval", "x"]])
def test_wrong_use(words):
    done = top(*words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
