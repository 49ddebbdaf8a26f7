# SPDX-License-Identifier: Apache-2.0
"""docs/reference/support_matrix.md agrees with the code and its tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "support_matrix.py"


def test_the_support_matrix_is_what_its_script_writes():
    done = subprocess.run([sys.executable, SCRIPT, "--check"], check=False)
    assert done.returncode == 0, "run .venv/bin/python scripts/support_matrix.py"
