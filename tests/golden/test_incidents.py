# SPDX-License-Identifier: Apache-2.0
"""Incidents recorded while a fault was injected for real (bench/faults) replay to its cause.

The file is named after what was injected, and to whom: `bench.faults.keep`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sonde.cli.incidents import read
from sonde.diagnose.explain import explain

FOLDER = Path(__file__).parents[1] / "data" / "incidents"
FILES = sorted(FOLDER.glob("*.json.gz"))
WITH_OFFENDER = {"cpu-contention", "disk-contention", "slow-file-system"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_a_recorded_incident_replays_to_what_was_injected(path):
    cause = path.name.partition("--")[0]
    incident, window = read(path)

    verdict = explain(window, is_last_look=True)

    assert verdict is not None
    assert (verdict.cause, verdict.change) == (cause, None)
    assert verdict.candidates[0].evidence
    offender = verdict.candidates[0].offender
    assert (offender is not None) == (cause in WITH_OFFENDER)
    assert incident.victim == window.victim


def test_the_command_line_prints_them():
    command = [sys.executable, "-m", "sonde", "incidents", str(FOLDER), "--json", "--explain"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    incidents = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(incidents) == len(FILES)
    assert {one["verdict"]["cause"] for one in incidents} == {
        path.name.partition("--")[0] for path in FILES
    }


def test_what_is_no_incident_is_refused(tmp_path):
    path = tmp_path / "some.json.gz"
    path.write_bytes(b"no gzip")
    done = subprocess.run(
        [sys.executable, "-m", "sonde", "incidents", str(path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "remedy" in done.stderr
