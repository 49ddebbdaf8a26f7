# SPDX-License-Identifier: Apache-2.0
"""Inlined functions in the report of a program that ran."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.bpf

SOURCE = Path(__file__).parents[1] / "programs" / "lines" / "inlined.cpp"


def test_a_report_shows_functions_that_were_inlined(record, tmp_path):
    compiler = shutil.which("g++") or pytest.skip("needs g++")
    program = tmp_path / "inlined"
    subprocess.run([compiler, "-O2", "-g", "-o", program, SOURCE], check=True)
    with record("-F", "499", "--no-device", "--", str(program), "2") as recorder:
        recorder.process.wait(30)
    report = [sys.executable, "-m", "sonde", "report", str(recorder.path), "--format", "folded"]
    done = subprocess.run([*report, "--lines"], capture_output=True, text=True, check=True)
    weights = {
        stack: int(count)
        for stack, _, count in (line.rpartition(" ") for line in done.stdout.splitlines())
    }
    total = sum(weights.values())
    chain = ";main;outer(long);shapes::Box<long>::middle(long)_[i];innermost_[i]"
    shown = sum(count for stack, count in weights.items() if chain in stack)
    assert total > 300
    assert shown > 0.9 * total, weights
    assert "source lines of" in done.stderr
    plain = subprocess.run(report, capture_output=True, text=True, check=True)
    assert "_[i]" not in plain.stdout
