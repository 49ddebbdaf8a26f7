# SPDX-License-Identifier: Apache-2.0
"""Stacks of a JVM that was started without any flag for profilers, and is left alone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from user_stacks import reach_their_entry, recorded_once, stacks_of

pytestmark = pytest.mark.bpf

SOURCE = Path(__file__).parents[1] / "programs/java/CallTree.java"
CASES = {
    "compiled": (["-XX:CompileCommand=quiet", "-XX:CompileCommand=dontinline,CallTree::*"], 1),
    "interpreted": (["-Xint"], 1),
    "threads": (["-XX:CompileCommand=quiet", "-XX:CompileCommand=dontinline,CallTree::*"], 8),
}


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    """The folder of the compiled program."""
    if shutil.which("javac") is None:
        pytest.skip("needs javac")
    folder = tmp_path_factory.mktemp("java")
    subprocess.run(["javac", "-d", folder, SOURCE], check=True)
    return folder


@pytest.fixture(params=CASES)
def seen(request, classes, record):
    """(case, [(names from the innermost on, whether it reaches the thread's entry, samples)])."""
    flags, threads = CASES[request.param]
    command = ["java", *flags, "-cp", classes, "CallTree", "2000", str(threads)]
    return request.param, recorded_once(request, lambda: stacks_of(command, record, 5))


def names(stack):
    """Methods of the program on a stack, from the innermost on."""
    found = [it["function"] for it in stack]
    return [it.removeprefix("CallTree.") for it in found if it.startswith("CallTree.")]


def test_stacks_reach_the_entry_of_their_thread(seen):
    reach_their_entry(seen[1], 300)


def test_methods_are_named_in_the_order_of_the_calls(seen):
    _, found = seen
    right = total = heavy = 0
    for stack, _, count in found:
        called = names(stack)
        if called[:1] != ["spin"]:
            continue
        total += count
        by = called[1:2]
        heavy += count * (by == ["heavy"])
        is_right = by[0] in ("heavy", "light") if by else False
        right += count * (is_right and called[2:24][:21] == ["down"] * 21 and "work" in called)
    assert total > 100
    assert right / total >= 0.97
    assert heavy / total == pytest.approx(0.75, abs=max(0.05, 2 / total**0.5))


def test_lines_of_interpreted_methods(seen):
    case, found = seen
    if case != "interpreted":
        pytest.skip("compiled methods have no line")
    text = SOURCE.read_text().splitlines()
    lines = {
        (it["function"], text[it["line"] - 1].strip())
        for stack, *_ in found
        for it in stack
        if it["file"] == "CallTree.java"
    }
    assert ("CallTree.heavy", "return spin(3 * n) ^ 1;") in lines
    assert ("CallTree.down", "return down(depth - 1, n) + 1;") in lines
    assert ("CallTree.down", "return heavy(n) + light(n);") in lines
