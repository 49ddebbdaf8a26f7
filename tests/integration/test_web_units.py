# SPDX-License-Identifier: Apache-2.0
"""The page's own tests and types, by its own tools."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

WEB = Path(__file__).parents[2] / "web"


@pytest.mark.parametrize("script", ["check", "test"])
def test_the_page_has_no_wrong_type_and_its_tests_pass(script: str) -> None:
    npm = shutil.which("npm")
    if npm is None or not (WEB / "node_modules").is_dir():
        pytest.skip("needs npm and the page's packages: scripts/setup build")
    ran = subprocess.run([npm, "run", script], cwd=WEB, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
