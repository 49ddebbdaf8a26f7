# SPDX-License-Identifier: Apache-2.0
"""Stacks of Go programs, whose runtime goes to and fro between stacks."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from bench.stacks.entries import Entries
from bench.stacks.programs import HERE
from user_stacks import user_stacks

pytestmark = pytest.mark.bpf

HZ = 997
WHOLE = 0.995


@pytest.fixture(scope="module", params=["with its symbols", "stripped"])
def seen(request, tmp_path_factory, record):
    """(native frames from the innermost on, whether the last is an entry, samples)."""
    if shutil.which("go") is None:
        pytest.skip("needs go")
    symbols = path = tmp_path_factory.mktemp("go") / "goroutines"
    build = ["go", "build", "-o"]
    subprocess.run([*build, path, HERE / "goroutines.go"], check=True)
    if request.param == "stripped":  # the same code at the same addresses
        path = symbols.with_name("stripped")
        subprocess.run([*build, path, "-ldflags", "-s -w", HERE / "goroutines.go"], check=True)
    program = subprocess.Popen([path])
    try:
        with record("-F", str(HZ), "-p", str(program.pid), "-d", "5") as recorder:
            recorder.process.wait(60)
        entries = Entries(program.pid, symbols)
    finally:
        program.kill()
        program.wait()
    return [
        ([it["function"].removesuffix(".abi0") for it in stack], is_whole, count)
        for stack, is_whole, count in user_stacks(recorder.capture.tables, entries)
    ]


def share(seen, *functions):
    """Whole ones of the stacks that have one of the functions, of all without; their number."""
    of_them = [it for it in seen if not functions or set(functions) & set(it[0])]
    total = sum(count for _, _, count in of_them)
    return sum(count for _, whole, count in of_them if whole) / max(total, 1), total


def test_stacks_reach_where_goroutines_and_threads_begin(seen):
    whole, total = share(seen)
    assert total > 300
    assert whole >= WHOLE


@pytest.mark.parametrize("function", ["clock_gettime", "runtime.sigtramp", "runtime.newstack"])
def test_so_do_those_on_the_threads_own_stack_and_on_that_of_signals(seen, function):
    whole, total = share(seen, function)
    assert total > 10
    assert whole >= 0.99


def test_the_vdsos_clock_is_read_for_the_goroutine_that_asked(seen):
    asked = [(names, count) for names, _, count in seen if "time.now" in names]
    total = sum(count for _, count in asked)
    right = sum(n for names, n in asked if "main.clocks" in names or "runtime.goexit" in names)
    assert total > 10
    assert right / total >= 0.99


def test_a_stack_is_copied_for_the_goroutine_that_grows(seen):
    # By those that are grown: what garbage is collected of is made smaller here, too.
    copied = [it for it in seen if "runtime.copystack" in it[0] and "main.grow" in it[0]]
    assert copied
    for names, whole, _ in copied:
        assert whole
        assert names.index("runtime.copystack") < names.index("main.grow")
        assert names[-1] == "runtime.goexit"
