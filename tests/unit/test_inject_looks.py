# SPDX-License-Identifier: Apache-2.0
"""What it costs a program that its data is looked through for calls into device libraries."""

from __future__ import annotations

import mmap
import subprocess
import time

import pytest

from sonde import _native
from stub_driver import PROGRAMS, build, find, start

pytestmark = pytest.mark.machine  # measures how long a program waits


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = build(tmp_path_factory.mktemp("stub"))
    subprocess.run(
        ["cc", "-O1", "-fno-pie", "-no-pie", "-mcmodel=large", "-o", folder / "huge_array",
         PROGRAMS / "huge_array.c", "-Wl,--no-as-needed", folder / "libcuda.so.1",
         f"-Wl,-rpath,{folder}"],
        check=True,
    )  # fmt: skip
    return folder / "huge_array"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("library") / "sonde-inject-0.so"
    path.write_bytes(_native.inject_library())
    return path


def looked_through(program, library, *words):
    process = start(program, library, *words, request="1:1000")
    with find(process.pid) as memory:
        while process.poll() is None:
            memory.heartbeat()
            time.sleep(0.2)
    output = process.communicate()[0]
    assert process.returncode == 0
    longest_ms, tables_kb, cpu_ms, is_found = map(float, output.split())
    return longest_ms, tables_kb, cpu_ms, bool(is_found)


def rested_memory_is_slow():
    """Whether the first access to memory that rested takes far longer than the next ones.

    So it is on some virtual machines: 16 to 60 us a page, 135 to 500 ms for 32 MiB instead of 15.
    """
    with mmap.mmap(-1, 32 << 20) as memory:
        memory.write(bytes(32 << 20))
        time.sleep(1.5)
        began = time.thread_time()
        sum(memory[0 :: mmap.PAGESIZE])
        return time.thread_time() - began > 0.02


def test_a_huge_array_that_nobody_touched_is_not_read(program, library):
    """Of 16 GiB one page is the program's; the word in it is found."""
    longest_ms, tables_kb, cpu_ms, is_found = looked_through(program, library, 3)
    assert is_found
    assert longest_ms < 150
    assert tables_kb < 1_000
    assert cpu_ms < 600


def test_a_large_array_is_read_and_no_dlopen_waits(program, library):
    # Looks take 1/50 of a CPU: they reach 128 MiB in 5 s where memory is fast.
    most_s = 90 if rested_memory_is_slow() else 5
    began = time.monotonic()
    longest_ms, _, cpu_ms, is_found = looked_through(program, library, 5, 32, most_s)
    assert is_found
    assert longest_ms < 150
    assert cpu_ms < 600 + 1000 / 50 * (time.monotonic() - began - 5)


def test_a_look_at_more_than_its_budget_is_cut_and_counted(program, library):
    process = start(program, library, 5, 1024, request="1:1000")
    with find(process.pid) as memory:
        cut = 0
        while process.poll() is None:
            cut = max(cut, memory.seen().counts["looks_cut"])
            time.sleep(0.2)
    longest_ms, _, cpu_ms, _ = map(float, process.stdout.read().split())
    assert longest_ms < 150
    assert cpu_ms < 600
    assert cut > 0
