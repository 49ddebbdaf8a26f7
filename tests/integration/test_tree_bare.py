# SPDX-License-Identifier: Apache-2.0
"""The tree that `scripts/tree` left in dist/: it needs no Python of the host."""

from __future__ import annotations

import os
import subprocess
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TREE = ROOT / "dist" / "sonde-tree"
SONDE = TREE / "bin" / "sonde"
TOOLS = ("sh", "dirname", "readlink")

pytestmark = [
    pytest.mark.skipif(not SONDE.exists(), reason="scripts/tree was not run"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]


def run(tools: Path, *command: str | Path) -> str:
    """With those tools of the host alone."""
    done = subprocess.run(
        [*command], env={"PATH": str(tools)}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_records_and_reports(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in TOOLS:
        (tools / name).symlink_to(f"/usr/bin/{name}")
    capture = tmp_path / "a.sonde"
    busy = "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done"
    run(tools, SONDE, "record", "-q", "-f", "-o", capture, "--", "/bin/sh", "-c", busy)

    assert "ON CPU" in run(tools, SONDE, "report", capture)
    assert "CPU" in run(tools, SONDE, "explain", capture)
    run(tools, SONDE, "report", capture, "--format", "pprof", "-o", tmp_path / "a.pb.gz")
    assert "nothing got worse" in run(tools, SONDE, "diff", capture, capture, "--fail-above", "1%")


def test_it_is_small_enough() -> None:
    loader = SourceFileLoader("tree_script", str(ROOT / "scripts" / "tree"))
    spec = spec_from_loader("tree_script", loader)
    assert spec
    script = module_from_spec(spec)
    loader.exec_module(script)

    assert script.size_of(TREE) <= script.LIMITS["whole"]
