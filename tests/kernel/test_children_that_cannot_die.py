# SPDX-License-Identifier: Apache-2.0
"""Children that hang in the kernel: killed, they stay; who started them goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import silent_fuse
from sonde import interpreter, procfs
from sonde.agent.attaching import Attacher
from sonde.attach import remote
from sonde.attach.policy import Policy
from sonde.errors import AttachFailed
from sonde.resolve import source_lines
from sonde.resolve.build_id_links import FoundFile

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="mounts a FUSE file system"
)


@pytest.fixture
def hangs(tmp_path):
    """The command line of a child that hangs until the test is over."""
    with silent_fuse.mounted(tmp_path):
        yield (sys.executable, "-c", f"import os; os.stat({str(tmp_path / 'x')!r})")
    deadline = time.monotonic() + 5
    while interpreter.hanging() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert interpreter.hanging() == 0, "reaped once the kernel lets them die"


def took_s(call):
    """Seconds until a call ended, or infinity after 5."""
    ended = []
    began = time.monotonic()
    thread = threading.Thread(target=lambda: (call(), ended.append(time.monotonic())), daemon=True)
    thread.start()
    thread.join(5)
    return ended[0] - began if ended else float("inf")


def test_a_child_that_cannot_die_is_given_up(hangs):
    def run():
        with pytest.raises(subprocess.TimeoutExpired):
            interpreter.run(hangs, 0.5)

    assert took_s(run) < 3
    assert interpreter.hanging() == 1


def test_the_agent_attaches_to_the_next_process_when_a_tracer_cannot_die(hangs, monkeypatch):
    monkeypatch.setattr(remote, "_PATIENCE_S", 0.3)
    monkeypatch.setattr("sonde.agent.attaching.SETTLE_S", 0.0)
    monkeypatch.setattr("sonde.agent.attaching.mapped_now", lambda _: [])  # not what runs here
    monkeypatch.setattr("sonde.agent.attach_queue.FIRST_PAUSE_S", 0.1)
    children = [subprocess.Popen(["sleep", "30"]) for _ in range(2)]
    loaded = []

    def load(pid, _program):
        if pid == children[0].pid:
            monkeypatch.setattr(interpreter, "command", lambda *_: hangs)
            remote._run([str(pid)], 0.2, procfs.party_of(pid))
        loaded.append(pid)

    attacher = Attacher(Policy("all", []), load=load)
    attacher.start()
    try:
        for child in children:
            attacher.consider(child.pid)
        deadline = time.monotonic() + 6
        while not loaded and time.monotonic() < deadline:
            time.sleep(0.05)
        assert loaded == [children[1].pid]
        rows = {(row[2], row[3]) for row in attacher.rows(0)}
        assert rows == {("attach_failed", children[0].pid), ("attached", children[1].pid)}
        assert attacher.failed == 1
    finally:
        attacher.stop()
        for child in children:
            child.kill()
            child.wait()


def test_tracers_that_cannot_die_stop_attaches_to_their_own_users_processes_alone(
    hangs, monkeypatch
):
    monkeypatch.setattr(remote, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(interpreter, "command", lambda *_: hangs)
    for _ in range(remote.HANGING_OF_PARTY):
        with pytest.raises(AttachFailed, match="in time"):
            remote._run([], 0.2, 12345)
    with pytest.raises(AttachFailed, match="of user 12345 were killed and hang in the kernel"):
        remote._run([], 0.2, 12345)
    monkeypatch.setattr(interpreter, "command", lambda *_: (sys.executable, "-c", "print('{}')"))
    assert remote._run([], 20.0, 20001) == {}


def test_a_reader_of_source_lines_that_cannot_die_costs_its_file_alone(hangs, tmp_path):
    class Seen:
        def open(self, build_id):
            return FoundFile(os.open(os.devnull, os.O_RDONLY), str(tmp_path / build_id))

    found = []
    assert (
        took_s(lambda: found.append(source_lines.look_up({"a": [1]}, Seen(), hangs, file_s=0.3)))
        < 4
    )
    assert found[0].failed == 1
