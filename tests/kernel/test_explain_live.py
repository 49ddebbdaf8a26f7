# SPDX-License-Identifier: Apache-2.0
"""`sonde explain --pid` on running OpenCL programs with known causes, on the CPU's PoCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sonde.analyze.bound import explain
from sonde.model.causes import Bound, Cause
from sonde.query import queries
from sonde.query.capture import read
from sonde.query.session import Session
from sonde.recording.timelines import open_timeline

pytestmark = [pytest.mark.bpf, pytest.mark.opencl]

PROGRAM = Path(__file__).parents[1] / "programs" / "opencl" / "known_cause.py"
WATCHED_S = 2
BOUNDS = {
    "device": Bound.DEVICE, "loader": Bound.INPUT, "sleep": Bound.SLEEP, "host": Bound.HOST,
}  # fmt: skip


def explained(cause: str, *flags: str) -> subprocess.CompletedProcess[str]:
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), cause],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as program:  # fmt: skip
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        command = [sys.executable, "-m", "sonde", "explain", "--pid", str(program.pid), *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
        assert program.stdin is not None
        program.stdin.close()
        program.wait(20)
    return done


@pytest.mark.parametrize("cause", BOUNDS)
def test_what_holds_up_the_thread_that_feeds_the_device(cause):
    done = explained(cause, "-d", "2", "--json")

    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)["verdicts"][0]
    assert verdict["bounds"][0]["key"] == BOUNDS[cause], verdict["evidence"]
    if cause == "sleep":
        assert verdict["causes"][0]["key"] == Cause.SLEEP


DEVICE_BOUNDS = {
    "device": {Bound.KERNELS},
    "loader": {Bound.INPUT},
    "sleep": {Bound.SLEEP},
    "host": {Bound.HOST},
}


@pytest.mark.parametrize("cause", DEVICE_BOUNDS)
def test_by_the_devices_own_time(cause, tmp_path):
    """The program started by `sonde record`, which then times what the device runs."""
    capture = tmp_path / "a.sonde"
    command = [sys.executable, "-m", "sonde", "record", "-o", str(capture), "--quiet"]
    program = [sys.executable, str(PROGRAM), cause]
    with subprocess.Popen(
        [*command, "--", *program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # Every run is to be timed, however slow the machine makes the timing.
        env={**os.environ, "SONDE_DEVICE_BUDGET": "0.5"},
    ) as recording:  # fmt: skip
        try:
            assert recording.stdout is not None
            assert recording.stdout.readline() == "ready\n"
            time.sleep(WATCHED_S)
        finally:
            assert recording.stdin is not None
            recording.stdin.close()  # which ends the program, and so the recording
        assert recording.wait(60) == 0
        assert recording.stderr is not None
        complaints = recording.stderr.read()
    timeline = open_timeline([capture])
    assert len(timeline.device), (complaints, queries.losses(Session(read(capture))))
    (verdict,) = explain(timeline).verdicts

    assert verdict.bounds[0].key in DEVICE_BOUNDS[cause], verdict.evidence
    stalled = verdict.window_ns * (1 - verdict.computing)
    assert sum(one.ns for one in verdict.causes) == pytest.approx(stalled, abs=2)


def test_a_process_that_is_not_there():
    command = [sys.executable, "-m", "sonde", "explain", "--pid", "4194303", "-d", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "4194303" in done.stderr
