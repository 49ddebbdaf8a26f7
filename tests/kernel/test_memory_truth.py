# SPDX-License-Identifier: Apache-2.0
"""Host memory by stack, against programs that map and touch a known number of bytes."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import defaultdict
from contextlib import contextmanager

import pytest

from sonde.model.profile import ProfileKind
from sonde.query.memory import growth, memory
from sonde.query.queries import profile

pytestmark = pytest.mark.bpf

UNIT = 256 << 10
LARGE = 16 << 20
"""A mapping of this size always has a stack."""
PAGE = 4096
ROUNDS = 80
PAUSE_US = 12_000
"""80 of them are several ticks and chunks of a quarter of a second."""


@contextmanager
def started(*command):
    """A program that prints when it is ready, works when it reads a line, and prints when done."""
    process = subprocess.Popen(
        list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def recorded(record, *command, **settings):
    """The capture of a program's work, from its first to its last byte."""
    with started(*command) as process:
        flags = ("--memory", "--no-offcpu", "-p", str(process.pid))
        with record(*flags, tick_s=0.25, **settings) as recorder:
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"
    return recorder


def by_function(session, kind, *functions):
    """(events, bytes) of the stacks that lead through each of some functions."""
    found = profile(session, ProfileKind.from_column(kind))
    sums = defaultdict(lambda: [0, 0])
    for row in found:
        names = {frame.function for frame in found.stacks[row.stack]}
        for name in names.intersection(functions):
            sums[name][0] += row.events
            sums[name][1] += row.bytes
    return {name: tuple(sums[name]) for name in functions}


