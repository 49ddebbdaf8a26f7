# SPDX-License-Identifier: Apache-2.0
"""Mappings that one user makes do not keep those of others from being followed, and what is not
followed is not held by anybody."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sonde.query.memory import growth, memory

pytestmark = pytest.mark.bpf
FLOODER, OTHER = 48_125, 48_126
"""Users without other processes."""
MOST = 16_384
"""Mappings that are followed (bpf/memory_mappings.h)."""

CALLS = """
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
MB, NOTHING, BOTH = 1 << 20, 0, 3
print("ready", flush=True)
sys.stdin.readline()
"""
FLOOD = (
    CALLS
    + """
base = libc.mmap(None, 17_000 * 17 * MB, NOTHING, 0x4022, -1, 0)
libc.munmap(base, 17_000 * 17 * MB)
made = [libc.mmap(base + at * 17 * MB, 16 * MB, NOTHING, 0x104022, -1, 0) for at in range(17_000)]
print(sum(1 for it in made if it), flush=True)
sys.stdin.readline()
"""
)
HONEST = (
    CALLS
    + """
def take():
    at = libc.mmap(None, 20 * MB, BOTH, 0x22, -1, 0)
    time.sleep(0.02)
    libc.munmap(at, 20 * MB)
for _ in range(50):
    take()
print("done", flush=True)
sys.stdin.readline()
"""
)


@contextmanager
def running(user: int, source: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        ["/usr/bin/python3", "-I", "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, cwd="/", user=user, group=user, extra_groups=[],
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def go_on(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline()


@pytest.mark.parametrize("victim", [0, OTHER], ids=["root", "a user"])
def test_a_users_empty_mappings_make_no_leak_of_anothers(record, victim):
    with running(FLOODER, FLOOD) as flooder, running(victim, HONEST) as honest:
        pids = [str(flooder.pid), str(honest.pid)]
        with record("--memory", "--no-offcpu", "-p", *pids, tick_s=0.25) as recorder:
            assert go_on(flooder) == "17000\n"
            assert go_on(honest) == "done\n"
    held = {one.process.pid: one.bytes for one in growth(recorder.session)}
    mapped = {one.process.pid: one.mapped_bytes for one in memory(recorder.session)}

    assert mapped[honest.pid] >= 50 * 20 << 20
    assert held.get(honest.pid, 0) <= 20 << 20
    assert recorder.losses()["memory.mappings"] >= 17_000 - MOST
