# SPDX-License-Identifier: Apache-2.0
"""The verdict on the demo's program stays the same when its threads are called A, B and C."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sonde.model.causes import Bound, Cause

pytestmark = [pytest.mark.bpf, pytest.mark.opencl]

TRAIN = Path(__file__).parents[2] / "demo/train.py"
START_S = 60.0


@pytest.mark.parametrize("names", [(), ("A", "B", "C")], ids=["its own", "A B C"])
def test_the_demos_verdict(names, tmp_path):
    ready = tmp_path / "ready"
    words = ["--threads", *names] if names else []
    command = [sys.executable, str(TRAIN), "--seconds", "90", "--ready", str(ready), *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as program:
        try:
            until_s = time.monotonic() + START_S
            while not ready.exists() and time.monotonic() < until_s:
                assert program.poll() is None
                time.sleep(0.1)
            comms = Path(f"/proc/{program.pid}/task").glob("*/comm")
            shown = {path.read_text().strip() for path in comms}
            ask = [sys.executable, "-m", "sonde", "explain", "--pid", str(program.pid)]
            done = subprocess.run(
                [*ask, "-d", "5", "--json"], capture_output=True, text=True, timeout=90
            )
        finally:
            program.terminate()

    assert set(names or ("loader", "reporter")) <= shown
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)["verdicts"][0]
    assert verdict["bounds"][0]["key"] == Bound.INPUT, verdict["evidence"]
    assert verdict["causes"][0]["key"] == Cause.INPUT
    made_in = [line for line in verdict["evidence"] if "in prepare demo/train.py" in line]
    assert made_in, verdict["evidence"]
    assert names[1:2] == () or f"{names[1]} (" in made_in[0]
