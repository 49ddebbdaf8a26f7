# SPDX-License-Identifier: Apache-2.0
"""Stacks of a process that executes another program with other functions at the same addresses."""

from __future__ import annotations

from collections import Counter

import pytest

from sonde.model.profile import ProfileKind
from sonde.query.queries import profile

pytestmark = pytest.mark.bpf

FIRST, SECOND = "first_program", "second_program"
FIRST_MS, SECOND_MS = 1_000, 3_000


def test_stacks_after_an_exec_are_named_by_the_new_program(record, program):
    """They had the ids of the old one's, and so its names: both have equal addresses."""
    first, second = (
        program("stacks/executes", "-static", "-no-pie", f"-DWORK={name}")
        for name in (FIRST, SECOND)
    )
    command = (str(first), str(FIRST_MS), str(second), str(SECOND_MS))
    with record("-F", "997", "--", *command, tick_s=0.25, stack_gap_ms=0) as recorder:
        recorder.process.wait(30)

    for kind in (ProfileKind.ON_CPU, ProfileKind.OFF_CPU):
        found = profile(recorder.session, kind)
        seen: Counter[str] = Counter()
        for row in found:
            names = {frame.function for frame in found.stacks[row.stack]}
            for name in names.intersection((FIRST, SECOND)):
                seen[name] += row.events
        # A stack that comes for the first time just before the exec may be read after it.
        assert seen[SECOND] / seen[FIRST] == pytest.approx(SECOND_MS / FIRST_MS, rel=0.25), seen
