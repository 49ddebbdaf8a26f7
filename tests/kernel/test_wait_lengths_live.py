# SPDX-License-Identifier: Apache-2.0
"""How long single waits are, against a program that measures its own, and what delayed
acknowledgements are called."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest

from sonde.analyze.bound import explain
from sonde.query import queries
from sonde.recording.timelines import open_timeline

pytestmark = pytest.mark.bpf

PROGRAM = Path(__file__).parents[1] / "programs" / "small_writes.py"
HINT = "delayed acknowledgement of TCP"
NEAR = 0.05


@pytest.mark.parametrize("arguments", [[], ["nodelay"]], ids=["two writes", "TCP_NODELAY"])
def test_delayed_acknowledgements_are_counted_and_named(record, tmp_path, arguments):
    measured = tmp_path / "times.json"
    script = f"{sys.executable} {PROGRAM} {' '.join(arguments)} > {measured}"
    with record("--no-device", "--", "sh", "-c", script) as recorder:
        recorder.process.wait(60)
    truth = json.loads(measured.read_text())
    found = [
        fact
        for verdict in explain(open_timeline([recorder.path])).verdicts
        for cause in verdict.causes
        for fact in cause.facts
        if HINT in fact
    ]
    if arguments:
        assert statistics.median(truth) < 10**7
        assert not found
        return
    waits = [one for one in queries.waits(recorder.session) if one.reason == "socket"]
    asking = max(waits, key=lambda one: (one.location.startswith("ask "), one.single_count))
    long = sorted(ns for ns in truth if ns >= 10**7)
    assert len(long) > len(truth) / 2
    assert asking.single_count == pytest.approx(len(long), abs=2)
    assert asking.single_p50_ns == pytest.approx(statistics.median(long), rel=NEAR)
    assert f"{asking.single_count} × " in asking.lengths
    assert found
