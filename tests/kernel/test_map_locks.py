# SPDX-License-Identifier: Apache-2.0
"""A user's process maps a device library and keeps its memory map locked: forks of others go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from device_watch import OPENCL, DeviceWatch
from fuse_tenants import TENANT, tenant

from sonde import procfs

pytestmark = [pytest.mark.bpf, pytest.mark.opencl]

FORK_S = 0.5
HOLDS_S = 60
"""No longer: where a test fails, all forks of this machine wait meanwhile."""
LIMIT_S = 45
LIBRARY = str(OPENCL)
WATCH = Path(__file__).with_name("fork_watch.py")
LOSS = "device_calls.probes_put_off"


@contextmanager
def forks_go_on() -> Iterator[None]:
    """No fork of a neighbour takes longer than FORK_S."""
    command = [sys.executable, str(WATCH), str(FORK_S)]
    watch = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert watch.stdout is not None
    try:
        assert watch.stdout.readline() == "ready\n"
        yield
    finally:
        watch.kill()
        slow = watch.stdout.read().split()
        watch.wait()
    assert slow == []


def _wait_until(is_so) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


@pytest.fixture(autouse=True)
def broker() -> Iterator[procfs.Broker]:
    """Nobody is remembered to have made this process wait."""
    procfs.BROKER.patience.reset()
    yield procfs.BROKER
    procfs.BROKER.close()
    procfs.BROKER.patience.reset()


@pytest.mark.parametrize("mode", ["share", "own", "thread"])
def test_a_recording_leaves_out_the_library_and_names_the_process(
    mode: str, tmp_path: Path
) -> None:
    """`share` keeps the lock for reading; `thread` does after its first thread has ended."""
    path = tmp_path / "x.sonde"
    with tenant(mode, limit_s=HOLDS_S, library=LIBRARY) as holds, forks_go_on():
        command = [sys.executable, "-m", "sonde", "record", "-d", "2", "-o", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-m", "sonde", "report", str(path), "--format", "table"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert LOSS in report
    assert f"process {holds.kid} of user {TENANT} maps it and keeps its memory map locked" in report


def test_probes_come_when_the_lock_is_let_go(program) -> None:
    copies = program("opencl/copies", "-lOpenCL")
    with forks_go_on():
        with tenant("share", limit_s=HOLDS_S, library=LIBRARY):
            watch = DeviceWatch()
            watch.collector.start()
            watch.drain()
            assert len(watch.notes_of("probes_put_off")) == 1
            assert not watch.notes_of("probes_attached")
            assert watch.collector.losses()["probes_put_off"] == 1
        try:
            _wait_until(lambda: watch.drain() or watch.notes_of("probes_attached"))
            ran = watch.run(copies, 1000)
            assert watch.totals(ran.pid)["clEnqueueReadBuffer"]
        finally:
            watch.collector.stop()
    assert watch.collector.losses()["probes_put_off"] == 1


def test_one_that_maps_another_file_keeps_nobody_waiting() -> None:
    with tenant("own", limit_s=HOLDS_S, library="/bin/true"), forks_go_on():
        watch = DeviceWatch()
        watch.collector.start()
        watch.drain()
        watch.collector.stop()
    assert watch.notes_of("probes_attached"), watch.notes_of("probes_put_off")
    assert "probes_put_off" not in watch.collector.losses()


def test_probes_that_cannot_come_off_at_the_end_are_left_to_a_child() -> None:
    with tenant("later", limit_s=HOLDS_S, library=LIBRARY) as holds, forks_go_on():
        watch = DeviceWatch()
        watch.collector.start()
        watch.drain()
        assert watch.notes_of("probes_attached")
        os.kill(holds.kid, signal.SIGUSR2)
        time.sleep(0.5)
        began_s = time.monotonic()
        watch.collector.stop()
        assert time.monotonic() - began_s < 10
        [note] = watch.collector.left_behind
        assert f"process {holds.kid} of user {TENANT}" in note
        assert note.endswith(" waits for that")
        child = int(note.split()[-4])
        del watch
        os.kill(child, signal.SIGTERM)
        time.sleep(1)
        assert _links_of(child) > 0
    _wait_until(lambda: _links_of(child) == 0)


MAPPER = """
import ctypes, sys, threading, time
size, count = 512 << 20, 20_000
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.madvise.argtypes = libc.mprotect.argtypes
with open(sys.argv[1]) as file:
    pages = range(count)
    assert all(libc.mmap(0, 4096, 1, 2, file.fileno(), 9 << 12) for page in pages)

def keep_busy():
    area = libc.mmap(0, size, 1, 0x4022, -1, 0)
    libc.madvise(area, size, 15)
    libc.madvise(area, size, 22)
    while True:
        libc.mprotect(area, size, 0)
        libc.mprotect(area, size, 1)

for _ in range(2):
    threading.Thread(target=keep_busy, daemon=True).start()
print("ready", flush=True)
time.sleep(60)
"""


@contextmanager
def maps_it_often() -> Iterator[int]:
    """A user's process maps a page of the library 20,000 times and keeps its threads mapping."""
    command = ["/usr/bin/python3", "-c", MAPPER, LIBRARY]
    with subprocess.Popen(
        command, user=TENANT, group=TENANT, extra_groups=[], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process.pid
        finally:
            process.kill()


def test_one_that_maps_the_library_very_often_stops_no_fork() -> None:
    with maps_it_often() as pid, forks_go_on():
        watch = DeviceWatch()
        watch.collector.start()
        watch.drain()
        watch.collector.stop()
    assert not watch.notes_of("probes_attached")
    [note] = watch.notes_of("probes_put_off")
    assert f"process {pid} of user {TENANT} maps it so often" in note


def test_probes_that_would_stop_forks_at_the_end_wait_until_they_do_not() -> None:
    watch = DeviceWatch()
    watch.collector.start()
    watch.drain()
    assert watch.notes_of("probes_attached")
    with maps_it_often() as pid, forks_go_on():
        watch.collector.stop()
        [note] = watch.collector.left_behind
        assert f"process {pid} of user {TENANT} maps it so often" in note
        child = int(note.split()[-4])
        del watch
        time.sleep(1)
        assert _links_of(child) > 0
    _wait_until(lambda: _links_of(child) == 0)


def _links_of(pid: int) -> int:
    """Links of BPF that a process holds."""
    try:
        return sum("bpf_link" in str(it.readlink()) for it in Path(f"/proc/{pid}/fd").iterdir())
    except (FileNotFoundError, PermissionError):  # it has ended, reaped or not
        return 0
