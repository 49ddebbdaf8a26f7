# SPDX-License-Identifier: Apache-2.0
"""The kernel visits a million open files at a time; a scan goes on where it stopped."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

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


@pytest.fixture
def many_files() -> Iterator[None]:
    """A process whose many files others share: more than a million to visit."""
    command = [sys.executable, "-c", SHARES_ITS_FILES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield
        process.kill()


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
