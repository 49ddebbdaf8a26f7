# SPDX-License-Identifier: Apache-2.0
"""Rows that one user makes up leave others theirs, where system calls or memory are counted."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from sonde.collect.kernel import Kernel
from sonde.collect.memory import MemoryCollector
from sonde.collect.syscalls import SyscallCollector

pytestmark = pytest.mark.bpf
FLOODER, OTHER = 48_127, 48_128
"""Users without other processes."""
WINDOW_S = 1.074
"""Of a share (bpf/share.h)."""

MADE_UP = """
import ctypes, time
call = ctypes.CDLL(None).syscall
print("ready", flush=True)
number = 2000
while True:
    for number in range(number + 1, number + 20_001):
        call(number)
    time.sleep(0.02)
"""
"""Each number once."""

MANY_PROCESSES = """
import ctypes, os, time
call = ctypes.CDLL(None).syscall
for _ in range(39):
    if not os.fork():
        break
else:
    print("ready", flush=True)
while True:
    for number in range(500, 1000):
        call(number)
    time.sleep(0.1)
"""
"""Numbers that no call has yet."""

CALLS = """
import os, random, time
print("ready", flush=True)
made, until_s = 0, time.monotonic() + 6
while time.monotonic() < until_s:
    time.sleep(random.uniform(0.3, 0.9))
    for _ in range(20):
        os.getpgid(0)
    made += 20
print(made, flush=True)
"""

TOUCHES = """
import mmap, random, time
print("ready", flush=True)
touched, until_s = 0, time.monotonic() + 6
while time.monotonic() < until_s:
    time.sleep(random.uniform(0.3, 0.9))
    with mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for at in range(0, 1 << 20, 4096):
            memory[at] = 1
    touched += 256
print(touched, flush=True)
"""


@contextmanager
def running(user: int, *command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd="/", start_new_session=True,
        user=user, group=user, extra_groups=[],
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def script(source: str) -> tuple[str, ...]:
    return "/usr/bin/python3", "-I", "-c", source


def drained(
    collector: Any, flood: tuple[str, ...], victim: str
) -> tuple[int, int, list[tuple[Any, ...]], float]:
    """Rows that a collector gives, drained once a second as a recorder does: the victim's pid, what
    it counted itself, rows of `activity`, seconds."""
    rows: list[tuple[Any, ...]] = []
    collector.start()
    try:
        with running(FLOODER, *flood):
            time.sleep(2.5)  # its processes are young no more
            collector.drain(0, True)
            began_s = time.monotonic()
            with running(OTHER, *script(victim)) as process:
                while process.poll() is None:
                    time.sleep(1)
                    rows += collector.drain(0, True).rows["activity"]
                took_s = time.monotonic() - began_s
                assert process.stdout is not None
                made = int(process.stdout.read())
            return process.pid, made, rows, took_s
    finally:
        collector.stop()


@pytest.mark.parametrize("flood", [MADE_UP, MANY_PROCESSES], ids=["numbers", "processes"])
def test_calls_that_one_user_makes_up_leave_others_their_names(flood: str) -> None:
    collector = SyscallCollector(Kernel(None))
    pid, made, rows, _ = drained(collector, script(flood), CALLS)
    named = sum(row[10] for row in rows if row[7] == pid and row[2] == "getpgid")
    assert named == made


def test_numbers_of_no_call_are_one_row() -> None:
    collector = SyscallCollector(Kernel(None))
    pid, _, rows, _ = drained(
        collector,
        script(CALLS),
        MADE_UP.replace("while True", "while number < 50_000") + "\nprint(0)",
    )
    names: Counter[str] = Counter()
    for row in rows:
        if row[7] == pid:
            names[row[2]] += row[10]
    assert names["unknown"] > 45_000
    assert not [name for name in names if name.startswith("call ")]
    assert set(collector.losses()) <= {"together"}


def test_memory_of_short_processes_leaves_others_their_rows(program, tmp_path) -> None:
    copy = tmp_path / "memory_forks"
    copy.write_bytes(program("hostile/memory_forks").read_bytes())
    copy.chmod(0o755)
    for part in (tmp_path, *tmp_path.parents[:2]):
        part.chmod(0o755)
    collector = MemoryCollector(Kernel(None), stack_gap_ns=10**7)
    pid, made, rows, took_s = drained(collector, (str(copy),), TOUCHES)
    unmapped = sum(row[12] for row in rows if row[7] == pid and row[1] == "unmapped")
    assert unmapped >= made * 4096
    assert collector.losses()["together"] > 1000, "or the flood was none"
    others = len({row[7] for row in rows} - {pid, 0})
    assert others < 256 * (took_s / WINDOW_S + 2) + 200, "200: what else the machine runs"
