# SPDX-License-Identifier: Apache-2.0
"""Memory of processes whose runtimes are looked into: what of it is open, and whose it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sonde import procfs
from sonde.unwind import hotspot_layout, v8_layout
from sonde.unwind.hotspot_layout import UnsupportedJvmError
from sonde.unwind.jvm import Jvm
from sonde.unwind.process_memory import ProcessMemory
from sonde.unwind.v8 import V8
from sonde.unwind.v8_layout import UnsupportedV8Error


@pytest.fixture
def other():
    """A process of ours with text at a known address."""
    code = "import ctypes, time; b = ctypes.create_string_buffer(b'here'); "
    code += "print(ctypes.addressof(b), flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        at = int(child.stdout.readline())
        start_ns = procfs.read_stat(child.pid).start_ns
        yield SimpleNamespace(pid=child.pid, key=(child.pid, start_ns), at=at, party=1)
        child.kill()


def opened(pid):
    """How often the child that reads for us has the memory of a process open."""
    fds = Path(f"/proc/{procfs.BROKER._child.pid}/fd")
    links = [str(fd.readlink()) for fd in fds.iterdir() if fd.is_symlink()]
    # Of an instance of procfs that is mounted nowhere the link has no folder of a mount.
    return sum(re.fullmatch(rf"(/proc)?/{pid}/(task/\d+/)?mem", it) is not None for it in links)


def test_who_is_refused_leaves_no_memory_open(other):
    ProcessMemory(*other.key).close()
    for _ in range(3):
        with pytest.raises(UnsupportedJvmError):
            Jvm(other, dict.fromkeys(hotspot_layout.EXPORTS, other.at))
        with pytest.raises(UnsupportedV8Error):
            V8(other, None, dict.fromkeys(v8_layout.EXPORTS, other.at))
    procfs.read_link(f"/proc/{other.pid}/exe")  # requests are served in turn
    assert opened(other.pid) == 0


def test_memory_is_opened_once_more_by_another_child(other):
    memory = ProcessMemory(*other.key)
    assert memory.read_at(4, other.at) == b"here"
    assert opened(other.pid) == 1
    procfs.BROKER.close()
    try:
        found = memory.read_at(4, other.at)
    except OSError:  # that the child is another one is known from its first answer on
        found = memory.read_at(4, other.at)
    assert found == b"here"
    assert opened(other.pid) == 1
    memory.close()
    with pytest.raises(ProcessLookupError):
        memory.read_at(4, other.at)


def test_a_process_that_may_not_be_looked_at_now_may_be_later(other, monkeypatch):
    memory = ProcessMemory(*other.key)
    with monkeypatch.context() as patch:
        patch.setattr(procfs, "read_stat", lambda _: None)
        with pytest.raises(ProcessLookupError):
            memory.read_at(4, other.at)
    assert memory.read_at(4, other.at) == b"here"
    assert opened(other.pid) == 1
    memory.close()


def test_another_process_with_the_pid_is_not_read(other):
    memory = ProcessMemory(other.pid, other.key[1] - 1_000_000_000)
    for _ in range(2):
        with pytest.raises(ProcessLookupError):
            memory.read_at(4, other.at)
    procfs.read_link(f"/proc/{other.pid}/exe")
    assert opened(other.pid) == 0
