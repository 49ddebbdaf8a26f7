# SPDX-License-Identifier: Apache-2.0
"""A real agent that runs on: paused, reloaded, watched by its service manager."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from served import Server

pytestmark = pytest.mark.bpf

PATIENCE_S = 60.0


class Agent:
    """`sonde agent` with a file of settings, a page and a service manager."""

    def __init__(self, folder: Path, settings: str) -> None:
        self.config, self.log = folder / "config.toml", folder / "agent.log"
        self.config.write_text(settings)
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.manager.bind(str(folder / "notify"))
        self.manager.setblocking(False)
        self.reported = ""
        command = [sys.executable, "-m", "sonde", "agent", "--spool", str(folder / "spool")]
        command += ["--node", "one", "--prometheus", "127.0.0.1:0", "--no-device"]
        environ = os.environ | {
            "SONDE_CONFIG": str(self.config),
            "NOTIFY_SOCKET": str(folder / "notify"),
            "WATCHDOG_USEC": "2000000",
        }
        with self.log.open("w") as err:
            self.process = subprocess.Popen(command, stderr=err, env=environ)

    def until(self, done: Callable[[], object]) -> None:
        ends = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < ends, self.log.read_text()
            time.sleep(0.1)

    def has_reported(self, text: str) -> bool:
        """To the manager, since `reported` was cleared."""
        while True:
            try:
                self.reported += self.manager.recv(4_096).decode() + "\n"
            except BlockingIOError:
                return text in self.reported

    def get(self, path: str) -> str:
        """A page of the agent."""
        url = self.log.read_text().split("metrics at ")[1].split("/metrics")[0]
        with urllib.request.urlopen(url + path, timeout=10) as answer:
            return str(answer.read().decode())

    def reload(self, settings: str) -> None:
        self.config.write_text(settings)
        self.reported = ""
        self.process.send_signal(signal.SIGHUP)
        self.until(lambda: self.has_reported("READY=1"))
        assert "RELOADING=1" in self.reported

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.manager.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    tmp_path.chmod(0o700)
    with Server(tmp_path / "store") as running:
        yield running


def order(action: str, store: Path) -> None:
    command = [sys.executable, "-m", "sonde", "collection", action, "--store", str(store)]
    subprocess.run(command, check=True, capture_output=True)


def test_an_agent_that_runs_takes_orders_and_settings(server: Server, tmp_path: Path) -> None:
    settings = f'server = "http://127.0.0.1:{server.port}"\nchunk_s = 1.0\nhz = 19\n'
    agent = Agent(tmp_path, settings)
    try:
        agent.until(lambda: agent.has_reported("READY=1"))
        agent.until(lambda: "system_cpu" in agent.get("/metrics"))
        order("pause", server.store)
        agent.until(lambda: "sonde_agent_paused 1.0" in agent.get("/metrics"))
        assert "system_cpu" not in agent.get("/metrics")  # what is old is not shown as new
        assert agent.get("/healthz") == "ok\n"
        agent.reported = ""
        agent.until(lambda: agent.has_reported("WATCHDOG=1"))
        order("resume", server.store)
        agent.until(lambda: "sonde_agent_paused 0.0" in agent.get("/metrics"))

        agent.reload(settings.replace("1.0", "2.0").replace("19", "49"))
        assert "changed: chunk_s" in agent.log.read_text()
        assert "stays: hz (19, not 49)" in agent.log.read_text()
        agent.reload("chunk_s = 'soon'\n")
        assert "the configuration stays as it was" in agent.log.read_text()
        assert agent.process.poll() is None
    finally:
        ended = agent.end()
    assert ended == 0, agent.log.read_text()
    assert "Traceback" not in agent.log.read_text()
