# SPDX-License-Identifier: Apache-2.0
"""Stacks of a Ruby that was started without any flag for profilers, and is left alone."""

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

SOURCE = Path(__file__).parents[1] / "programs/ruby/call_tree.rb"
DEPTH = 10
CASES = {"one thread": 1, "threads": 4}
RUBY = shlex.split(os.environ.get("SONDE_TEST_RUBY") or shutil.which("ruby") or "")
"""Another build can be tried by that variable; SONDE_TEST_RUBY_SOURCE: the program's path in it."""
CALLERS = {
    "spin": {"heavy", "light", "rescue in caught"},
    "heavy": {"down"},
    "light": {"down"},
    "caught": {"down"},
    "rescue in caught": {"caught"},
    "block in down": {"down"},
    "down": {
        *("block in down", "block in work", "others", "block in <class:Others>"),
        *("method_missing", "block (2 levels) in others"),
    },
    "others": {"block in work"},
    "block in <class:Others>": {"others"},
    "method_missing": {"others"},
    "respond_to_missing?": {"others"},
    "block in others": {"others", None},  # an enumerator's, on a fiber
    "block (2 levels) in others": {"block in others"},
    "block in work": {"work"},
    "work": {"<main>", "block (2 levels) in <main>"},
    "block (2 levels) in <main>": {None},
    "block in <main>": {"<main>"},
    "<main>": {None},
}


@pytest.fixture(params=CASES)
def seen(request, record):
    """[(frames of user code from the innermost on, whether whole, samples)]."""
    if not RUBY:
        pytest.skip("needs ruby")
    source = os.environ.get("SONDE_TEST_RUBY_SOURCE") or str(SOURCE)
    command = [*RUBY, source, "2000", str(CASES[request.param])]
    return recorded_once(request, lambda: stacks_of(command, record, 8))


def of_source(row):
    """Whether a frame is of the program's file."""
    return row["file"].rpartition("/")[2] == SOURCE.name


def of_program(stack):
    """Functions of the program on a stack, from the innermost on."""
    return [it["function"] for it in stack if of_source(it)]


def is_right(names):
    """Whether that is a path of the program's call tree, from the thread's first function on."""
    if not all(
        caller in CALLERS[name] for name, caller in zip(names, [*names[1:], None], strict=True)
    ):
        return False
    downs = names.count("block in down")
    if names[0] in ("spin", "heavy", "light", "caught") and "others" not in names:
        return downs in (0, DEPTH) if names[-1] == "block in others" else downs == DEPTH
    return downs <= DEPTH


def test_stacks_reach_the_entry_of_their_thread(seen):
    # An enumerator's fiber has a stack with another beginning.
    of_threads = [it for it in seen if "block in others" not in of_program(it[0])]
    reach_their_entry(of_threads, 150)


def test_functions_are_named_in_the_order_of_the_calls(seen):
    counts = Counter()
    wrong = Counter()
    begins = 0  # of an enumerator's fiber, where no function of the program is called yet
    for stack, is_whole, count in seen:
        names = of_program(stack)
        if not names and not is_whole:
            begins += count
            continue
        right = bool(names) and is_right(names)
        counts[right] += count
        if not right:
            wrong[tuple(it["function"] for it in stack)] += count
    assert counts.total() > 150
    assert begins / counts.total() < 0.03
    assert counts[True] / counts.total() >= 0.99, wrong.most_common(3)


def test_time_is_that_of_the_functions_that_took_it(seen):
    by = Counter()
    for stack, _, count in seen:
        names = of_program(stack)
        if names[:1] == ["spin"]:
            by[names[1]] += count
    shares_are_three_to_one(by)


def test_lines_are_those_that_run(seen):
    text = SOURCE.read_text().splitlines()
    lines = {
        (it["function"], text[it["line"] - 1].strip())
        for stack, *_ in seen
        for it in stack
        if of_source(it)
    }
    assert ("heavy", "spin(3 * n) ^ 1") in lines
    assert ("rescue in caught", "spin(n) ^ 3") in lines
    assert ("block in down", "total += down(it, n)") in lines
    assert ("down", "[depth - 1].each do |it|") in lines
    assert ("down", "heavy(n) + light(n) + caught(n)") in lines
    assert ("spin", "x = (x * 25_173 + 13_849) & 65_535") in lines


def test_functions_in_c_lie_between_those_that_called_them_and_that_they_call(seen):
    """Array#each as Ruby knows it, and the native code of it."""
    right = total = 0
    for stack, _, count in seen:
        names = [it["function"] for it in stack]
        own = [at for at, it in enumerate(stack) if of_source(it)]
        for inner, outer in pairwise(own):
            if names[inner] != "block in down":
                continue
            total += count
            between = names[inner + 1 : outer]
            right += count * (between[-1:] == ["each"] and "rb_ary_each" in between)
    assert total > 100
    assert right / total >= 0.99
