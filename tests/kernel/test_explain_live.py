# SPDX-License-Identifier: Apache-2.0
"""`sonde explain --pid` on running OpenCL programs with known causes, on the CPU's PoCL."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.bpf, pytest.mark.opencl]

PROGRAM = Path(__file__).parents[1] / "programs" / "opencl" / "known_cause.py"
BOUNDS = {"device": "device", "loader": "input", "sleep": "host", "host": "host"}


def explained(cause: str, *flags: str) -> subprocess.CompletedProcess[str]:
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), cause],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as program:  # fmt: skip
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        command = [sys.executable, "-m", "sonde", "explain", "--pid", str(program.pid), *flags]
        said = subprocess.run(command, capture_output=True, text=True, timeout=90)
        assert program.stdin is not None
        program.stdin.close()
        program.wait(20)
    return said


@pytest.mark.parametrize("cause", BOUNDS)
def test_what_holds_up_the_thread_that_feeds_the_device(cause):
    said = explained(cause, "-d", "2", "--json")

    assert said.returncode == 0, said.stderr
    verdict = json.loads(said.stdout)["verdicts"][0]
    assert verdict["bounds"][0]["key"] == BOUNDS[cause], verdict["evidence"]
    if cause == "sleep":
        assert verdict["causes"][0]["key"] == "sleep"


def test_a_process_that_is_not_there():
    command = [sys.executable, "-m", "sonde", "explain", "--pid", "4194303", "-d", "1"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert said.returncode == 2
    assert "Traceback" not in said.stderr
    assert "4194303" in said.stderr
