# SPDX-License-Identifier: Apache-2.0
"""Verdicts on programs without a device, recorded while other work kept both CPUs busy.

`python -m bench.explain.exam bench/explain/host_programs` made these recordings, of 10 s each. All
of them waited for a CPU, which the kernel counted; what their authors put in comes next.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sonde.analyze.bound import explain
from sonde.model.causes import Cause
from sonde.recording.timelines import open_timeline

DATA = Path(__file__).parents[1] / "data/explain/host"


@pytest.mark.parametrize(
    ("name", "cause", "place", "fact"),
    [
        ("gil", Cause.GIL, "main p02.py", "on a CPU in summarize p02.py:13"),
        ("remote", Cause.IO, "ask p05.py:19", ""),
        ("memory", Cause.PAGE_FAULT, "fresh p07.py:12", ""),
        ("worker", Cause.INPUT, "next_batch p08.py:20", "100 % of it ended by"),
        ("queue", Cause.INPUT, "take p10.py:18", "sleep in feed p10.py:13"),
    ],
)
def test_the_cause_beside_the_want_of_a_cpu(name: str, cause: Cause, place: str, fact: str) -> None:
    explanation = explain(open_timeline([DATA / f"{name}.sonde"]))
    verdict = explanation.verdicts[0]
    (first, *_) = (one for one in verdict.causes if one.key != Cause.RUN_QUEUE)

    assert verdict.without_device
    assert first.key == cause
    assert first.locations[0].function.startswith(place)
    assert any(fact in one for one in first.facts) or not fact
