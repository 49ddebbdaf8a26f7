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
    said = [
        subprocess.run(it, capture_output=True, text=True, check=False, timeout=60)
        for it in (sonde, late)
    ]
    assert said[1].returncode == said[0].returncode >= 0
    assert (said[1].stdout, said[1].stderr) == (said[0].stdout, said[0].stderr)