def test_growth_is_reported_by_function_to_the_byte(record, program):
    recorder = recorded(record, program("truth/memory"), "grow", ROUNDS, PAUSE_US, stack_gap_ms=0)
    mapped = by_function(recorder.session, "mapped", "grow_much", "grow_little")
    assert mapped == {
        "grow_much": (ROUNDS, ROUNDS * 3 * UNIT),
        "grow_little": (ROUNDS, ROUNDS * UNIT),
    }
    assert by_function(recorder.session, "held", "grow_much", "grow_little") == mapped
    touched = by_function(recorder.session, "faulted", "grow_much", "grow_little")
    assert touched == {
        "grow_much": (ROUNDS * 3 * UNIT // PAGE, ROUNDS * 3 * UNIT),
        "grow_little": (ROUNDS * UNIT // PAGE, ROUNDS * UNIT),
    }
    (use,) = memory(recorder.session)
    assert use.mapped_bytes == pytest.approx(ROUNDS * 4 * UNIT, rel=0.01)
    assert use.faulted_bytes == pytest.approx(ROUNDS * 4 * UNIT, rel=0.02)
    assert not recorder.losses()


def test_samples_of_many_faults_stand_for_all_of_them(record, program):
    rounds, gap_ms = 400, 0.05
    recorder = recorded(record, program("truth/memory"), "churn", rounds, 0, stack_gap_ms=gap_ms)
    faults = rounds * 16 * UNIT // PAGE
    (use,) = memory(recorder.session)
    assert use.faults == pytest.approx(faults, rel=0.01)
    ((taken, most),) = recorder.rows(
        "SELECT count(*), max(weight_count) FROM sample WHERE kind = 'faulted'"
    )
    assert taken and most > 1, "all were taken: nothing is shown"
    weights = recorder.rows("SELECT weight_count FROM sample WHERE kind = 'faulted'")
    # Rows sum several samples; each stands for no more than the greatest divisor.
    sigma = math.sqrt(sum(weight for (weight,) in weights) * min(most, 1024))
    ((events, _),) = by_function(recorder.session, "faulted", "churn").values()
    assert abs(events - faults) < 5 * sigma
    assert 5 * sigma < 0.5 * faults


def test_what_is_unmapped_is_taken_from_who_mapped_it(record, program):
    recorder = recorded(record, program("truth/memory"), "cycle", ROUNDS, PAUSE_US, stack_gap_ms=0)
    mapped = by_function(recorder.session, "mapped", "come_and_go")
    assert mapped["come_and_go"] == (4 * ROUNDS, ROUNDS * 11 * UNIT)  # mremap maps again
    assert by_function(recorder.session, "held", "come_and_go")["come_and_go"] == (0, 0)
    assert not growth(recorder.session)


@pytest.mark.parametrize(("mode", "function"), [("over", "move_over"), ("many", "unmap_many")])
def test_an_end_that_outlives_its_mapping_takes_nothing_from_another(
    mode, function, record, program
):
    """More was taken from it than it had; its size below zero then ended the recorder."""
    command = (program("truth/memory"), mode, ROUNDS, PAUSE_US)
    recorder = recorded(record, *command, stack_gap_ms=0, chunk_s=0.25)
    assert by_function(recorder.session, "mapped", function)[function][1] > 0
    assert by_function(recorder.session, "held", function)[function] == (0, 0)


def test_no_end_is_left_of_what_another_mapping_replaced(record, program):
    """One program filled the map of ends, and tails that others unmapped were held by them still.
    Not compared with /proc/PID/maps until all is done: that deletes such ends, too."""
    with (
        started(program("truth/memory"), "many_over", 18_000, 0) as many,
        started(program("truth/memory"), "tail", ROUNDS, 0) as other,
    ):
        flags = ("--memory", "--no-offcpu", "-p", str(many.pid), str(other.pid))
        with record(*flags, tick_s=0.25, chunk_s=60) as recorder:
            for process in (many, other):
                process.stdin.write("go\n")
                process.stdin.flush()
                assert process.stdout.readline() == "done\n"
    assert by_function(recorder.session, "mapped", "map_over_many", "tail_first") == {
        "map_over_many": (1 + 18_000 * 18, (1 + 18_000) * 34 * LARGE),
        "tail_first": (ROUNDS, ROUNDS * 2 * LARGE),
    }
    assert by_function(recorder.session, "held", "tail_first")["tail_first"] == (0, 0)
    assert "memory.mappings" not in recorder.losses()


@pytest.mark.parametrize("chunk_s", [5.0, 0.25])
def test_a_hole_is_seen_in_the_list_of_mappings(chunk_s, record, program):
    """However often that list is looked at: when each chunk ends."""
    command = (program("truth/memory"), "hole", ROUNDS, PAUSE_US)
    recorder = recorded(record, *command, stack_gap_ms=0, chunk_s=chunk_s)
    held = by_function(recorder.session, "held", "cut_hole")
    assert held["cut_hole"] == (ROUNDS, ROUNDS * 2 * UNIT)


def test_the_heap_goes_up_and_down(record, program):
    recorder = recorded(
        record, program("truth/memory"), "breathe", ROUNDS, PAUSE_US, stack_gap_ms=0
    )
    mapped = by_function(recorder.session, "mapped", "breathe")
    assert mapped["breathe"] == (2 * ROUNDS, ROUNDS * 3 * UNIT)
    assert by_function(recorder.session, "held", "breathe")["breathe"] == (0, 0)


def test_pages_touched_by_a_system_call(record, program):
    recorder = recorded(record, program("truth/memory"), "read", ROUNDS, PAUSE_US, stack_gap_ms=0)
    touched = by_function(recorder.session, "faulted", "read_into")
    assert touched["read_into"] == (ROUNDS * UNIT // PAGE, ROUNDS * UNIT)


def test_a_leak_is_suspected_and_what_comes_and_goes_is_not(record, program):
    recorder = recorded(record, program("truth/memory"), "leak", 150, 20_000)
    suspects = {it.frames[0]: it for it in growth(recorder.session) if it.is_suspect}
    assert suspects.keys() == {"leak_large", "leak_small"}
    assert suspects["leak_large"].bytes == pytest.approx(150 * (UNIT + PAGE), rel=0.2)
    assert suspects["leak_small"].bytes == pytest.approx(150 * 256 * 1008, rel=0.2)


PYTHON = """
import sys, time
import numpy as np

def keep_much():
    kept.append(np.ones(3 << 17))

def keep_little():
    kept.append(np.ones(1 << 17))

def come_and_go():
    return np.ones(1 << 20).sum()

kept = []
print("ready", flush=True)
sys.stdin.readline()
for _ in range(60):
    keep_much()
    keep_little()
    come_and_go()
    time.sleep(0.02)
print("done", flush=True)
sys.stdin.readline()
"""


def test_python_and_numpy_by_their_own_functions(record):
    # With a threshold that stays malloc asks the kernel for each large array; else what
    # come_and_go gave back would serve the others.
    command = ("env", "MALLOC_MMAP_THRESHOLD_=131072", sys.executable, "-c", PYTHON)
    recorder = recorded(record, *command, stack_gap_ms=0)
    mapped = by_function(recorder.session, "mapped", "keep_much", "keep_little", "come_and_go")
    # a page more each, for malloc's own header
    assert mapped["keep_much"] == (60, 60 * ((3 << 20) + PAGE))
    assert mapped["keep_little"] == (60, 60 * ((1 << 20) + PAGE))
    touched = by_function(recorder.session, "faulted", "keep_much", "keep_little", "come_and_go")
    assert touched["keep_much"][1] == pytest.approx(60 * (3 << 20), rel=0.02)
    assert touched["keep_little"][1] == pytest.approx(60 * (1 << 20), rel=0.02)
    suspects = [it for it in growth(recorder.session) if it.is_suspect]
    blamed = {name for it in suspects for name in it.frames}
    assert {"keep_much", "keep_little"} <= blamed
    assert "come_and_go" not in blamed


def test_nothing_of_memory_is_recorded_unless_asked_for(record, program):
    with (
        started(program("truth/memory"), "churn", 5, 0) as process,
        record("-p", str(process.pid)) as recorder,
    ):
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"
    assert not recorder.rows("SELECT 1 FROM sample WHERE kind IN ('mapped', 'faulted') LIMIT 1")
    assert not memory(recorder.session)
