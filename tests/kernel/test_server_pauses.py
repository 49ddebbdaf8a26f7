# SPDX-License-Identifier: Apache-2.0
"""A server's operator pauses a real agent and lets it go on: `sonde collection`."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from served import Server

DEADLINE_S = 60.0


def until(done: Callable[[], bool]) -> None:
    ends = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < ends
        time.sleep(0.1)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "store") as running:
        yield running


def turn(store: Path, action: str) -> None:
    command = [sys.executable, "-m", "sonde", "collection", action, "--store", str(store)]
    subprocess.run(command, check=True, capture_output=True)


def programs(pid: int) -> int:
    """BPF links and perf events that a process holds."""
    held = 0
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(path.readlink())
        except FileNotFoundError:
            continue
        held += target in ("anon_inode:bpf_link", "anon_inode:[perf_event]")
    return held


def test_a_paused_agent_leaves_the_kernel_and_comes_back(server: Server, tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    command = [sys.executable, "-m", "sonde", "agent", "--chunk", "1", "--no-device"]
    command += ["--server", f"http://127.0.0.1:{server.port}", "--spool", str(tmp_path / "spool")]
    with log.open("wb") as output:
        agent = subprocess.Popen(command, stderr=output)
    try:
        server.wait_for(1)
        observing = programs(agent.pid)
        turn(server.store, "pause")
        until(lambda: b"pauses collection" in log.read_bytes())
        # What follows processes stays, so that it knows them when it goes on.
        until(lambda: programs(agent.pid) < observing / 2)
        stored = server.wait_for(1)[0]["chunks"]
        turn(server.store, "resume")
        until(lambda: b"resumes collection" in log.read_bytes())
        server.wait_for(stored + 2, DEADLINE_S)
        until(lambda: programs(agent.pid) >= observing)
    finally:
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(60) == 0, log.read_text()
