# SPDX-License-Identifier: Apache-2.0
"""`sonde diagnose` on this machine: a process that is stopped is noticed, explained and kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.bpf

BUSY = "while True: sum(i * i for i in range(10_000))"
USUAL_S = 6.0
STOPPED_S = 4.0
PATIENCE_S = 60


def test_a_stopped_process_is_an_incident(tmp_path):
    folder = tmp_path / "incidents"
    victim = subprocess.Popen([sys.executable, "-c", BUSY])
    watching = subprocess.Popen(
        [sys.executable, "-m", "sonde", "diagnose", "--json", "--no-device", "--keep", str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert watching.stderr is not None
        for line in watching.stderr:
            if line.startswith("sonde: watching"):
                break
        time.sleep(USUAL_S)
        os.kill(victim.pid, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        os.kill(victim.pid, signal.SIGCONT)
        watching.send_signal(signal.SIGINT)
        output, _ = watching.communicate(timeout=PATIENCE_S)
    finally:
        for process in (victim, watching):
            process.kill()
            process.wait()
    incidents = [json.loads(line) for line in output.splitlines()]
    mine = [one for one in incidents if one["victim"] == victim.pid]
    assert [one["verdict"]["cause"] for one in mine][-1:] == ["frozen"]
    command = [sys.executable, "-m", "sonde", "incidents", "--explain", str(folder)]
    again = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "stopped by a signal" in again
