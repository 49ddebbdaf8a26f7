# SPDX-License-Identifier: Apache-2.0
"""docs/reference/cli.md agrees with the parsers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_reference_of_the_command_line_is_that_of_the_parsers() -> None:
    command = [sys.executable, str(ROOT / "scripts/cli_docs.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0, (
        "python scripts/cli_docs.py writes docs/reference/cli.md"
    )
