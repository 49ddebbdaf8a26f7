# SPDX-License-Identifier: Apache-2.0
"""Stacks of CPU samples of one program, and whether each reaches where its thread began."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import pytest
from bench.stacks.entries import Entries

Row = Mapping[str, Any]
HZ = 499


def user_stacks(tables: Mapping[str, Any], entries: Entries) -> list[tuple[list[Row], bool, int]]:
    """(rows of frames outside the kernel, from the innermost on; whether the last is an entry;
    samples) of each CPU sample of a capture's tables."""
    frames = {row["frame_id"]: row for row in tables["frame"].to_pylist()}
    stacks = {row["stack_id"]: row["frame_ids"] for row in tables["stack"].to_pylist()}
    found = []
    for row in tables["sample"].to_pylist():
        if row["kind"] == "cpu":
            stack = [frames[it] for it in stacks.get(row["stack_id"], [])]
            stack = [it for it in stack if it["kind"] != "kernel"]
            at = entries.of_offset(stack[-1]["binary"], stack[-1]["offset"]) if stack else None
            found.append((stack, at is not None and entries.has(at), row["weight_count"]))
    return found


def reach_their_entry(found: list[tuple[list[Row], bool, int]], at_least: int) -> None:
    """Assert that 98 % of more than `at_least` samples are whole."""
    total = sum(count for *_, count in found)
    whole = sum(count for _, is_whole, count in found if is_whole)
    assert total > at_least
    assert whole / total >= 0.98


Recorded = TypeVar("Recorded")
_kept: dict[tuple[str, str], Any] = {}
"""Recordings by module and case."""


def recorded_once(request: pytest.FixtureRequest, record: Callable[[], Recorded]) -> Recorded:
    """A recording of a case, for all tests of the module. A test that failed and is run again gets
    another one: the machine may have been busy during the first."""
    key = request.module.__name__, request.param
    if key not in _kept or getattr(request.node, "execution_count", 1) > 1:
        _kept[key] = record()
    return cast(Recorded, _kept[key])


def stacks_of(
    command: Sequence[str], record: Callable[..., Any], seconds: int
) -> list[tuple[list[Row], bool, int]]:
    """`user_stacks` of a program that prints a line when it has begun, recorded for some seconds
    once it is compiled."""
    program = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert program.stdout is not None
    try:
        program.stdout.readline()
        time.sleep(2)  # it is compiled by then
        with record("-F", str(HZ), "-p", str(program.pid), "-d", str(seconds)) as recorder:
            recorder.process.wait(60)
        entries = Entries(program.pid)
    finally:
        program.kill()
        program.wait()
    return user_stacks(recorder.capture.tables, entries)


def shares_are_three_to_one(by: Mapping[str, int]) -> None:
    """Assert that `heavy` has 60 % of the samples of `spin`, by its caller, and `light` 20 %."""
    total = Counter(by).total()
    assert total > 100
    assert by["heavy"] / total == pytest.approx(0.6, abs=max(0.05, 2 / total**0.5))
    assert by["light"] / total == pytest.approx(0.2, abs=max(0.05, 2 / total**0.5))
