# SPDX-License-Identifier: Apache-2.0
"""Device time under the Python lines that asked for it, through code without frame pointers: a real
program, the library and the kernel's walk, on a stub of the CUDA driver."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from sonde.query.capture import read
from sonde.query.session import Session
from stub_driver import PROGRAMS, build

pytestmark = pytest.mark.bpf
LINES = {
    name: number
    for number, line in enumerate((PROGRAMS / "three_functions.py").read_text().splitlines(), 1)
    for name in ("embed", "attend", "project")
    if line == f"    {name}()"
}
"""Where `layer` calls each."""


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    where = build(tmp_path_factory.mktemp("stub"))
    subprocess.run(
        ["cc", "-O2", "-fomit-frame-pointer", "-shared", "-fPIC", "-o", where / "libruntime.so",
         PROGRAMS / "runtime.c", where / "libcuda.so.1", f"-Wl,-rpath,{where}"],
        check=True,
    )  # fmt: skip
    return where / "libruntime.so"


def sonde(*words):
    done = subprocess.run(
        [sys.executable, "-m", "sonde", *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def asked_in(text):
    """ns by function, as the program prints at its end."""
    lines = (line.split() for line in text.splitlines())
    return {words[0]: int(words[1]) for words in lines if words[:1] and words[0] in LINES}


def check(capture, asked):
    """Device time is under the functions and lines that asked for it, in their shares."""
    session = Session(read(capture))
    rows = session.rows(
        "SELECT stack, weight, CAST(end_time_ns - start_time_ns AS DOUBLE) FROM device_run"
        " ORDER BY start_time_ns"
    )
    sums, squares = dict.fromkeys(asked, 0.0), 0.0
    unplaced = 0
    for stack, weight, ns in rows:
        frames = session.stacks[stack]
        callers = [frame for frame in frames if frame.kind == "python"]
        names = [frame.function for frame in callers]
        if not names or names[0] not in asked or "layer" not in names:
            unplaced += sums["attend"] > 0  # from where the tables to walk by are made
            continue
        assert callers[names.index("layer")].line == LINES[names[0]]
        assert "sonde" not in frames[0].binary, "the library's own frames are left out"
        assert "runtime_launch" in [frame.function for frame in frames]
        sums[names[0]] += weight * ns
        squares += weight * (weight - 1) * ns * ns
    assert len(rows) > 200
    assert unplaced < 0.02 * len(rows), unplaced
    whole, truth = sum(sums.values()), sum(asked.values())
    for name, ns in asked.items():
        assert abs(sums[name] / whole - ns / truth) < 4 * squares**0.5 / whole + 0.01, name


def test_shares_by_python_function_and_line(runtime, tmp_path):
    capture = tmp_path / "launches.sonde"
    program = (sys.executable, PROGRAMS / "three_functions.py", runtime, 6)
    check(capture, asked_in(sonde("record", "-o", capture, "--", *program)))


def test_of_a_process_that_was_attached_to(runtime, tmp_path):
    capture = tmp_path / "launches.sonde"
    process = subprocess.Popen(
        [sys.executable, PROGRAMS / "three_functions.py", runtime, "60"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "ready\n"
        sonde("attach", process.pid)
        sonde("record", "-o", capture, "-p", process.pid, "-d", 6)
        process.send_signal(signal.SIGTERM)  # it prints what it did, then
        check(capture, asked_in(process.communicate()[0]))
    finally:
        process.kill()
        process.wait()
