# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C when all is done."""

from __future__ import annotations

import subprocess
import sys

SOURCE = """
import atexit, os, signal, sys
atexit.register(os.kill, os.getpid(), signal.SIGINT)
sys.argv = ["sonde"]
from sonde.cli.main import run
run()
"""


def test_an_interrupt_on_the_way_out_changes_nothing():
    sonde = [sys.executable, "-m", "sonde"]
    late = [sys.executable, "-c", SOURCE]
    ends = [
        subprocess.run(it, capture_output=True, text=True, check=False, timeout=60)
        for it in (sonde, late)
    ]
    assert ends[1].returncode == ends[0].returncode >= 0
    assert (ends[1].stdout, ends[1].stderr) == (ends[0].stdout, ends[0].stderr)
