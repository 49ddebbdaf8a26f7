# SPDX-License-Identifier: Apache-2.0
"""Functions for the scripts that generate a file of the repository."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def write_or_check(target: Path, document: Callable[[], str]) -> int:
    """Write the file; with --check only compare. Returns the exit code: 1 where it differs."""
    if "--check" in sys.argv[1:]:
        return int(target.read_text("utf-8") != document())
    target.write_text(document(), "utf-8")
    return 0


def formatted(source: str, target: Path) -> str:
    """Python source as ruff formats it for the file `target`."""
    ruff = Path(sys.executable).with_name("ruff")
    command = [str(ruff), "format", "--stdin-filename", str(target), "-"]
    root = Path(__file__).parents[1]
    done = subprocess.run(
        command, input=source, capture_output=True, text=True, check=True, cwd=root
    )
    return done.stdout
