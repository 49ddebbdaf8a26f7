# SPDX-License-Identifier: Apache-2.0
"""OpenCL programs that know what they called, wherever their library comes from."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from device_watch import OPENCL, VENDORS, DeviceWatch, Program, compare, truth_of

from sonde import apis
from sonde.model.calls import STATUS_UNKNOWN

PROGRAMS = Path(__file__).parents[1] / "programs"

pytestmark = [pytest.mark.bpf, pytest.mark.opencl]

MANY = 100_000
SOME = 3_000
AT_ENTRY = {call.function for api in apis.load() for call in api.calls if call.calls_back}


@pytest.fixture(scope="module")
def copies(program):
    return program("opencl/copies", "-lOpenCL")


def test_reads_every_kind_of_argument(program):
    """Sizes as one argument, as a product, behind a pointer; on the stack; every kind of status."""
    with DeviceWatch(launches=True) as watch:
        ran = watch.run(program("opencl/every_call", "-lOpenCL"))
    truth: Counter[tuple[str, str, int]] = Counter()
    sizes: Counter[tuple[str, str, int]] = Counter()
    for line in ran.lines:
        function, size, direction, status = line.split()
        seen = STATUS_UNKNOWN if function in AT_ENTRY else int(status)
        key = (function, direction.strip("-"), seen)
        truth[key] += 1
        sizes[key] += int(size)
    assert {key[1:]: n for key, n in watch.calls.items() if key[0] == ran.pid} == dict(truth)
    assert {key[1:]: n for key, n in watch.bytes.items() if key[0] == ran.pid} == dict(sizes)
    assert watch.collector.losses() == {}


def test_launches_are_counted_on_request_only(program):
    with DeviceWatch() as watch:
        ran = watch.run(program("opencl/every_call", "-lOpenCL"))
    assert "clEnqueueNDRangeKernel" not in watch.totals(ran.pid)
    assert "clEnqueueReadBuffer" in watch.totals(ran.pid)


def test_a_hundred_thousand_copies_and_buffers(copies):
    with DeviceWatch() as watch:
        compare(watch, watch.run(copies, MANY))


def test_launched_before_the_recorder(copies):
    program = Program(copies, MANY, "hold")
    program.wait_for("ready")
    with DeviceWatch() as watch:
        program.go()
        watch.finish(program)
        compare(watch, program)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_python_program_with_the_loader_of_its_wheel(when):
    if find_spec("pyopencl") is None:  # not imported: this process would then use a device
        pytest.skip("needs pyopencl")
    command = (sys.executable, PROGRAMS / "opencl/copies.py", MANY, "hold")
    if when == "before":
        program = Program(*command, env=VENDORS)
        program.wait_for("ready")
    with DeviceWatch() as watch:
        if when == "after":
            program = Program(*command, env=VENDORS)
            watch.follow(program, "ready")
        program.go()
        watch.finish(program)
        assert any(
            "pyopencl" in text or "libOpenCL-" in text for text in watch.notes_of("probes_attached")
        )
        compare(watch, program)


def test_in_another_mount_namespace(copies, tmp_path):
    """The library lies where only that namespace has a file."""
    place = tmp_path / "elsewhere"
    place.mkdir()
    script = (
        f"mount -t tmpfs none {place} && cp {OPENCL} {place}/libOpenCL.so.1 && "
        f"LD_LIBRARY_PATH={place} exec {copies} {SOME} hold"
    )
    with DeviceWatch() as watch:
        program = Program("unshare", "-m", "sh", "-c", script)
        watch.follow(program, "ready")
        assert not list(place.iterdir())
        program.go()
        watch.finish(program)
        compare(watch, program)


@pytest.mark.parametrize("when", ["before", "after"])
def test_from_a_deleted_library(copies, tmp_path, when):
    library = tmp_path / "libOpenCL.so.1"
    shutil.copy(OPENCL, library)
    program = Program(copies, SOME, "hold", env={"LD_LIBRARY_PATH": str(tmp_path)})
    program.wait_for("ready")
    if when == "before":
        library.unlink()
    with DeviceWatch() as watch:
        if when == "after":
            library.unlink()
        program.go()
        watch.finish(program)
        compare(watch, program)


@pytest.mark.parametrize("stripped", [False, True])
def test_linked_into_the_program(program, tmp_path, stripped):
    """Its own entry points call those of the library: once. Stripped, only the latter count."""
    loader = str(PROGRAMS / "opencl/static_loader.c")
    binary = tmp_path / "copies"
    shutil.copy(program("opencl/copies", loader, "-ldl"), binary)
    if stripped:
        subprocess.run(["strip", str(binary)], check=True)
    with DeviceWatch() as watch:
        ran = Program(binary, SOME, "hold")
        watch.follow(ran, "ready")
        ran.go()
        watch.finish(ran)
        compare(watch, ran)
        found = any(text.endswith(" of copies") for text in watch.notes_of("probes_attached"))
        assert found is not stripped


def test_many_that_live_for_a_moment(copies):
    """The library was known before they began: each is seen from its first call to its last."""
    with DeviceWatch() as watch:
        programs = []
        for _ in range(20):
            programs += [Program(copies, 20), Program(copies, 21)]
            watch.finish(*programs[-2:])
        for ran in programs:
            compare(watch, ran)


def test_several_versions_of_a_library_side_by_side(copies, tmp_path):
    programs = []
    with DeviceWatch() as watch:
        for version in range(4):
            place = tmp_path / str(version)
            place.mkdir()
            shutil.copy(OPENCL, place / "libOpenCL.so.1")
            programs.append(Program(copies, SOME, "hold", env={"LD_LIBRARY_PATH": str(place)}))
            watch.follow(programs[-1], "ready")
        for ran in programs:
            ran.go()
        watch.finish(*programs)
        assert len(watch.notes_of("probes_attached")) >= 4
        for ran in programs:
            compare(watch, ran)


def test_watches_only_the_chosen_processes(copies):
    watched, other = Program(copies, SOME, "hold"), Program(copies, SOME, "hold")
    watched.wait_for("ready")
    other.wait_for("ready")
    with DeviceWatch(pids=[watched.pid]) as watch:
        for ran in (watched, other):
            ran.go()
        watch.finish(watched, other)
        compare(watch, watched)
        assert watch.totals(other.pid) == {}


def test_weights_estimate_the_totals_and_spans_are_bounded(copies):
    """About a hundred stacks a second stand for all calls; the bounds are four deviations wide."""
    with DeviceWatch() as watch:
        ran = watch.run(copies, 30_000)
    truth = truth_of(ran)
    samples = [sample for function in truth for sample in watch.samples[ran.pid, function]]
    assert sum(sample[1] for sample in samples) == pytest.approx(
        sum(count for count, _ in truth.values()), rel=0.4
    )
    assert sum(sample[3] for sample in samples) == pytest.approx(
        sum(size for _, size in truth.values()), rel=0.6
    )
    kept = sum(len(part["direction"]) for part in watch.spans)
    left_out = sum(int(row[5]) for row in watch.events if row[2] == "spans_left_out")
    assert 0 < kept < 10_000
    ended = [n for (*_, status), n in watch.calls.items() if status != STATUS_UNKNOWN]
    assert kept + left_out == sum(ended)  # of the whole machine, as both are
