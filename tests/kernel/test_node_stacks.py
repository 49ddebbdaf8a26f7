# SPDX-License-Identifier: Apache-2.0
"""Stacks of Node.js that was started without any flag for profilers, and is left alone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from user_stacks import reach_their_entry, recorded_once, stacks_of

pytestmark = pytest.mark.bpf

SOURCE = Path(__file__).parents[1] / "programs/node/call_tree.js"
CASES = {
    "compiled": ([], 1),
    "interpreted": (["--no-opt", "--no-sparkplug"], 1),
    "baseline": (["--no-opt", "--always-sparkplug"], 1),
    "threads": ([], 4),
}
NODE = os.environ.get("SONDE_TEST_NODE") or shutil.which("node")
"""Another build of Node.js can be tried by that variable."""


@pytest.fixture(params=CASES)
def seen(request, record):
    """(case, [(frames of user code from the innermost on, whether whole, samples)])."""
    if NODE is None:
        pytest.skip("needs node")
    flags, threads = CASES[request.param]
    command = [NODE, *flags, SOURCE, "2000", str(threads)]
    return request.param, recorded_once(request, lambda: stacks_of(command, record, 4))


def called(stack):
    """Functions of the program on a stack, from the innermost on."""
    return [it["function"] for it in stack if it["file"] == SOURCE.name]


def test_stacks_reach_the_entry_of_their_thread(seen):
    reach_their_entry(seen[1], 200)


def test_functions_are_named_in_the_order_of_the_calls(seen):
    """Those that V8 has inlined into one another, too."""
    _, found = seen
    right = total = heavy = 0
    for stack, _, count in found:
        names = called(stack)
        if names[:1] != ["spin"]:
            continue
        total += count
        heavy += count * (names[1:2] == ["heavy"])
        by = names[1] if len(names) > 1 else ""
        is_right = by in ("heavy", "light") and names[2:24] == ["down"] * 21 + ["work"]
        right += count * is_right
    assert total > 100
    assert right / total >= 0.97
    assert heavy / total == pytest.approx(0.75, abs=max(0.05, 2 / total**0.5))


def test_lines_are_those_that_run(seen):
    case, found = seen
    text = SOURCE.read_text().splitlines()
    lines = {
        (it["function"], text[it["line"] - 1].strip())
        for stack, *_ in found
        for it in stack
        if it["file"] == SOURCE.name
    }
    if case == "baseline":  # where the function begins
        assert ("down", "function down(depth, n) {") in lines
        return
    assert ("heavy", "return spin(3 * n) ^ 1;") in lines
    assert ("down", "return down(depth - 1, n) + 1;") in lines
    assert ("down", "return heavy(n) + light(n);") in lines
