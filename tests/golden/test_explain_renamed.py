# SPDX-License-Identifier: Apache-2.0
"""Names of threads, processes and the program's own functions and files decide nothing.

Each record is explained as it is, and with all of them replaced at random.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.explain.renaming import Renamer, of_tables, of_timeline, verdicts_of

from sonde.analyze.merge import merged, with_interpreter_lock
from sonde.query.capture import read
from sonde.query.timeline import of_capture
from sonde.readers import kineto

DATA = Path(__file__).parents[1] / "data"
TRACES = sorted((DATA / "explain").glob("*.json.gz"))
CAPTURES = sorted([*DATA.glob("explain/*/*.sonde"), *DATA.glob("device_time/*.sonde")])


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name.partition(".")[0])
def test_renaming_changes_no_verdict_on_a_trace(path: Path) -> None:
    trace = kineto.read(path)
    capture = read(path.with_name(path.name.replace(".json.gz", ".sonde")))
    new = Renamer(path.name)
    plain = with_interpreter_lock(merged(trace, of_capture(capture)))
    other = merged(of_timeline(trace, new), of_capture(of_tables(capture, new)))

    assert verdicts_of(with_interpreter_lock(other)) == verdicts_of(plain)


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_renaming_changes_no_verdict_on_a_capture(path: Path) -> None:
    capture = read(path)
    renamed = of_tables(capture, Renamer(path.name))

    assert verdicts_of(of_capture(renamed)) == verdicts_of(of_capture(capture))
