# SPDX-License-Identifier: Apache-2.0
"""Stacks of a PHP that was started without any flag for profilers, and is left alone."""

from __future__ import annotations

import os
import shlex
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from user_stacks import (
    reach_their_entry,
    recorded_once,
    shares_are_three_to_one,
    stacks_of,
)

pytestmark = pytest.mark.bpf

SOURCE = Path(__file__).parents[1] / "programs/php/call_tree.php"
DEPTH = 10
_CACHE = ["-d", "opcache.enable_cli=1", "-d", "opcache.jit_buffer_size=32M"]
CASES = {
    "interpreted": ["-d", "opcache.enable_cli=0"],
    "opcache": ["-d", "opcache.enable_cli=1", "-d", "opcache.jit_buffer_size=0"],
    "function JIT": [*_CACHE, "-d", "opcache.jit=function"],
    "tracing JIT": [*_CACHE, "-d", "opcache.jit=tracing"],
}
PHP = shlex.split(os.environ.get("SONDE_TEST_PHP") or shutil.which("php") or "")
"""Another build can be tried by that variable; SONDE_TEST_PHP_SOURCE: the program's path in it."""
CALLERS = {
    "spin": {"heavy", "light", "caught"},
    "heavy": {"down"},
    "light": {"down"},
    "caught": {"down"},
    "raise": {"caught"},
    "{closure}": {"down", "others"},
    "down": {"{closure}", "work", "Tree::__call", "Tree::method", "Tree::generated"},
    "Tree::__call": {"others"},
    "Tree::method": {"others"},
    "Tree::generated": {"others"},
    "others": {"work"},
    "work": {"{main}"},
    "{main}": {None},
}


@pytest.fixture(params=CASES)
def seen(request, record):
    """(case, [(frames of user code from the innermost on, whether whole, samples)])."""
    if not PHP:
        pytest.skip("needs php")
    source = os.environ.get("SONDE_TEST_PHP_SOURCE") or str(SOURCE)
    command = [*PHP, *CASES[request.param], source, "2000"]
    return request.param, recorded_once(request, lambda: stacks_of(command, record, 8))


def of_source(row):
    """Whether a frame is of the program's file."""
    return row["file"].rpartition("/")[2] == SOURCE.name


def of_program(stack):
    """Functions of the program on a stack, from the innermost on."""
    return [it["function"].partition(":{closure:")[0] for it in stack if of_source(it)]


def is_right(names):
    """Whether that is a path of the program's call tree, from the code of the file on."""
    names = ["{closure}" if it.startswith("{closure") else it for it in names]
    if not all(
        caller in CALLERS[name] for name, caller in zip(names, [*names[1:], None], strict=True)
    ):
        return False
    if names[0] in ("spin", "heavy", "light", "caught", "raise") and "others" not in names:
        return names.count("{closure}") == DEPTH
    return names.count("{closure}") <= DEPTH


def test_stacks_reach_the_entry_of_their_thread(seen):
    reach_their_entry(seen[1], 150)


def test_functions_are_named_in_the_order_of_the_calls(seen):
    counts = Counter()
    wrong = Counter()
    for stack, _, count in seen[1]:
        names = of_program(stack)
        right = bool(names) and is_right(names)
        counts[right] += count
        if not right:
            wrong[tuple(it["function"] for it in stack)] += count
    assert counts.total() > 150
    assert counts[True] / counts.total() >= 0.99, wrong.most_common(3)


def test_time_is_that_of_the_functions_that_took_it(seen):
    case, found = seen
    if "JIT" in case:
        pytest.skip("spin is part of its callers")
    by = Counter()
    for stack, _, count in found:
        names = of_program(stack)
        if names[:1] == ["spin"]:
            by[names[1]] += count
    shares_are_three_to_one(by)


def test_lines_are_those_that_run(seen):
    text = SOURCE.read_text().splitlines()
    lines = {
        (it["function"], text[it["line"] - 1].strip())
        for stack, *_ in seen[1]
        for it in stack
        if of_source(it) and it["line"]
    }
    assert ("heavy", "return spin(3 * $n) ^ 1;") in lines
    assert ("caught", "return spin($n) ^ 3;") in lines
    assert ("down", "return heavy($n) + light($n) + caught($n);") in lines
    if "JIT" in seen[0]:  # compiled code keeps its place where it calls
        return
    assert ("spin", "$x = ($x * 25173 + 13849) & 65535;") in lines


def test_functions_in_c_lie_between_those_that_called_them_and_that_they_call(seen):
    right = total = 0
    for stack, _, count in seen[1]:
        own = [at for at, it in enumerate(stack) if of_source(it)]
        for inner, outer in pairwise(own):
            names = [it["function"] for it in stack[inner : outer + 1]]
            if names[0].startswith("{closure") and names[-1] == "down":
                total += count
                right += count * (names[-2] == "array_map" and len(names) > 3)
    assert total > 100
    assert right / total >= 0.99
