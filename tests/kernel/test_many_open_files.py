# SPDX-License-Identifier: Apache-2.0
"""The kernel visits a million open files at a time; a scan goes on where it stopped. Where there
are more than a scan has time for, it takes processes in turns, so that everybody's are looked at.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sonde.collect import flows
from sonde.collect.flows import FlowCollector
from sonde.collect.kernel import Kernel

pytestmark = pytest.mark.bpf

FILES, PROCESSES = 18_000, 60
SHARES_ITS_FILES = f"""
import ctypes, os, resource, signal
libc = ctypes.CDLL(None)
resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES} + 100, {FILES} + 100))
file = os.open("/dev/null", os.O_RDONLY)
for _ in range({FILES}):
    os.dup(file)
CLONE, CLONE_FILES, PR_SET_PDEATHSIG = 56, 0x400, 1
for _ in range({PROCESSES}):
    if libc.syscall(CLONE, CLONE_FILES | signal.SIGCHLD, 0, 0, 0, 0) == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.pause()
print("ready", flush=True)
libc.pause()
"""
FLOODER, OTHER = 48_129, 48_130
"""Users without other processes."""
SENDS = """
import socket, time
with socket.create_server(("127.0.0.1", 0)) as server:
    client = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
print("ready", flush=True)
while True:
    client.sendall(bytes(1000))
    accepted.recv(1000, socket.MSG_WAITALL)
    time.sleep(0.01)
"""


@contextmanager
def running(user: int, source: str) -> Iterator[int]:
    command = ["/usr/bin/python3", "-I", "-c", source]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd="/", user=user, group=user, extra_groups=[]
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process.pid
        finally:
            process.kill()


@pytest.fixture
def many_files() -> Iterator[None]:
    """A process whose many files others share: more than a million to visit."""
    command = [sys.executable, "-c", SHARES_ITS_FILES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield
        process.kill()


@pytest.fixture(params=["shared", "copied"])
def farm(request: pytest.FixtureRequest) -> Iterator[None]:
    """One user's files, of which a scan would pass tens of millions: a table that many processes
    share, or one for each."""
    source = SHARES_ITS_FILES.replace(f"range({PROCESSES})", "range(1500)")
    if request.param == "copied":
        source = source.replace("CLONE_FILES |", "").replace("1500", "400")
    with running(FLOODER, source):
        yield


def test_connections_are_counted_beside_a_million_open_files(many_files: None) -> None:
    collector = FlowCollector(Kernel(None))
    collector.start()
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        served, _ = server.accept()
        with client, served:
            client.sendall(b"x" * 10_000)
            assert served.recv(10_000, socket.MSG_WAITALL)
            batch = collector.drain(0, True)
    collector.stop()

    sent = sum(
        row[12] for row in batch.rows["activity"] if row[4] == "send" and row[7] == os.getpid()
    )
    assert sent == 10_000
    assert "walks_skipped" not in collector.losses()


@pytest.mark.usefixtures("farm")
def test_files_of_one_user_take_no_connection_of_another() -> None:
    if not flows.has_iterators_of_threads():
        pytest.skip("needs Linux 6.1")
    collector = FlowCollector(Kernel(None))
    with running(OTHER, SENDS) as old:
        collector.start()
        with running(OTHER, SENDS) as new:
            sent = {old: 0, new: 0}
            longest_s = 0.0
            until_s = time.monotonic() + 16
            while time.monotonic() < until_s:
                time.sleep(4)  # nearly as a recorder does at the end of each chunk
                began_s = time.thread_time()
                rows = collector.drain(0, True).rows.get("activity", [])
                longest_s = max(longest_s, time.thread_time() - began_s)
                for pid in sent:
                    sent[pid] += sum(row[12] for row in rows if row[4] == "send" and row[7] == pid)
    collector.stop()
    assert min(sent.values()) > 300_000, "of some 1.4 million"
    assert longest_s < 0.3, "a generous bound, for a noisy machine"
